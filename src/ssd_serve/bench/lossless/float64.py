"""A dense decoder in float64, slow and obvious: the reference for first differences between two runs.

It computes the same function as the engine's decoder from the same weights and the same (float32) rotation
table, one whole text at a time, without a cache.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.architectures.dense.config import DecoderConfig
from ssd_serve.models.architectures.dense.decoder import is_dense
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.rope import rotation_table


class Float64Decoder:
    """A model folder with one safetensors file, in float64, with weights rounded to `dtype` first.

    Raises `CheckpointError` for an fp8 checkpoint and for other architectures.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        description = load_description(folder)
        if not is_dense(description.architecture):
            raise CheckpointError(
                f"{folder} is of the architecture of {description.architecture.models}, for which there is "
                "no float64 decoder; use a model that is a dense decoder"
            )
        self._config: DecoderConfig = description.config
        if self._config.fp8 is not None:
            raise CheckpointError(
                f"{folder} holds fp8 weights, whose scales the float64 decoder does not apply; use a model "
                "that is not quantised"
            )
        self._weights = {
            name: (tensor if dtype is None else tensor.to(dtype)).double()
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self._rotations = rotation_table(
            self._config.rope, self._config.head_dim, self._config.context
        )  # complex64 [context, head_dim / 2]

    @torch.inference_mode()
    def last_logits(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits after the last of `tokens`: float64 [vocabulary]."""
        hidden = self._weights["model.embed_tokens.weight"][torch.tensor(tokens)]  # [tokens, hidden]
        for layer, window in enumerate(self._config.windows):
            prefix = f"model.layers.{layer}"
            normed = self._norm(hidden, f"{prefix}.input_layernorm")
            hidden = hidden + self._attend(normed, f"{prefix}.self_attn", window)
            normed = self._norm(hidden, f"{prefix}.post_attention_layernorm")
            hidden = hidden + self._mlp(normed, f"{prefix}.mlp")
        head = "model.embed_tokens" if self._config.tied else "lm_head"
        return self._linear(self._norm(hidden[-1], "model.norm"), head)

    def _attend(self, rows: torch.Tensor, name: str, window: int | None) -> torch.Tensor:
        c, count = self._config, len(rows)
        queries, keys, values = (
            self._linear(rows, f"{name}.{part}_proj").view(count, -1, c.head_dim) for part in "qkv"
        )  # [tokens, heads, head_dim]
        if c.qk_norm:
            queries, keys = self._norm(queries, f"{name}.q_norm"), self._norm(keys, f"{name}.k_norm")
        queries, keys = self._rotate(queries), self._rotate(keys)
        group = c.heads // c.kv_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * c.head_dim**-0.5
        age = torch.arange(count)[:, None] - torch.arange(count)  # [query, key]
        hidden = (age < 0) | (age >= (window or count))
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        return self._linear(torch.einsum("hqk,khd->qhd", weights, values).flatten(1), f"{name}.o_proj")

    def _rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate element i of a head with element i + head_dim / 2."""
        turn = self._rotations[: len(heads), None].to(torch.complex128)  # [tokens, 1, head_dim / 2]
        first, second = heads.chunk(2, -1)
        turned = torch.complex(first, second) * turn
        return torch.cat((turned.real, turned.imag), -1)

    def _mlp(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        gate = torch.nn.functional.silu(self._linear(rows, f"{name}.gate_proj"))
        return self._linear(gate * self._linear(rows, f"{name}.up_proj"), f"{name}.down_proj")

    def _linear(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        result = rows @ self._weights[f"{name}.weight"].T
        bias = self._weights.get(f"{name}.bias")
        return result if bias is None else result + bias

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        mean = rows.square().mean(-1, keepdim=True)
        return rows * torch.rsqrt(mean + self._config.norm_epsilon) * self._weights[f"{name}.weight"]
