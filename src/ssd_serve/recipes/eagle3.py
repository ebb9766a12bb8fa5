"""An EAGLE-3 head for training, with the parameter names of published heads.

Training-time test (Li et al. 2025): the head first reads the target's features, then its own output for some
steps; every step learns the target's distribution there. Written for whole sequences and independent of the
engine's head, so that tests can compare the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from ssd_serve.recipes.decoder import Mlp, Norm, Shape, rotary_tables, rotate
from ssd_serve.recipes.heads import Anchors, Head, HeadRecipe, TargetParts
from ssd_serve.recipes.training import Rates

STEP_WEIGHT = 0.8
"""Weight of each step relative to the one before it."""


class HeadAttention(nn.Module):
    """Attention projections; queries, keys and values read two concatenated vectors."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
        self.q_proj = nn.Linear(2 * shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)


class HeadLayer(nn.Module):
    """The one layer of a head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.epsilon)
        self.hidden_norm = Norm(shape.hidden, shape.epsilon)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)
        self.mlp = Mlp(shape)


def split(x: Tensor, head: int, tables: tuple[Tensor, Tensor] | None = None, step: int = 0) -> Tensor:
    """Map [batch, rows, heads * head] to [batch, heads, rows, head], rotated to the places of a step."""
    batch, rows, _ = x.shape
    result = x.view(batch, rows, -1, head).transpose(1, 2)
    if tables is None:
        return result
    return rotate(result, *(table[step : step + rows] for table in tables))


def attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Attend to the first step's rows up to the own one, and of each later step to the own row only."""
    batch, heads, rows, head = query.shape
    group = heads // keys[0].shape[1]
    keys = [key.repeat_interleave(group, dim=1) for key in keys]
    values = [value.repeat_interleave(group, dim=1) for value in values]
    hidden = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ keys[0].transpose(-1, -2)).float().masked_fill(hidden, -torch.inf)
    own = [(query * key).float().sum(-1, keepdim=True) for key in keys[1:]]
    weights = functional.softmax(torch.cat((scores, *own), dim=-1) * head**-0.5, dim=-1).to(query.dtype)
    mixed = weights[..., :rows] @ values[0]
    for place, value in enumerate(values[1:]):
        mixed = mixed + weights[..., rows + place, None] * value
    return mixed.transpose(1, 2).reshape(batch, rows, heads * head)


class EagleHead(Head):
    """A head that reads the outputs of the target's `layers`."""

    def __init__(self, shape: Shape, ids: Tensor, layers: Sequence[int], steps: int) -> None:
        super().__init__(shape, ids, [STEP_WEIGHT**step for step in range(steps)])
        self.layers = tuple(layers)
        self.fc = nn.Linear(len(layers) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = HeadLayer(shape)
        self.norm = Norm(shape.hidden, shape.epsilon)
        self.lm_head = nn.Linear(shape.hidden, len(ids), bias=False)

    def forward(self, embedded: Tensor, features: Tensor, anchors: Anchors) -> list[Tensor]:
        """Return the normed output vectors of each step; the anchors are all places but the first and last."""
        rows = anchors.places.shape[1]
        shifted = [embedded[:, 1 + step : 1 + step + rows] for step in range(self.depths)]
        return [self.norm(outputs) for outputs in self.steps(shifted, features[:, :rows])]

    def steps(self, embedded: Sequence[Tensor], features: Tensor) -> list[Tensor]:
        """Return the output vectors of each step, [batch, rows, hidden] each.

        `embedded` [batch, rows, hidden] are the tokens of each step: those of step k stand k places further.
        `features` [batch, rows, features * hidden] are of the places before the first step's tokens.
        """
        rows, head = features.shape[1], self.shape.head
        cos, sin = rotary_tables(self.shape, rows + len(embedded), features.device)
        hidden, keys, values = self.fc(features), list[Tensor](), list[Tensor]()
        outputs: list[Tensor] = []
        for step, token in enumerate(embedded):
            layer = self.midlayer
            both = torch.cat((layer.input_layernorm(token), layer.hidden_norm(hidden)), dim=-1)
            query = split(layer.self_attn.q_proj(both), head, (cos, sin), step)
            keys.append(split(layer.self_attn.k_proj(both), head, (cos, sin), step))
            values.append(split(layer.self_attn.v_proj(both), head))
            hidden = hidden + layer.self_attn.o_proj(attend(query, keys, values))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            outputs.append(hidden)
        return outputs

    def matrices(self) -> list[tuple[Tensor, Tensor | None]]:
        """All steps share the LM head."""
        return [(self.lm_head.weight, None)] * self.depths

    def config(self) -> Mapping[str, object]:
        """The layout of SafeAILab and SpecForge."""
        layers = {"eagle_aux_hidden_state_layer_ids": list(self.layers), "use_aux_hidden_state": True}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self.ids),
            "eagle_config": layers,
        }

    def published(self) -> dict[str, Tensor]:
        """Add the inverse of `d2t`."""
        known = torch.zeros(self.shape.vocabulary, dtype=torch.bool, device=self.ids.device)
        return {**super().published(), "t2d": known.index_fill(0, self.ids, True)}


@dataclass(frozen=True, kw_only=True)
class EagleRecipe(HeadRecipe):
    """The training of an EAGLE-3 head, with `depths` steps of the training-time test."""

    peak: Rates = field(default_factory=Rates)

    def make(self, parts: TargetParts) -> EagleHead:
        """Make a head with the target's LM head and norm."""
        head = EagleHead(parts.shape, parts.ids, self.layers, self.depths)
        with torch.no_grad():
            head.lm_head.weight.copy_(parts.output)
            head.norm.weight.copy_(parts.norm)
        return head
