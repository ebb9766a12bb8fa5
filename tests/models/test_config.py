"""config.json of every supported architecture, old and new key names, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.architectures.dense.config import DecoderConfig
from ssd_serve.models.architectures.registry import describe, load_description
from ssd_serve.models.config import model_name
from ssd_serve.models.rope import inverse_frequencies

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[dict[str, Any]] = [
    {"type": "default"},
    {"type": "linear", "factor": 4},
    {"type": "dynamic", "factor": 2.0},
    {"type": "llama3", **LLAMA3, "original_max_position_embeddings": 1024},
    {"type": "llama3", **LLAMA3},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"type": "yarn", "factor": None, "original_max_position_embeddings": 64},
    {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 1024, "finetuned": True},
    {"type": "yarn", "factor": 0.5},
    {"type": "yarn", "factor": 4, "attention_factor": 1.25, "beta_fast": None, "truncate": None},
    {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 1.0},
    {"type": "yarn", "factor": 40, "mscale": 0.707},
    {"type": "yarn", "factor": 2.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {"type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 32},
]
"""Rope sections of public configurations, and their edges."""


def parse_config(raw: dict[str, Any]) -> DecoderConfig:
    config: DecoderConfig = describe(raw).config
    return config


def spellings(section: dict[str, Any]) -> list[dict[str, Any]]:
    """The same section under old and new names of its keys, and where its neighbours may stand."""
    kind = section["type"]
    rest = {key: value for key, value in section.items() if key != "type"}
    original = {key: rest[key] for key in rest if key.startswith("original")}
    shorter = {key: value for key, value in rest.items() if key not in original}
    found: list[dict[str, Any]] = [
        {"rope_theta": 5e5, "rope_scaling": section},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": kind, "type": "other", **rest}},
        {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, "partial_rotary_factor": 1.0, **rest}},
        {
            "rope_theta": 5e5,
            "rope_parameters": {"rope_type": "linear", "factor": 9.0},
            "rope_scaling": section,
        },
    ]
    return [*found, {"rope_theta": 5e5, **original, "rope_scaling": {"type": kind, **shorter}}]


@pytest.mark.parametrize("section", ROPES)
def test_rope_equals_transformers_in_every_spelling(section: dict[str, Any]) -> None:
    for spelling in spellings(section):
        options: Any = json.loads(json.dumps({**BASE, **spelling}))  # the library changes what it is given
        config = transformers.LlamaConfig(**options)
        kind = section["type"]
        expected, factor = 1.0 / (5e5 ** (torch.arange(0, 16, 2).float() / 16)), 1.0
        if kind != "default":
            expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        rope = parse_config({**BASE, **spelling}).rope
        torch.testing.assert_close(inverse_frequencies(rope, 16), expected, rtol=1e-6, atol=0)
        assert rope.attention_factor == pytest.approx(factor)


def test_old_llama_defaults() -> None:
    config = parse_config({**BASE, "rope_scaling": None, "sliding_window": 5, "eos_token_id": 2})
    assert (config.kv_heads, config.head_dim, config.rope.theta) == (4, 16, 10000.0)
    assert not any((config.tied, config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))
    assert config.windows == (None,) * 4
    assert config.eos_token_ids == (2,)


def test_dynamic_scaling_is_plain_rope_up_to_the_original_context() -> None:
    scaling = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 2048}
    config = parse_config({**BASE, "rope_scaling": scaling})
    assert (config.rope.kind, config.context) == ("default", 2048)


def test_windows() -> None:
    mistral = {**BASE, "architectures": ["MistralForCausalLM"], "sliding_window": 99}
    assert parse_config(mistral).windows == (99,) * 4
    assert parse_config({**mistral, "sliding_window": None}).windows == (None,) * 4
    qwen = {**BASE, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 99, "max_window_layers": 3}
    assert parse_config(qwen).windows == (None,) * 4
    assert parse_config({**qwen, "use_sliding_window": True}).windows == (None, None, None, 99)
    types = ["sliding_attention", "full_attention"] * 2
    qwen = {**qwen, "use_sliding_window": True, "layer_types": types}
    assert parse_config(qwen).windows == (99, None, 99, None)


def test_biases_and_norms() -> None:
    qwen2 = parse_config({**BASE, "architectures": ["Qwen2ForCausalLM"]})
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = parse_config({**BASE, "architectures": ["Qwen3ForCausalLM"], "attention_bias": True})
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (True, True, True, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported are Llama"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"hidden_size": None}, "hidden_size must be a positive integer"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised .awq."),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope of type linear needs factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "needs low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}}, "yarn needs factor"),
        (
            {"rope_scaling": {"type": "linear", "factor": None}},
            "factor of the rope must be a positive number",
        ),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor of the rope must be a positive number"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "attn_factor": 1.0}}, "without effect: attn_factor"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "is not above low_freq"),
        ({"rope_parameters": {"full_attention": {}}}, "without effect: full_attention"),
        ({"rope_scaling": [1]}, "must be an object"),
        ({"rope_theta": None}, "rope_theta of the rope must be a positive number"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config({**BASE, **change})


def test_keys_that_nothing_reads_are_named() -> None:
    raw = {
        **BASE,
        "rope_interleaved": True,
        "logit_scale": 0.5,
        "use_cache": True,
        "tie": None,
        "bias": False,
    }
    assert describe(raw).unread == ("rope_interleaved", "logit_scale")
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        config = getattr(transformers, f"{name}Config")().to_dict()
        assert describe({**config, "architectures": [f"{name}ForCausalLM"]}).unread == ()


def test_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        load_description(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_description(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read"):
        load_description(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert load_description(tmp_path).config.eos_token_ids == (2, 5)


def test_names() -> None:
    cache = Path("/cache/models--owner--some--name/snapshots/0123abc")
    assert model_name(cache) == "owner/some--name"
    assert model_name(Path("/x/models/embedded/draft")) == "embedded-draft"
    assert model_name(Path("/x/my-model")) == "my-model"
