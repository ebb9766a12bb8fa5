"""Sampling defaults: of a folder's generation_config.json, of a GGUF file, of the default model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import cast

import gguf
import pytest

from ssd_serve.base.engine_config import DEFAULT_MODEL
from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.hub import resolve_model
from ssd_serve.models.short_names import BUILT_IN, PackagedModel
from ssd_serve.sampling.model_defaults import model_defaults
from tests.models.checkpoints import make
from tests.models.gguf.files import write_model


def defaults(folder: Path, **keys: object) -> dict[str, int | float]:
    (folder / "generation_config.json").write_text(json.dumps(keys), encoding="utf-8")
    return model_defaults(folder)


def test_generation_config_sets_defaults(tmp_path: Path) -> None:
    """Keys of Qwen's and Llama's files; keys that are no parameters are ignored."""
    known = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
    others = {"bos_token_id": 1, "eos_token_id": [2, 3], "transformers_version": "4.51.0", "do_sample": True}
    found = defaults(tmp_path, **known, **others, max_new_tokens=2048)
    assert found == {**known, "max_tokens": 2048}
    assert isinstance(found["top_k"], int)


def test_do_sample_false_means_temperature_zero(tmp_path: Path) -> None:
    assert defaults(tmp_path, do_sample=False, temperature=0.6) == {"temperature": 0.0}
    assert defaults(tmp_path, do_sample=None, temperature=1) == {"temperature": 1.0}


def test_missing_generation_config_sets_nothing(tmp_path: Path) -> None:
    assert model_defaults(tmp_path) == {}
    assert defaults(tmp_path, temperature=None, top_k=None, max_new_tokens=None) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "0.6"),
        ("temperature", 1e-9),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 20.5),
        ("top_k", -2),
        ("min_p", True),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("do_sample", "yes"),
    ],
)
def test_invalid_generation_config_value_names_file_and_key(tmp_path: Path, key: str, value: object) -> None:
    wanted = re.escape(str(tmp_path / "generation_config.json")) + f": {key}: input should be "
    with pytest.raises(CheckpointError, match=f"^{wanted}.*SSD_GENERATION_CONFIG=none$"):
        defaults(tmp_path, **{key: value})


def test_generation_config_error_names_all_keys(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"top_k: .*; top_p: "):
        defaults(tmp_path, top_k="many", top_p=7)


def test_damaged_generation_config_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot read"):
        model_defaults(tmp_path)


def test_default_model_has_the_sampling_of_its_authors(tmp_path: Path) -> None:
    file = Path(cast(PackagedModel, BUILT_IN[DEFAULT_MODEL]).file).name
    assert model_defaults(tmp_path / file) == {"temperature": 0.2, "top_p": 0.9}
    assert model_defaults(tmp_path / "other.gguf") == {}


@pytest.mark.parametrize("role", ["target", "draft"])
def test_embedded_models_have_a_valid_generation_config(role: str) -> None:
    folder = resolve_model("embedded", "target" if role == "target" else "draft")
    assert os.path.isfile(folder / "generation_config.json")
    model_defaults(folder)


def test_gguf_file_brings_its_sampling(tmp_path: Path) -> None:
    """llama.cpp's keys, with the rounding of 32-bit numbers undone; keys that are no parameters are ignored."""
    keys = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.05, "mirostat": 0}
    given = {f"general.sampling.{name}": value for name, value in keys.items()}
    path = tmp_path / "model.gguf"
    write_model(path, make("llama"), lambda _name: gguf.GGMLQuantizationType.F32, tokenizer=given)
    known = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
    assert model_defaults(path) == model_defaults(tmp_path) == known
    write_model(
        path,
        make("llama"),
        lambda _name: gguf.GGMLQuantizationType.F32,
        tokenizer={"general.sampling.top_p": 7.0},
    )
    with pytest.raises(CheckpointError, match=re.escape(f"{path}: top_p: input should be ")):
        model_defaults(path)


@pytest.mark.slow
def test_workers_load_neither_pydantic_nor_the_hub_client() -> None:
    """They are 20 MB of every process."""
    code = (
        "import sys, ssd_serve.cluster.worker, ssd_serve.verifier.process, ssd_serve.drafter.process\n"
        "print({'pydantic', 'huggingface_hub.hf_api', 'ssd_serve.base.settings'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
