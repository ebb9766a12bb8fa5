"""A DFlash head for training, with the parameter names of z-lab's: a block of tokens guessed at once.

A block is the last known token and masks; its rows see each other and the target's features of the places before.
Source: arXiv 2602.06036. Anchors are drawn for each step among the places of answers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from ssd_serve.recipes.decoder import Mlp, Norm, Shape, rotary_tables, rotate
from ssd_serve.recipes.heads import Anchors, Head, HeadRecipe, TargetParts

_GAMMA_SHARE = 0.5
"""Tokens of a block, as a share, after which the weight of a token's loss has fallen to 1 / e."""
_NORM = 0.2
_SHOWN = 128
"""Anchors of a window for figures."""


def spread_layers(target_layers: int, count: int = 5) -> list[int]:
    """Return the layers that published heads read of a target of so many."""
    last = target_layers - 3
    return [1 + round(each * (last - 1) / (count - 1)) for each in range(count)]


class BlockAttention(nn.Module):
    """Projections and norms of attention; keys and values are made of the context's features too."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head, shape.epsilon)
        self.k_norm = Norm(shape.head, shape.epsilon)

    def forward(self, rows: Tensor, context: Tensor, tables: tuple[Tensor, Tensor], at: Anchors) -> Tensor:
        """Map rows [texts, blocks, width, hidden] to the same shape; the context is [texts, length, hidden]."""
        (texts, blocks, width, _), length, head = rows.shape, context.shape[1], self.q_norm.weight.shape[0]
        cos, sin = tables
        own = at.places[..., None] + torch.arange(width, device=rows.device)  # [texts, blocks, width]
        turn = cos[own].flatten(1, 2)[:, None], sin[own].flatten(1, 2)[:, None]
        query = rotate(_split(self.q_norm(_heads(self.q_proj(rows).flatten(1, 2), head))), *turn)
        keys = rotate(_split(self.k_norm(_heads(self.k_proj(rows).flatten(1, 2), head))), *turn)
        values = _split(_heads(self.v_proj(rows).flatten(1, 2), head))
        past = rotate(_split(self.k_norm(_heads(self.k_proj(context), head))), cos[:length], sin[:length])
        known = _split(_heads(self.v_proj(context), head))
        kv, group = keys.shape[1], query.shape[1] // keys.shape[1]
        shape = texts, kv, group, blocks, width
        grouped = query.reshape(texts, kv, -1, head) * head**-0.5
        scores = (grouped @ past.transpose(-1, -2)).view(*shape, length)
        hidden = torch.arange(length, device=rows.device) >= at.context[:, None, None, :, None, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        near = keys.view(texts, kv, 1, blocks, width, head).transpose(-1, -2)
        inside = grouped.view(*shape, head) @ near
        weights = functional.softmax(torch.cat((scores, inside), dim=-1).float(), dim=-1).to(values.dtype)
        mixed = (weights[..., :length].reshape(texts, kv, -1, length) @ known).view(*shape, head)
        mixed = mixed + weights[..., length:] @ values.view(texts, kv, 1, blocks, width, head)
        merged = mixed.permute(0, 3, 4, 1, 2, 5).reshape(texts, blocks, width, -1)
        result: Tensor = self.o_proj(merged)
        return result


def _heads(x: Tensor, head: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, head)


def _split(x: Tensor) -> Tensor:
    return x.transpose(1, 2)  # [texts, rows, heads, head] to [texts, heads, rows, head]


class BlockLayer(nn.Module):
    """One layer of a block head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.epsilon)
        self.self_attn = BlockAttention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, context: Tensor, tables: tuple[Tensor, Tensor], at: Anchors) -> Tensor:
        """Map x [texts, blocks, width, hidden] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), context, tables, at)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class BlockHead(Head):
    """A head that guesses `depths` tokens after a known one from the outputs of the target's `layers`."""

    mask: Tensor

    def __init__(self, recipe: "BlockRecipe", parts: TargetParts) -> None:
        shape, gamma = replace(parts.shape, layers=recipe.depth), _GAMMA_SHARE * (recipe.depths + 1)
        super().__init__(shape, parts.ids, [math.exp(-depth / gamma) for depth in range(recipe.depths)])
        self._recipe, self._parts = recipe, parts
        self.register_buffer("mask", parts.mask, persistent=False)
        self.fc = nn.Linear(len(recipe.layers) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = Norm(shape.hidden, shape.epsilon)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.epsilon)
        self.lm_head = nn.Linear(shape.hidden, len(parts.ids), bias=False)

    def anchors(self, counted: Tensor, generator: torch.Generator | None = None) -> Anchors:
        """Draw anchors among the places that count; see `BlockRecipe` for gaps and given tokens."""
        texts, length = counted.shape
        if generator is None:
            last = length - self.depths
            places = (
                torch.linspace(1, last, min(_SHOWN, last), device=counted.device).long().expand(texts, -1)
            )
            return Anchors(places, places, torch.zeros_like(places))
        device, count = counted.device, min(self._recipe.anchors, length - 1)
        luck = torch.rand(counted.shape, generator=generator, device=device) + counted.float()
        luck[:, 0] = -1.0
        places = luck.topk(count, dim=1).indices
        most = torch.tensor([self._recipe.gap, self._recipe.given], device=device)
        luck = 4 * torch.rand((*places.shape, 2), generator=generator, device=device) - 3
        gaps, given = (luck * most).ceil().clamp(min=0).long().unbind(-1)
        return Anchors(places, (places - gaps).clamp(min=0), given)

    def forward(self, embedded: Tensor, features: Tensor, anchors: Anchors) -> list[Tensor]:
        """Return the normed rows of the masks."""
        texts, length, _ = embedded.shape
        rows = torch.arange(self.depths + 1, device=embedded.device)
        at = (anchors.places[..., None] + rows).clamp(max=length - 1)  # [texts, n, block]
        known = embedded[torch.arange(texts, device=at.device)[:, None, None], at]
        hidden = torch.where((rows > anchors.given[..., None])[..., None], self.mask, known)
        tables = rotary_tables(self.shape, length + self.depths, embedded.device)
        context = self.hidden_norm(self.fc(features))
        for layer in self.layers:
            hidden = layer(hidden, context, tables, anchors)
        return list(self.norm(hidden[:, :, 1:]).unbind(2))

    def matrices(self) -> list[tuple[Tensor, Tensor | None]]:
        """All depths share the LM head."""
        return [(self.lm_head.weight, None)] * self.depths

    def config(self) -> Mapping[str, object]:
        """z-lab's layout, with a vocabulary as in EAGLE-3; `context_gap` is a key of this project."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "draft_vocab_size": len(self.ids),
            "block_size": self.depths + 1,
            "num_target_layers": self._parts.layers,
            "layer_types": ["full_attention"] * self.shape.layers,
            "dflash_config": {
                "target_layer_ids": list(self._recipe.layers),
                "mask_token_id": self._parts.unused,
                "context_gap": self._recipe.gap > 0,
            },
        }


@dataclass(frozen=True, kw_only=True)
class BlockRecipe(HeadRecipe):
    """The training of a DFlash head.

    `depth`: its layers. `anchors`: blocks of a window. Asynchronous drafting lacks the features of tokens in
    verification. A quarter of the blocks has up to `given` tokens of the text in place of masks. A quarter lacks the
    features of up to `gap` places before the anchor.
    """

    depth: int = 3
    anchors: int = 128
    gap: int = 0
    given: int = 0
    name: str = "dflash"

    def make(self, parts: TargetParts) -> BlockHead:
        """Make a head with the target's LM head, and a smaller norm, so that first guesses are weak."""
        head = BlockHead(self, parts)
        with torch.no_grad():
            head.lm_head.weight.copy_(parts.output)
            head.norm.weight.copy_(_NORM * parts.norm)
        return head
