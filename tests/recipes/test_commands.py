"""The command line of the recipes."""

import argparse
from pathlib import Path

import pytest

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.commands import add_commands


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_commands(parser)
    return parser.parse_args(words)


def test_every_recipe_has_a_function() -> None:
    for words in (
        ("train-pair", "--tokens", "3"),
        ("eagle3", "a", "--layers", "0"),
        ("distil", "a", "b", "c", "d"),
        ("ballast", "a", "b"),
        ("evaluate-pair", "a", "b"),
    ):
        assert callable(parse(*words).run)


def test_a_training_sees_some_tokens() -> None:
    assert parse("train-pair", "--tokens", "5").tokens == 5
    for wrong in ("0", "-1", "many"):
        with pytest.raises(SystemExit):
            parse("train-pair", "--tokens", wrong)


def test_temperatures_of_sampling() -> None:
    words = ("evaluate-pair", "a", "b", "--sample-temperatures")
    assert parse(*words, "0.5", "1").sample_temperatures == [0.5, 1.0]
    for wrong in ("0", "-1", "nan", "inf", "warm"):
        with pytest.raises(SystemExit):
            parse(*words, wrong)


def test_a_missing_checkpoint_is_explained(tmp_path: Path) -> None:
    args = parse("train-pair", "--work", str(tmp_path), "--export-only")
    with pytest.raises(UserError, match="no trained pair"):
        args.run(args)
    args = parse("ballast", str(tmp_path), str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"config\.json"):
        args.run(args)
