"""An EAGLE-3 head as the draft of a real target, in this process and in another; what does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ssd_serve import LLM, SamplingParams
from ssd_serve.errors import CheckpointError

HIDDEN, VOCABULARY, PROPOSED, KEYS = 384, 4096, 1024, 128
"""Those of the embedded target; the head proposes every fourth token."""
SETTINGS: dict[str, Any] = {
    "dtype": "fp32",
    "native_kernels": False,
    "kv_memory_mb": 32,
    "draft_kv_memory_mb": 16,
    "speculation_may_stop": False,
}
PROMPTS = ["def read_lines(path):\n", "import os\n", "class Node:\n    def __init__(self"]
PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one, which reads the target's embedding."""
    folder = tmp_path_factory.mktemp("head")
    source = torch.Generator().manual_seed(1)
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "lm_head": (PROPOSED, HIDDEN),
        "midlayer.self_attn.q_proj": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (KEYS, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (KEYS, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj": (2 * HIDDEN, HIDDEN),
        "midlayer.mlp.up_proj": (2 * HIDDEN, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, 2 * HIDDEN),
    }
    tensors = {
        f"{name}.weight": 0.05 * torch.randn(shape, generator=source) for name, shape in shapes.items()
    }
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(HIDDEN)
    tensors["norm.weight"] = torch.ones(HIDDEN)
    tensors["d2t"] = 3 * torch.arange(PROPOSED)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "draft_vocab_size": PROPOSED,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_it_drafts_and_the_texts_are_those_of_plain_decoding(head: Path, mode: str, tmp_path: Path) -> None:
    with LLM(mode="ar", cache_dir=tmp_path, **SETTINGS) as plain:
        expected = [each.token_ids for each in plain.generate(PROMPTS, PARAMS)]
    drafts = f"{head},ngram" if mode == "sd" else str(head)
    with LLM(draft=drafts, eagle_layers="0,2,4", mode=mode, cache_dir=tmp_path, **SETTINGS) as llm:
        found = llm.generate(PROMPTS, PARAMS)
    assert [each.token_ids for each in found] == expected
    assert sum(each.figures.drafted for each in found) > 0


@pytest.mark.parametrize(
    ("layers", "message"),
    [(None, "of a target of 5 .*name them with SSD_EAGLE_LAYERS"), ("0,2,5", "the target has 5")],
)
def test_layers_that_the_target_does_not_have(head: Path, layers: str | None, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        LLM(draft=str(head), eagle_layers=layers, mode="sd", **SETTINGS)
