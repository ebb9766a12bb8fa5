"""The draft sources of docs/adding.md draft, and change no text."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ssd_serve import LLM, SamplingParams
from ssd_serve.base.errors import CheckpointError, SettingsError
from tests.adding_page import follow, install
from tests.end_to_end.tiny_pair import write_pair

PROMPTS = ["one two one two one two", "abcabcabcabc", "x"]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow("A draft source", tmp_path, monkeypatch)


@pytest.fixture
def settings(tmp_path: Path, cache_dir: Path) -> dict[str, Any]:
    return {
        "target": write_pair(tmp_path / "pair")[0],
        "dtype": "fp32",
        "native_kernels": False,
        "kv_memory_mb": 16,
        "context": 128,
        "speculation_may_stop": False,
        "cache_dir": cache_dir,
    }


@pytest.mark.usefixtures("page")
@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_a_source_by_name_drafts_and_changes_no_text(settings: dict[str, Any], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=40)
    with LLM(**settings, mode="ar") as plain:
        expected = plain.generate(PROMPTS, params)
    with LLM(**settings, draft="prompt-lookup", mode="sd") as llm:
        found = llm.generate(PROMPTS, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert sum(each.figures.accepted for each in expected) == 0
    assert sum(each.figures.accepted for each in found) > 0


@pytest.mark.slow
def test_an_installed_source_drafts_in_worker_processes(
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


def test_an_installed_source_that_fails_to_import_is_named_in_the_error(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("A draft source", tmp_path, monkeypatch)
    (tmp_path / "prompt_lookup.py").write_text("import nothing_like_it\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"prompt-lookup \(prompt_lookup:load_.*nothing_like_it"):
        LLM(**settings, draft="prompt-lookup", mode="sd")


def test_an_unregistered_name_is_no_source(settings: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="prompt-lookup is neither a folder, a GGUF file"):
        LLM(**settings, draft="prompt-lookup", mode="sd")


@pytest.fixture
def heads(tmp_path: Path, settings: dict[str, Any]) -> Path:
    """A folder with random heads for the target's only layer."""
    raw = json.loads((Path(settings["target"]) / "config.json").read_text(encoding="utf-8"))
    folder = tmp_path / "heads"
    folder.mkdir()
    config = {"architectures": ["MedusaHeads"], "target_layer": 0, "block": 3}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = torch.randn(
        3, raw["vocab_size"], raw["hidden_size"], generator=torch.Generator().manual_seed(3)
    )
    save_file({"heads": weights}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_source_with_weights_and_features_joins_and_drafts(
    settings: dict[str, Any],
    heads: Path,
    temperature: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    follow("A draft source with weights, features or blocks", tmp_path, monkeypatch)
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=30)
    with LLM(**settings, mode="ar") as plain:
        expected = plain.generate(PROMPTS, params)
    with LLM(**settings, draft=heads, mode="sd") as llm:
        found = llm.generate(PROMPTS, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert sum(each.figures.drafted for each in found) > 0
    assert max(len(each.figures.verified_depths) for each in found) <= 4, "no tree is deeper than a block"


def test_a_source_that_reads_a_missing_layer_is_refused_at_start(
    settings: dict[str, Any], heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow("A draft source with weights, features or blocks", tmp_path, monkeypatch)
    config = {"architectures": ["MedusaHeads"], "target_layer": 1, "block": 3}
    (heads / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"reads outputs of layers \[1\], the target has 1"):
        LLM(**settings, draft=heads, mode="sd")
