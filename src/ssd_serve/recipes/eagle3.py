"""An EAGLE-3 head for training, with the parameter names of published heads, and its loss.

Training-time test (Li et al. 2025): the head first reads the target's features, then its own output for some
steps; every step learns the target's distribution there. Written for whole sequences and independent of the
engine's head, so that tests can compare the two.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ssd_serve.recipes.decoder import Mlp, Norm, Shape, rotary_tables, rotate
from ssd_serve.recipes.teacher import Lesson

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


class TrainedHead(nn.Module):
    """A head of a target of the same width, which reads `features` of its layers and proposes the tokens
    `ids`, int64 [proposed], ascending. It has no embedding: it reads the target's."""

    ids: Tensor

    def __init__(self, shape: Shape, ids: Tensor, features: int = 3) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("ids", ids, persistent=False)
        self.fc = nn.Linear(features * shape.hidden, shape.hidden, bias=False)
        self.midlayer = HeadLayer(shape)
        self.norm = Norm(shape.hidden, shape.epsilon)
        self.lm_head = nn.Linear(shape.hidden, len(ids), bias=False)

    def forward(self, embedded: Sequence[Tensor], features: Tensor) -> list[Tensor]:
        """Return the output vectors of each step, [batch, rows, hidden] each.

        `embedded` [batch, rows, hidden] are the tokens of each step: those of step k stand k places further.
        `features` [batch, rows, features * hidden] are of the places before the first step's tokens.
        """
        rows = features.shape[1]
        cos, sin = rotary_tables(self.shape, rows + len(embedded), features.device)
        hidden, keys, values = self.fc(features), list[Tensor](), list[Tensor]()
        outputs: list[Tensor] = []
        for step, token in enumerate(embedded):
            layer = self.midlayer
            both = torch.cat((layer.input_layernorm(token), layer.hidden_norm(hidden)), dim=-1)
            query = self.split(layer.self_attn.q_proj(both), cos, sin, step)
            keys.append(self.split(layer.self_attn.k_proj(both), cos, sin, step))
            values.append(self.split(layer.self_attn.v_proj(both)))
            hidden = hidden + layer.self_attn.o_proj(self.attend(query, keys, values))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            outputs.append(hidden)
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """Map output vectors [..., hidden] to logits [..., proposed]."""
        result: Tensor = self.lm_head(self.norm(outputs))
        return result

    def split(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, step: int = 0) -> Tensor:
        """[batch, rows, heads * head] to [batch, heads, rows, head], rotated to the places of a step."""
        batch, rows, _ = x.shape
        split = x.view(batch, rows, -1, self.shape.head).transpose(1, 2)
        if cos is None or sin is None:
            return split
        return rotate(split, cos[step : step + rows], sin[step : step + rows])

    def attend(self, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """A row sees the first step's rows up to its own, and of every later step its own row only."""
        batch, heads, rows, head = query.shape
        group = heads // self.shape.kv_heads
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


def steps_of(
    head: TrainedHead, embedding: Tensor, tokens: Tensor, lesson: Lesson, steps: int
) -> list[tuple[Tensor, Tensor]]:
    """The head's logits [batch, rows, proposed] and the target's [batch, rows, vocabulary] at each step, of
    tokens that the target has read and its embedding [vocabulary, hidden]."""
    if lesson.features is None:
        raise ValueError("a head reads features")
    rows = tokens.shape[1] - steps
    with torch.autocast(tokens.device.type, torch.bfloat16):
        embedded = functional.embedding(tokens, embedding)
        shifted = [embedded[:, 1 + step : 1 + step + rows] for step in range(steps)]
        outputs = head(shifted, lesson.features[:, :rows].float())
        truth = [lesson.logits[:, 1 + step : 1 + step + rows] for step in range(steps)]
        return [(head.logits(own), true) for own, true in zip(outputs, truth, strict=True)]


def head_loss(head: TrainedHead, embedding: Tensor, tokens: Tensor, lesson: Lesson, steps: int) -> Tensor:
    """Return the cross entropy against the target over the proposed tokens and all steps, in nats a token."""
    total, weight = torch.zeros((), device=tokens.device), 1.0
    for guesses, truth in steps_of(head, embedding, tokens, lesson, steps):
        wanted = functional.softmax(truth.float()[..., head.ids], dim=-1)
        total = total - weight * (wanted * functional.log_softmax(guesses.float(), dim=-1)).sum(-1).mean()
        weight *= STEP_WEIGHT
    return total


@torch.no_grad()
def agreement_by_step(
    head: TrainedHead, embedding: Tensor, tokens: Tensor, lesson: Lesson, steps: int
) -> list[float]:
    """Share of places at which both choose the same at temperature 0, by how many of its own words the head
    has gone on from."""
    return [
        float((head.ids[guesses.argmax(-1)] == truth.argmax(-1)).float().mean())
        for guesses, truth in steps_of(head, embedding, tokens, lesson, steps)
    ]
