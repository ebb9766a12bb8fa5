"""The picture of a training's history."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ssd_serve.recipes import head_export
from ssd_serve.recipes.curve import curve
from ssd_serve.recipes.head_export import PICTURE, write_history

HISTORY = [
    {"step": 1.0, "tokens": 1000.0, "train_loss": 7.5, "agreement_0": 0.02, "agreement_1": 0.01},
    {"step": 50.0, "tokens": 50_000.0, "train_loss": 3.25, "agreement_0": 0.5, "agreement_1": 0.25},
    {"step": 90.0, "tokens": 90_000.0, "agreement_0": 0.625, "agreement_1": 0.5},
]


def points(svg: str) -> list[int]:
    """How many marks each line has."""
    root = ElementTree.fromstring(svg)
    groups = [
        each for each in root.iter("{http://www.w3.org/2000/svg}g") if each.get("id", "").startswith("line2d")
    ]
    counts = [len([*group.iter("{http://www.w3.org/2000/svg}use")]) for group in groups]
    return sorted(count for count in counts if count > 1)


def test_every_loss_and_agreement_is_a_line_through_its_records() -> None:
    svg = curve(HISTORY)
    assert points(svg) == [2, 3, 3]
    for name in ("train loss", "agreement 0", "agreement 1", "million tokens seen"):
        assert f">{name}</text>" in svg
    assert curve(HISTORY) == svg


def test_a_history_of_nothing_is_an_empty_picture() -> None:
    assert points(curve([])) == []


def test_the_history_is_kept_without_a_library_that_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert write_history(HISTORY, tmp_path)
    assert (tmp_path / PICTURE).read_text() == curve(HISTORY)
    (tmp_path / PICTURE).unlink()
    monkeypatch.setattr(head_export, "find_spec", lambda _name: None)
    assert not write_history(HISTORY, tmp_path)
    assert not (tmp_path / PICTURE).exists()
    assert json.loads((tmp_path / "training.json").read_text()) == HISTORY
