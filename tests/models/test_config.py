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
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024},
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.5,
        "truncate": False,
    },
]


def parse_config(raw: dict[str, Any]) -> DecoderConfig:
    config: DecoderConfig = describe(raw).config
    return config


@pytest.mark.parametrize("parameters", ROPES)
@pytest.mark.parametrize("old", [False, True])
def test_rope(parameters: dict[str, Any], old: bool) -> None:
    raw = {**BASE, "rope_parameters": parameters}
    if old:
        rest = {("type" if key == "rope_type" else key): value for key, value in parameters.items()}
        raw = {**BASE, "rope_theta": rest.pop("rope_theta"), "rope_scaling": rest}
    rope = parse_config(raw).rope
    options: Any = {**BASE, "rope_parameters": parameters}
    config = transformers.LlamaConfig(**options)
    kind = parameters["rope_type"]
    if kind == "default":
        expected, factor = 1.0 / (5e5 ** (torch.arange(0, 16, 2).float() / 16)), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
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
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0}}, "without mscale"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config({**BASE, **change})


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
