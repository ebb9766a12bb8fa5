"""Following docs/adding.md gives a draft source that drafts, and changes no text."""

import os
from pathlib import Path
from typing import Any

import pytest

from ssd_serve import LLM, SamplingParams
from ssd_serve.base.errors import CheckpointError, SettingsError
from tests.adding_page import follow, install
from tests.end_to_end.tiny_pair import write_pair

PROMPTS = ["one two one two one two", "abcabcabcabc", "x"]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow("A draft source", tmp_path, monkeypatch)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """A random target, which needs no draft model."""
    return {
        "target": write_pair(tmp_path / "pair")[0],
        "dtype": "fp32",
        "native_kernels": False,
        "kv_memory_mb": 16,
        "context": 128,
        "speculation_may_stop": False,
        "cache_dir": tmp_path / "cache",
    }


@pytest.mark.usefixtures("page")
@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_it_drafts_and_the_texts_are_those_of_plain_decoding(
    settings: dict[str, Any], temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=40)
    with LLM(**settings, mode="ar") as plain:
        expected = plain.generate(PROMPTS, params)
    with LLM(**settings, draft="prompt-lookup", mode="sd") as llm:
        found = llm.generate(PROMPTS, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert sum(each.figures.accepted for each in expected) == 0
    assert sum(each.figures.accepted for each in found) > 0


@pytest.mark.slow
def test_installed_as_a_package_of_its_own_it_drafts_in_worker_processes(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("A draft source", tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    params = SamplingParams(temperature=0.0, max_tokens=40)
    with LLM(**settings, mode="ar") as plain:
        expected = plain.generate(PROMPTS, params)
    with LLM(**settings, draft="prompt-lookup", mode="ssd") as llm:
        found = llm.generate(PROMPTS, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert sum(each.figures.accepted for each in found) > 0


def test_a_package_whose_source_cannot_be_loaded_is_named(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("A draft source", tmp_path, monkeypatch)
    (tmp_path / "prompt_lookup.py").write_text("import nothing_like_it\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"prompt-lookup \(prompt_lookup:load_.*nothing_like_it"):
        LLM(**settings, draft="prompt-lookup", mode="sd")


def test_without_the_line_it_is_no_source(settings: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="prompt-lookup is neither a folder nor a hub id"):
        LLM(**settings, draft="prompt-lookup", mode="sd")
