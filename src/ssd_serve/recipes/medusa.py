"""Medusa and Hydra heads for training, with the parameter names of published heads.

Head i guesses the token i + 1 places after the last known one. Medusa (arXiv 2401.10774) reads the target's last
feature; Hydra (arXiv 2402.05109) also the embeddings of the tokens since.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ssd_serve.recipes.decoder import Shape
from ssd_serve.recipes.heads import Anchors, Head, HeadRecipe, TargetParts

HEAD_WEIGHT = 0.8
"""Weight of each head relative to the one before it."""


class ResidualBlock(nn.Module):
    """Medusa's layer; it begins as the identity."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden, hidden, bias=False)])
        nn.init.zeros_(self.layers[0].get_parameter("weight"))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to the same shape."""
        result: Tensor = x + functional.silu(self.layers[0](x))
        return result


class MedusaHeads(Head):
    """Heads of a residual layer, with an LM head each."""

    def __init__(self, shape: Shape, ids: Tensor, heads: int) -> None:
        super().__init__(shape, ids, [HEAD_WEIGHT**head for head in range(heads)])
        self.blocks = nn.ModuleList(ResidualBlock(shape.hidden) for _ in range(heads))
        self.lm_heads = nn.ModuleList(nn.Linear(shape.hidden, len(ids), bias=False) for _ in range(heads))

    def forward(self, embedded: Tensor, features: Tensor, anchors: Anchors) -> list[Tensor]:
        """Return each head's vectors of the features before the anchors."""
        del embedded  # the heads read no tokens
        known = features[:, : anchors.places.shape[1]]
        return [block(known) for block in self.blocks]

    def matrices(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the LM heads."""
        return [(head.get_parameter("weight"), None) for head in self.lm_heads]

    def config(self) -> Mapping[str, object]:
        """vLLM's layout, which knows a reduced vocabulary."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": self.depths,
            "num_hidden_layers": 1,
            "truncated_vocab_size": len(self.ids),
            "medusa_fc_bias": False,
        }

    def published(self) -> dict[str, Tensor]:
        """Name the tokens as that layout does."""
        return {**self.state_dict(), "token_map": self.ids}


class GroundedBlock(nn.Module):
    """Hydra's first layer, of `inputs` vectors; it begins as the first of them."""

    def __init__(self, hidden: int, inputs: int) -> None:
        super().__init__()
        self.linear, self.res_connection = (nn.Linear(inputs * hidden, hidden) for _ in range(2))
        with torch.no_grad():
            for tensor in (self.linear.weight, self.linear.bias, self.res_connection.bias):
                tensor.zero_()
            nn.init.eye_(self.res_connection.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs * hidden] to [..., hidden]."""
        result: Tensor = self.res_connection(x) + functional.silu(self.linear(x))
        return result


class HydraHeads(Head):
    """Heads of one grounded layer, with an LM head each."""

    def __init__(self, shape: Shape, ids: Tensor, heads: int) -> None:
        super().__init__(shape, ids, [HEAD_WEIGHT**head for head in range(heads)])
        self.hydra_mlp = nn.ModuleList(
            nn.ModuleList([GroundedBlock(shape.hidden, head + 2)]) for head in range(heads)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(shape.hidden, len(ids)) for _ in range(heads))

    def forward(self, embedded: Tensor, features: Tensor, anchors: Anchors) -> list[Tensor]:
        """Return each head's vectors; the text's own tokens are those between."""
        rows = anchors.places.shape[1]
        read, found = [features[:, :rows]], list[Tensor]()
        for depth, layers in enumerate(self.hydra_mlp.children()):
            read.append(embedded[:, 1 + depth : 1 + depth + rows])
            x = torch.cat(read, dim=-1)
            for layer in layers.children():
                x = layer(x)
            found.append(x)
        return found

    def matrices(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the LM heads."""
        return [(head.get_parameter("weight"), head.get_parameter("bias")) for head in self.hydra_lm_head]

    def config(self) -> Mapping[str, object]:
        """The layout of zankner, with a vocabulary of its own as in EAGLE-3."""
        return {
            "architectures": ["HydraModel"],
            "model_type": "hydra",
            "draft_vocab_size": len(self.ids),
            "hydra_num_heads": self.depths,
            "hydra_num_layers": 1,
            "hydra_head_arch": "mlp",
            "grounded_heads": True,
        }


@dataclass(frozen=True, kw_only=True)
class MedusaRecipe(HeadRecipe):
    """The training of `depths` Medusa heads."""

    name: str = "medusa"

    def make(self, parts: TargetParts) -> Head:
        """Make heads that begin as the target's LM head."""
        return _with_heads(MedusaHeads(parts.shape, parts.ids, self.depths), parts)


@dataclass(frozen=True, kw_only=True)
class HydraRecipe(HeadRecipe):
    """The training of `depths` grounded heads."""

    name: str = "hydra"

    def make(self, parts: TargetParts) -> Head:
        """Make heads that begin as the target's LM head."""
        return _with_heads(HydraHeads(parts.shape, parts.ids, self.depths), parts)


@torch.no_grad()
def _with_heads(head: Head, parts: TargetParts) -> Head:
    for matrix, bias in head.matrices():
        matrix.copy_(parts.output)
        if bias is not None:
            bias.zero_()
    return head
