"""What a model's `generation_config.json` says is taken as it is meant, or refused by file and key."""

import json
import os
import re
from pathlib import Path

import pytest

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.hub import resolve_model
from ssd_serve.sampling.validation import model_defaults


def defaults(folder: Path, **keys: object) -> dict[str, int | float]:
    (folder / "generation_config.json").write_text(json.dumps(keys), encoding="utf-8")
    return model_defaults(folder)


def test_keys_that_are_parameters_are_taken(tmp_path: Path) -> None:
    """As Qwen's and Llama's files have them; what is no parameter is left alone."""
    said = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
    others = {"bos_token_id": 1, "eos_token_id": [2, 3], "transformers_version": "4.51.0", "do_sample": True}
    found = defaults(tmp_path, **said, **others, max_new_tokens=2048)
    assert found == {**said, "max_tokens": 2048}
    assert isinstance(found["top_k"], int)


def test_without_sampling_the_best_token_is_taken(tmp_path: Path) -> None:
    assert defaults(tmp_path, do_sample=False, temperature=0.6) == {"temperature": 0.0}
    assert defaults(tmp_path, do_sample=None, temperature=1) == {"temperature": 1.0}


def test_null_and_no_file_say_nothing(tmp_path: Path) -> None:
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
def test_a_value_that_cannot_be_meant_names_file_and_key(tmp_path: Path, key: str, value: object) -> None:
    wanted = re.escape(str(tmp_path / "generation_config.json")) + f": {key}: input should be "
    with pytest.raises(CheckpointError, match=f"^{wanted}.*SSD_GENERATION_CONFIG=none$"):
        defaults(tmp_path, **{key: value})


def test_all_wrong_values_are_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"top_k: .*; top_p: "):
        defaults(tmp_path, top_k="many", top_p=7)


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot read"):
        model_defaults(tmp_path)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_embedded_models_have_a_file_that_is_understood(role: str) -> None:
    folder = resolve_model("embedded", "target" if role == "target" else "draft")
    assert os.path.isfile(folder / "generation_config.json")
    model_defaults(folder)
