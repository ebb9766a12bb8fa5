"""Ballast for EAGLE heads: a copy that fits a target with ballast and says the same at a larger cost.

A target with ballast computes the same numbers in the first places of every feature, and zeros behind them.
The copy's layer is enlarged as a target's is, and what fuses the features reads those first places. Knows the
names and shapes of heads' weights, not engines.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssd_serve.base.errors import UserError
from ssd_serve.models.heads.kinds import HeadKind, head_kind
from ssd_serve.recipes.ballast import BallastSizes, Enlarger, enlarged, enlarged_config, refuse_biases
from ssd_serve.recipes.checkpoint import (
    read_checkpoint,
    replaced_folder,
    write_json,
    write_weights,
)

_QUERIES = "self_attn.q_proj.weight"
_NORMS = ("hidden_norm.weight", "norm.weight", "layernorm.weight", "fc_norm")
_KEPT = ("d2t", "t2d")


def is_head(folder: Path) -> bool:
    """Whether a folder holds an EAGLE head."""
    return (folder / "config.json").is_file() and head_kind(folder) is not None


def add_head_ballast(
    source: Path, destination: Path, hidden: int, heads: int | None = None, intermediate: int | None = None
) -> BallastSizes:
    """Write the copy of a head for targets that are `hidden` wide; returns its sizes."""
    checkpoint = read_checkpoint(source)
    config = checkpoint.config
    inner: dict[str, Any] = config.get("transformer_layer_config") or config
    refuse_biases(inner)
    old = BallastSizes.of(inner)
    if (family := inner.get("model_type", "llama")) != "llama":
        raise UserError(f"Ballast supports heads of the family llama, not {family}.")
    if int(config.get("target_hidden_size") or old.hidden) != old.hidden:
        raise UserError("Ballast supports heads that are as wide as their target.")
    read, fused = 1, 2  # EAGLE-1 fuses a token and the vector before it, and its layer reads the result
    if head_kind(source) is HeadKind.EAGLE3:
        layers = (config.get("eagle_config") or config).get("eagle_aux_hidden_state_layer_ids")
        if not layers:
            raise UserError(
                f"{source} does not name the layers that it reads, and a target with ballast has more: write "
                "eagle_aux_hidden_state_layer_ids into its config.json."
            )
        read, fused = 2, len(layers)
    new = enlarged(old, hidden, 1, heads, intermediate)
    weights = HeadEnlarger(old, new).head_weights(checkpoint.weights, read, fused)
    with replaced_folder(destination) as folder:
        write_json(folder / "config.json", _config(config, old, new))
        write_weights(weights, folder)
    return new


def _config(config: dict[str, Any], old: BallastSizes, new: BallastSizes) -> dict[str, Any]:
    wide = {"target_hidden_size": new.hidden} if "target_hidden_size" in config else {}
    if inner := config.get("transformer_layer_config"):
        return config | wide | {"transformer_layer_config": enlarged_config(inner, old, new)}
    return enlarged_config(config, old, new) | wide


class HeadEnlarger(Enlarger):
    """Makes every weight of the copy of a head."""

    def head_weights(self, source: Mapping[str, Tensor], read: int, fused: int) -> dict[str, Tensor]:
        """All weights by name, of a head that fuses `fused` vectors and whose layer reads `read` of them side
        by side. What is not known is a `UserError`."""
        queries = next((name for name in source if name.endswith(_QUERIES)), None)
        if queries is None:
            raise UserError("This head has no layer with queries, keys and values of its own.")
        prefix = queries.removesuffix(_QUERIES)
        result = {
            prefix + name: weight
            for name, weight in self.layer(source, prefix, source[queries].dtype, read).items()
            if prefix + name in source
        }
        for name, weight in source.items():
            if name not in result:
                result[name] = self.other(name, weight, fused)
        return result

    def other(self, name: str, weight: Tensor, fused: int) -> Tensor:
        """A weight that is not one of the layer's matrices."""
        last, width = name.removeprefix("model."), self.new.hidden
        if last in _KEPT:
            return weight
        if last in ("fc.weight", "fusion_fc.weight"):
            columns = self.beside(fused)
            result = self.padded(weight, (width, fused * width), filled=True, columns=columns)
            result[self.old.hidden :, columns] = 0  # the rest of the stream stays zero
            return result
        if last in ("fc.bias", "fusion_fc.bias"):
            return torch.cat((weight, weight.new_zeros(width - len(weight))))
        if last in ("lm_head.weight", "embed_tokens.weight"):
            return self.padded(weight, (len(weight), width), filled=last == "lm_head.weight")
        if last == "input_norm.weight":
            return torch.cat([self.norm(part) for part in weight.chunk(fused)])
        if weight.dim() == 1 and any(each in last for each in _NORMS):
            return self.norm(weight)
        raise UserError(f"Ballast does not know a head's weight {name}.")
