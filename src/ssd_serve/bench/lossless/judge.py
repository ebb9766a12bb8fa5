"""Judges the first difference of a text from plain decoding: a near-tie, or an error.

The reference is a dense decoder in float64, slow and obvious. It computes the same function as the engine's decoder
from the same weights and the same (float32) rotation table, one whole text at a time, without a cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from safetensors.torch import load_file

from ssd_serve.base.errors import CheckpointError
from ssd_serve.base.messages import Submit
from ssd_serve.bench.lossless.rig import LoadedTarget, Outputs
from ssd_serve.models.architectures.dense.config import DecoderConfig
from ssd_serve.models.architectures.dense.decoder import is_dense
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.rope import rotation_table
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.parameters import is_greedy, needs_counts
from ssd_serve.sampling.processors import RowContext, TokenCounts, process

NEAR_TIE = 1e-5
"""Score gap, in float64, below which a first difference of fp32 runs is rounding."""
BF16_ROUNDING = 4 * 2.0**-8
"""Score gap of bf16 runs, relative to the largest logit: two scores, each two units in the last place off."""
Dtype: TypeAlias = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True)
class TextDifference:
    """The first difference of a request from plain decoding, and the gap of the two tokens' scores.

    `limit` is the largest gap that rounding explains.
    """

    request: int
    index: int
    gap: float
    limit: float

    @property
    def near_tie(self) -> bool:
        """True if rounding explains the difference."""
        return self.gap < self.limit


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token that differs; None for equal texts."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


class Judge:
    """Distinguishes near-ties from errors, in float64, for runs in a dtype."""

    def __init__(self, pair: LoadedTarget, dtype: Dtype = "fp32") -> None:
        self._pair = pair
        self._dtype: Dtype = dtype
        self._noise = NoiseRows(pair.vocabulary, 8)
        self._decoder: Float64Decoder | None = None

    def differences(self, submits: Sequence[Submit], plain: Outputs, found: Outputs) -> list[TextDifference]:
        """Return the first difference of each request that differs from plain decoding."""
        judged: list[TextDifference] = []
        for submit in submits:
            one, other = plain.tokens[submit.request], found.tokens[submit.request]
            index = first_difference(one, other)
            if index is not None:
                gap, limit = float("inf"), 0.0
                if index < min(len(one), len(other)):
                    gap, limit = self._gap(submit, one[:index], one[index], other[index])
                judged.append(TextDifference(submit.request, index, gap, limit))
        return judged

    def _gap(self, submit: Submit, output: Sequence[int], one: int, other: int) -> tuple[float, float]:
        """Return the gap of two tokens' scores after `output`, and the gap that rounding explains."""
        self._decoder = self._decoder or Float64Decoder(
            self._pair.folder, torch.bfloat16 if self._dtype == "bf16" else None
        )
        parameters = submit.parameters
        logits = self._decoder.last_logits([*submit.prompt, *output])
        limit = NEAR_TIE
        if self._dtype == "bf16":
            scale = 1.0 if is_greedy(parameters) else parameters.temperature
            limit = BF16_ROUNDING * float(logits.abs().max()) / scale
        counts = TokenCounts(submit.prompt, output) if needs_counts(parameters) else None
        eos = () if parameters.ignore_eos else self._pair.eos
        ends = *eos, *parameters.stop_token_ids
        scores = process(logits, parameters, RowContext(counts, (), len(output), ends))
        if not is_greedy(parameters):
            scores = scores - self._noise.rows([submit.seed], [len(submit.prompt) + len(output)])[0]
        return abs(float(scores[one]) - float(scores[other])), limit


def compared(submits: Sequence[Submit], plain: Outputs, differences: Sequence[TextDifference]) -> int:
    """Return the number of compared tokens; those of differing requests count up to the difference."""
    ends = {each.request: each.index + 1 for each in differences}
    return sum(ends.get(submit.request, len(plain.tokens[submit.request])) for submit in submits)


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
