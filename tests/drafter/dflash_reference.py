"""DFlash, DFlash 2 and DSpark heads written from their papers in plain torch, and random checkpoints of all layouts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

HIDDEN, HEADS, KEYS, SIZE, WIDE, LAYERS = 64, 4, 2, 16, 96, 3
VOCABULARY, CONTEXT, BLOCK, MASK, WINDOW, RANK, GROUP, THETA = 257, 96, 5, 190, 6, 8, 16, 10000.0
TARGET_LAYERS = 3
LAYER = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": SIZE,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": THETA,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
FORMS: dict[str, Any] = {
    "dflash": {
        **LAYER,
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK,
        "num_target_layers": TARGET_LAYERS,
        "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": MASK},
    },
    "dflash sliding": {
        **LAYER,
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK,
        "layer_types": SLIDING,
        "sliding_window": WINDOW,
        "dflash_config": {"target_layer_ids": [1, 0], "mask_token_id": MASK},
    },
    "dflash of speculators": {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "transformer_layer_config": {**LAYER, "layer_types": SLIDING, "sliding_window": WINDOW},
        "sliding_window_non_causal": True,
        "draft_vocab_size": 100,
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": MASK,
    },
    "dflash 2": {
        **LAYER,
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "layer_types": ["sliding_attention"] * LAYERS,
        "sliding_window": WINDOW,
        "dflash_config": {
            **{"block_size": BLOCK, "target_layer_ids": [0, 2], "mask_token_id": MASK},
            **{"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": 16},
            "input_embedding_scale": 1.0,
        },
    },
    "dspark": {
        **LAYER,
        "architectures": ["Qwen3DSparkModel"],
        "block_size": BLOCK,
        "target_layer_ids": [0, 2],
        "mask_token_id": MASK,
        "num_anchors": 512,
        **{"markov_rank": RANK, "markov_head_type": "vanilla"},
        **{"enable_confidence_head": True, "confidence_head_with_markov": True},
    },
    "dspark of speculators": {
        "speculators_model_type": "dspark",
        "transformer_layer_config": LAYER,
        "sample_from_anchor": True,
        "draft_vocab_size": 100,
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": MASK,
        **{"markov_rank": RANK, "markov_head_type": "gated"},
    },
}
CAUSAL: Any = {"dflash sliding": [True, False, True]}
WINDOWS: Any = {
    "dflash sliding": [WINDOW, None, WINDOW],
    "dflash of speculators": [WINDOW, None, WINDOW],
    "dflash 2": [WINDOW] * LAYERS,
}


def tensors_of(form: str) -> dict[str, Tensor]:
    """Random tensors with the published names."""
    chance = torch.Generator().manual_seed(len(form))
    config = FORMS[form]
    proposed = config.get("draft_vocab_size", VOCABULARY)

    def some(*shape: int, scale: float = 0.15) -> Tensor:
        return scale * torch.randn(shape, generator=chance)

    found = {"fc.weight": some(HIDDEN, 2 * HIDDEN)}
    found |= {f"{name}.weight": 1 + some(HIDDEN) for name in ("hidden_norm", "norm")}
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        found[f"{name}.input_layernorm.weight"] = 1 + some(HIDDEN, scale=0.5)
        found[f"{name}.post_attention_layernorm.weight"] = 1 + some(HIDDEN)
        for each, (outputs, inputs) in {
            "self_attn.q_proj": (HEADS * SIZE, HIDDEN),
            "self_attn.k_proj": (KEYS * SIZE, HIDDEN),
            "self_attn.v_proj": (KEYS * SIZE, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
            "mlp.gate_proj": (WIDE, HIDDEN),
            "mlp.up_proj": (WIDE, HIDDEN),
            "mlp.down_proj": (HIDDEN, WIDE),
        }.items():
            found[f"{name}.{each}.weight"] = some(outputs, inputs)
        for each in ("q_norm", "k_norm"):
            found[f"{name}.self_attn.{each}.weight"] = 1.5 + some(SIZE)
        for each in ("attention_conv", "mlp_conv") if form == "dflash 2" else ():
            found[f"{name}.{each}.base_kernel"] = some(2, 2, HIDDEN) + torch.tensor([1.0, 0.3])[:, None]
            found[f"{name}.{each}.kernel_projection.weight"] = some(2 * 2 * HIDDEN // GROUP, HIDDEN)
    if form == "dflash 2":
        found["candidate_selector.hidden_projection.weight"] = some(RANK, HIDDEN)
        for each in ("predecessor", "successor"):
            found[f"candidate_selector.{each}_codebook"] = some(VOCABULARY, RANK, scale=0.8)
    if "dspark" in form:
        found["markov_head.markov_w1.weight"] = some(VOCABULARY, RANK, scale=0.7)
        found["markov_head.markov_w2.weight"] = some(proposed, RANK, scale=0.7)
        found["confidence_head.proj.weight"] = some(1, HIDDEN + RANK)
        found["confidence_head.proj.bias"] = some(1)
    if "gated" in str(config):
        found["markov_head.gate_proj.weight"] = some(RANK, HIDDEN + RANK)
        found["markov_head.gate_proj.bias"] = some(RANK)
    if proposed < VOCABULARY:
        found["lm_head.weight"] = some(proposed, HIDDEN)
        found["d2t"] = torch.arange(proposed)  # id i is the target's 2 i
        found["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool)
    return found


def write(
    form: str, folder: Path, more: Mapping[str, Tensor] | None = None, **keys: Any
) -> dict[str, Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(form) | dict(more or {})
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(FORMS[form] | keys))
    return tensors


def norm(rows: Tensor, weight: Tensor) -> Tensor:
    return weight * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5)


def rotate(heads: Tensor, positions: Tensor, pairs: str = "halves") -> Tensor:
    """Rotate [rows, heads, size]; element i with i + size / 2, or neighbours."""
    angles = positions[:, None] / THETA ** (torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    if pairs == "halves":
        a, b = heads.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    a, b = heads[..., ::2], heads[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


class Reference:
    """Computes one block of one request. `wrong` names a convention to break."""

    def __init__(
        self, form: str, tensors: Mapping[str, Tensor], embedding: Tensor, head: Tensor, wrong: str = ""
    ) -> None:
        self.form, self.t, self.embedding, self.wrong = form, tensors, embedding, wrong
        self.head = tensors.get("lm_head.weight", head)
        self.causal, self.windows = CAUSAL.get(form, [False] * LAYERS), WINDOWS.get(form, [None] * LAYERS)
        if wrong == "full layers":
            self.windows = [None] * LAYERS
        if wrong == "not causal":
            self.causal = [False] * LAYERS
        if wrong == "causal":
            self.causal = [True] * LAYERS

    def rows(self, features: Tensor, first: int, text: Sequence[int], start: int) -> Tensor:
        """Normed rows [block, hidden] of a block that begins with `text` at position `start`; features are of the
        positions from `first` on."""
        block = 2 * BLOCK if self.wrong == "block width" else BLOCK
        tokens = torch.tensor([*text, *[MASK] * (block - len(text))])
        x = self.embedding[tokens]
        if "mask_embedding" in self.t and self.wrong != "mask embedding":
            x[len(text) :] = self.t["mask_embedding"]
        context = norm(features @ self.t["fc.weight"].T, self.t["hidden_norm.weight"])
        if self.wrong == "no hidden norm":
            context = features @ self.t["fc.weight"].T
        past = torch.arange(first, first + len(features))
        shift = 1 if self.wrong == "context a position late" else 0
        places = torch.arange(start, start + block)
        for layer in range(LAYERS):
            x = self.layer(f"layers.{layer}", x, context, past + shift, places, layer)
        return norm(x, self.t["norm.weight"])[:BLOCK]

    def layer(
        self, name: str, x: Tensor, context: Tensor, past: Tensor, places: Tensor, layer: int
    ) -> Tensor:
        t, pairs = self.t, "neighbours" if self.wrong == "rotary" else "halves"
        rows = norm(x, t[f"{name}.input_layernorm.weight"])
        rows, later = self.convolve(f"{name}.attention_conv", rows)
        if self.wrong == "context through the input norm":
            context = norm(context, t[f"{name}.input_layernorm.weight"])

        def heads(each: str, of: Tensor) -> Tensor:
            weight = t[f"{name}.self_attn.{each}_proj.weight"]
            made = (of @ weight.T).view(len(of), len(weight) // SIZE, SIZE)
            if each == "v" or self.wrong == "no head norms":
                return made
            return norm(made, t[f"{name}.self_attn.{each}_norm.weight"])

        known = norm(context, torch.ones(HIDDEN)) if self.wrong == "context normed again" else context
        query = rotate(heads("q", rows), places, pairs)
        key = torch.cat((rotate(heads("k", known), past, pairs), rotate(heads("k", rows), places, pairs)))
        value = torch.cat((heads("v", known), heads("v", rows)))
        at = torch.cat((past, places))
        seen = torch.ones(len(rows), len(at), dtype=torch.bool)
        if self.causal[layer]:
            seen &= at <= places[:, None]
        if (window := self.windows[layer]) is not None:
            seen &= at > places[:, None] - window
        group = HEADS // KEYS
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) / SIZE**0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, 1)).flatten(1)
        x = x + later(mixed @ t[f"{name}.self_attn.o_proj.weight"].T)
        rows = norm(x, t[f"{name}.post_attention_layernorm.weight"])
        rows, later = self.convolve(f"{name}.mlp_conv", rows)
        gate, up = (rows @ t[f"{name}.mlp.{each}_proj.weight"].T for each in ("gate", "up"))
        found: Tensor = x + later((functional.silu(gate) * up) @ t[f"{name}.mlp.down_proj.weight"].T)
        return found

    def convolve(self, name: str, rows: Tensor) -> tuple[Tensor, Any]:
        if self.form != "dflash 2" or self.wrong == "no convolution":
            return rows, lambda x: x
        numbers = rows @ self.t[f"{name}.kernel_projection.weight"].T
        numbers = numbers.view(len(rows), 2, 2, -1).repeat_interleave(GROUP, -1)
        factors = numbers + self.t[f"{name}.base_kernel"]  # [rows, side, tap, hidden]

        def mix(x: Tensor, side: int) -> Tensor:
            before = torch.cat((torch.zeros_like(x[:1]), x[:-1]))
            return factors[:, side, 0] * x + factors[:, side, 1] * before

        return mix(rows, 0), lambda x: mix(x, 1)

    def logits(self, rows: Tensor) -> Tensor:
        """Logits of the target's vocabulary, -inf for tokens that the head does not know."""
        return self.spread(rows @ self.head.T)

    def spread(self, values: Tensor) -> Tensor:
        if values.shape[-1] == VOCABULARY:
            return values
        whole = torch.full((*values.shape[:-1], VOCABULARY), -torch.inf)
        whole[..., 2 * torch.arange(values.shape[-1])] = values
        return whole

    def pair(self, before: int, row: Tensor) -> Tensor:
        """Scores of all tokens after one: [vocabulary]."""
        t = self.t
        if self.form == "dflash 2":
            vector = t["candidate_selector.predecessor_codebook"][before]
            vector = vector * (t["candidate_selector.hidden_projection.weight"] @ row)
            return t["candidate_selector.successor_codebook"] @ vector
        vector = t["markov_head.markov_w1.weight"][before]
        if "markov_head.gate_proj.weight" in t:
            gate = (
                t["markov_head.gate_proj.weight"] @ torch.cat((row, vector)) + t["markov_head.gate_proj.bias"]
            )
            vector = torch.sigmoid(gate) * vector
        return self.spread(t["markov_head.markov_w2.weight"] @ vector)
