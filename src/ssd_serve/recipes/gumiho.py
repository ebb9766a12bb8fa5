"""A Gumiho head for training, with the parameter names of AMD's: two layers in series, then parallel heads.

The layers run once for each of the first two tokens, as in drafting (training-time test); the heads read what both
runs made. Vectors come close to the target's last feature, so that the target's LM head applies. Source: arXiv
2503.10135.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from ssd_serve.recipes.decoder import Attention, Mlp, Norm, Shape, rotary_tables
from ssd_serve.recipes.eagle3 import attend, split
from ssd_serve.recipes.heads import Anchors, Head, HeadRecipe, TargetParts

_SERIAL, _BLOCKS = 2, 6
_CROSS_ENTROPY = 0.1
"""Weight of the cross entropy besides the distance of vectors."""
_PARALLEL, _DECAY = 9.0, 0.8
"""The heads' losses are divided by the first; each has the second as weight relative to the one before."""


class SerialLayer(nn.Module):
    """A Llama layer; the first has no norm of its input."""

    def __init__(self, shape: Shape, first: bool) -> None:
        super().__init__()
        self.input_layernorm = None if first else Norm(shape.hidden, shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)
        self.mlp = Mlp(shape)

    def forward(
        self,
        x: Tensor,
        tables: tuple[Tensor, Tensor],
        step: int,
        past: tuple[list[Tensor], list[Tensor]],
    ) -> Tensor:
        """Map x [batch, rows, hidden] of a step to the same shape, and append its keys and values."""
        own, head, (keys, values) = self.self_attn, self.self_attn.shape.head, past
        rows = x if self.input_layernorm is None else self.input_layernorm(x)
        keys.append(split(own.k_proj(rows), head, tables, step))
        values.append(split(own.v_proj(rows), head))
        x = x + own.o_proj(attend(split(own.q_proj(rows), head, tables, step), keys, values))
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class MlpBlock(nn.Module):
    """A linear layer and SiLU, added to its input if that is as wide; it begins as nothing."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, hidden)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., hidden]."""
        added = functional.silu(self.linear(x))
        return x + added if x.shape == added.shape else added


class GumihoHead(Head):
    """Two serial steps, then parallel heads; logits are made by the target's LM head."""

    output: Tensor

    def __init__(self, shape: Shape, ids: Tensor, output: Tensor, depths: int) -> None:
        """`output` [proposed, hidden] are the rows of the target's LM head."""
        heads = max(depths - _SERIAL, 0)
        distances = [1.0] * _SERIAL + [_DECAY ** (head + 1) / _PARALLEL for head in range(heads)]
        super().__init__(shape, ids, [_CROSS_ENTROPY * each for each in distances])
        self.regressions = tuple(distances)
        self.register_buffer("output", output, persistent=False)
        hidden = shape.hidden
        self.fc = nn.Linear(2 * hidden, hidden)
        self.layers = nn.ModuleList(SerialLayer(shape, index == 0) for index in range(_SERIAL))
        stacks = (
            nn.ModuleList(MlpBlock(hidden if block else 2 * hidden, hidden) for block in range(_BLOCKS))
            for _ in range(heads)
        )
        self.mlp = nn.ModuleDict({"mlp": nn.ModuleList(stacks)})

    def forward(self, embedded: Tensor, features: Tensor, anchors: Anchors) -> list[Tensor]:
        """Return the vectors of the serial steps, then those of the heads."""
        rows = anchors.places.shape[1]
        tables = rotary_tables(self.shape, rows + _SERIAL, embedded.device)
        past = [(list[Tensor](), list[Tensor]()) for _ in self.layers]
        vector, joined, found = features[:, :rows], list[Tensor](), list[Tensor]()
        for step in range(_SERIAL + 1):
            token = embedded[:, 1 + step : 1 + step + rows]
            joined.append(self.fc(torch.cat((token, vector), dim=-1)))
            if step == _SERIAL:
                break
            vector = joined[-1]
            for layer, kept in zip(self.layers, past, strict=True):
                vector = layer(vector, tables, step, kept)
            found.append(vector)
        both = torch.cat(joined[-_SERIAL:], dim=-1)
        for stack in self.mlp["mlp"].children():
            x = both
            for block in stack.children():
                x = block(x)
            found.append(x)
        return found

    def matrices(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the target's."""
        return [(self.output, None)] * self.depths

    def config(self) -> Mapping[str, object]:
        """A Llama of two layers."""
        return {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": len(self.ids)}

    def published(self) -> dict[str, Tensor]:
        """The target's LM head is repeated where only a part of it is used, as in EAGLE-3."""
        whole = len(self.ids) == self.shape.vocabulary
        return self.state_dict() if whole else {**super().published(), "lm_head.weight": self.output}


@dataclass(frozen=True, kw_only=True)
class GumihoRecipe(HeadRecipe):
    """The training of a Gumiho head, two of its `depths` in series; tokens beyond `proposed` are not learnt."""

    depths: int = 7
    name: str = "gumiho"

    def make(self, parts: TargetParts) -> Head:
        """Make a new head."""
        return GumihoHead(replace(parts.shape, layers=_SERIAL), parts.ids, parts.output, self.depths)
