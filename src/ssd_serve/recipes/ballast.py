"""Ballast: a copy of a Llama checkpoint that computes the same function at a larger cost.

The copy has a zero-padded residual stream, and layers with output projections of zero. It has heads and MLP
units with outputs that are multiplied by zero. So a small trained pair can replace a large one when step times
are measured: acceptance is that of the small pair, cost that of the large one.

With hidden size H padded to H', the mean square of a row shrinks by H / H'. Hence every norm's weight is
multiplied by sqrt(H / H') and epsilon by H / H'. Weights that cannot influence the result are small random
numbers, so that no engine can take a short cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssd_serve.base.errors import UserError
from ssd_serve.models.heads.kinds import head_kind
from ssd_serve.recipes.checkpoint import (
    LlamaCheckpoint,
    copy_tokenizer,
    read_checkpoint,
    replaced_folder,
    write_json,
    write_weights,
)

FILLER = 0.02
"""Standard deviation of weights that do not influence the result."""
_SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM")


@dataclass(frozen=True)
class BallastSizes:
    """The sizes that ballast changes; `head` stays."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    intermediate: int

    @staticmethod
    def of(config: dict[str, Any]) -> "BallastSizes":
        """Read the sizes that a `config.json` declares."""
        heads = int(config["num_attention_heads"])
        return BallastSizes(
            hidden=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head=int(config.get("head_dim") or config["hidden_size"] // heads),
            intermediate=int(config["intermediate_size"]),
        )


def enlarged(
    old: BallastSizes, hidden: int, layers: int, heads: int | None, intermediate: int | None
) -> BallastSizes:
    """Return the sizes of the copy; each KV head keeps its query heads and may get idle ones.

    By default heads fill `hidden`, and their number divides it, which some loaders demand; `intermediate` is
    2.75 times `hidden`. Raises `UserError` for a size below that of the source.
    """
    wanted = range(max(old.heads, -(-hidden // old.head)), hidden + 1) if heads is None else (heads,)
    layout = next((found for count in wanted if (found := head_layout(old, hidden, count))), None)
    if layout is None:
        raise UserError(
            "--heads must divide --hidden and give each KV head of the source at least its query heads."
        )
    if intermediate is None:
        intermediate = max(old.intermediate, hidden * 11 // 4)
    new = BallastSizes(hidden, layers, layout[0], layout[1], old.head, intermediate)
    for name in ("hidden", "layers", "heads", "intermediate"):
        if getattr(new, name) < getattr(old, name):
            raise UserError(f"--{name} must be at least {getattr(old, name)}, the size of the source.")
    return new


def head_layout(old: BallastSizes, hidden: int, heads: int) -> tuple[int, int] | None:
    """Return query and KV heads of the copy, in the smallest groups that hold the source's, or None."""
    if hidden % heads:
        return None
    groups = (group for group in range(old.heads // old.kv_heads, heads + 1) if heads % group == 0)
    return next(((heads, heads // group) for group in groups if heads // group >= old.kv_heads), None)


def add_ballast(
    source: Path,
    destination: Path,
    hidden: int,
    layers: int,
    heads: int | None = None,
    intermediate: int | None = None,
) -> BallastSizes:
    """Write the enlarged copy of `source` to `destination`; returns its sizes.

    Norm weights are stored in fp32: their factor is not a power of two, and rounding it would change the
    function.
    """
    checkpoint = read_checkpoint(source)
    config = checkpoint.config
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise UserError("Ballast supports no biases in attention or MLP.")
    if config.get("architectures", [None])[0] not in _SUPPORTED or head_kind(source) is not None:
        raise UserError(
            f"Ballast supports whole models ({', '.join(_SUPPORTED)}), not {config.get('architectures')}."
        )
    old = BallastSizes.of(config)
    new = enlarged(old, hidden, layers, heads, intermediate)
    weights = Enlarger(old, new).weights(checkpoint)
    with replaced_folder(destination) as folder:
        write_json(folder / "config.json", enlarged_config(config, old, new))
        write_weights(weights, folder)
        copy_tokenizer(source, folder)
    return new


def enlarged_config(config: dict[str, Any], old: BallastSizes, new: BallastSizes) -> dict[str, Any]:
    """Return the `config.json` of the copy."""
    return config | {
        "hidden_size": new.hidden,
        "num_hidden_layers": new.layers,
        "num_attention_heads": new.heads,
        "num_key_value_heads": new.kv_heads,
        "head_dim": new.head,
        "intermediate_size": new.intermediate,
        "rms_norm_eps": float(config["rms_norm_eps"]) * old.hidden / new.hidden,
    }


class Enlarger:
    """Makes the weights of the copy from those of the source; filler is random from a fixed seed."""

    def __init__(self, old: BallastSizes, new: BallastSizes) -> None:
        self.old = old
        self.new = new
        self.generator = torch.Generator().manual_seed(0)
        old_group, new_group = old.heads // old.kv_heads, new.heads // new.kv_heads
        slots = [head // old_group * new_group + head % old_group for head in range(old.heads)]
        places = torch.tensor(slots)[:, None] * old.head + torch.arange(old.head)  # [heads, head]
        self.queries = places.flatten()  # where each query dimension of the source goes

    def weights(self, checkpoint: LlamaCheckpoint) -> dict[str, Tensor]:
        """Return all weights of a model by name."""
        source = checkpoint.weights
        embedding = source["model.embed_tokens.weight"]
        vocabulary = embedding.shape[0]
        result = {
            "model.embed_tokens.weight": self.padded(embedding, (vocabulary, self.new.hidden), filled=False),
            "model.norm.weight": self.norm(source["model.norm.weight"]),
        }
        if "lm_head.weight" in source:
            head = source["lm_head.weight"]
            result["lm_head.weight"] = self.padded(head, (vocabulary, self.new.hidden), filled=True)
        for layer in range(self.new.layers):
            prefix = f"model.layers.{layer}."
            present = {name: weight for name, weight in source.items() if name.startswith(prefix)}
            for name, weight in self.layer(present, prefix, embedding.dtype).items():
                result[prefix + name] = weight
        return result

    def layer(self, source: Mapping[str, Tensor], prefix: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return one layer by names without prefix.

        A layer that the source lacks adds nothing to the residual stream.
        """
        new = self.new
        attention, kv = new.heads * new.head, new.kv_heads * new.head
        shapes = {  # name: (shape, whether padding may be filled)
            "self_attn.q_proj.weight": ((attention, new.hidden), True),
            "self_attn.k_proj.weight": ((kv, new.hidden), True),
            "self_attn.v_proj.weight": ((kv, new.hidden), True),
            "self_attn.o_proj.weight": ((new.hidden, attention), False),
            "mlp.gate_proj.weight": ((new.intermediate, new.hidden), True),
            "mlp.up_proj.weight": ((new.intermediate, new.hidden), True),
            "mlp.down_proj.weight": ((new.hidden, new.intermediate), False),
        }
        result: dict[str, Tensor] = {}
        for name, (shape, filled) in shapes.items():
            weight = source.get(prefix + name, torch.zeros(0, 0, dtype=dtype))
            rows = self.queries if "q_proj" in name else None
            columns = self.queries if "o_proj" in name else None
            result[name] = self.padded(weight, shape, filled, rows, columns)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            result[name] = self.norm(source.get(prefix + name, torch.ones(self.old.hidden)))
        return result

    def padded(
        self,
        weight: Tensor,
        shape: tuple[int, int],
        filled: bool,
        rows: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> Tensor:
        """Return a matrix of `shape`, zero or filler outside `weight`.

        `weight` lies in the upper left corner, or at the `rows` and `columns` given (int64).
        """
        result = torch.zeros(shape)
        if filled:
            result.normal_(0.0, FILLER, generator=self.generator)
        result = result.to(weight.dtype)
        if weight.numel():
            rows = torch.arange(weight.shape[0]) if rows is None else rows
            columns = torch.arange(weight.shape[1]) if columns is None else columns
            result[rows[:, None], columns] = weight
        return result

    def norm(self, weight: Tensor) -> Tensor:
        """Return a rescaled norm weight, padded with ones, which multiply zeros."""
        factor = (self.old.hidden / self.new.hidden) ** 0.5
        result = torch.ones(self.new.hidden)
        result[: len(weight)] = weight.float() * factor
        return result
