"""An EAGLE-3 head for training, with the parameter names of published heads: its loss, training and export.

Training-time test (Li et al. 2025): the head first reads the target's features, then its own output for some
steps; every step learns the target's distribution there. Written for whole sequences and independent of the
engine's head, so that tests can compare the two.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.base.errors import UserError
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.architectures.dense.config import DecoderConfig
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.heads.load import target_embedding, target_head, target_norm
from ssd_serve.recipes.chats import LONGEST, ChatLessons
from ssd_serve.recipes.checkpoint import llama_config, replaced_folder, write_json, write_weights
from ssd_serve.recipes.data import Ids, Workspace, evaluation_windows
from ssd_serve.recipes.decoder import Mlp, Norm, Shape, rotary_tables, rotate
from ssd_serve.recipes.training import Lesson, Rates, Recipe, Teacher, Training, run

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
    """A head as wide as its target, without an embedding of its own.

    It reads the outputs of `features` target layers and proposes the tokens `ids`, int64 [proposed], ascending.
    """

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
        """Map [batch, rows, heads * head] to [batch, heads, rows, head], rotated to the places of a step."""
        batch, rows, _ = x.shape
        split = x.view(batch, rows, -1, self.shape.head).transpose(1, 2)
        if cos is None or sin is None:
            return split
        return rotate(split, cos[step : step + rows], sin[step : step + rows])

    def attend(self, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Attend to the first step's rows up to the own one, and of each later step to the own row only."""
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
    """Return the head's logits [batch, rows, proposed] and the target's [batch, rows, vocabulary] of each step.

    `embedding` is the target's, [vocabulary, hidden].
    """
    if lesson.features is None:
        raise ValueError("a head reads features")
    rows = tokens.shape[1] - steps
    with torch.autocast(tokens.device.type, torch.bfloat16):
        embedded = functional.embedding(tokens, embedding)
        shifted = [embedded[:, 1 + step : 1 + step + rows] for step in range(steps)]
        outputs = head(shifted, lesson.features[:, :rows].float())
        truth = [_at_step(lesson.logits, step, rows) for step in range(steps)]
        return [(head.logits(own), true) for own, true in zip(outputs, truth, strict=True)]


def _at_step(places: Tensor, step: int, rows: int) -> Tensor:
    """Return what [batch, length, ...] holds at the tokens that a step reads."""
    return places[:, 1 + step : 1 + step + rows]


def head_loss(head: TrainedHead, embedding: Tensor, tokens: Tensor, lesson: Lesson, steps: int) -> Tensor:
    """Return the cross entropy against the target over the proposed tokens and all steps, in nats a token.

    The lesson's logits are those of the proposed tokens.
    """
    total, weight = torch.zeros((), device=tokens.device), 1.0
    shares = replace(lesson, logits=functional.softmax(lesson.logits.float(), dim=-1))
    for step, (guesses, wanted) in enumerate(steps_of(head, embedding, tokens, shares, steps)):
        guesses = guesses.float()
        each = torch.logsumexp(guesses, dim=-1) - (wanted * guesses).sum(-1)
        total = total + weight * _mean(each, lesson.counted, step)
        weight *= STEP_WEIGHT
    return total


def _mean(values: Tensor, counted: Tensor | None, step: int) -> Tensor:
    """Return the mean of a step's values [batch, rows] over the places that count."""
    if counted is None:
        return values.mean()
    counts = _at_step(counted, step, values.shape[1]).float()
    return (values * counts).sum() / counts.sum().clamp(min=1.0)


@torch.no_grad()
def agreement_by_step(
    head: TrainedHead, embedding: Tensor, tokens: Tensor, lesson: Lesson, steps: int
) -> list[float]:
    """Return the share of places at which both choose the same token at temperature 0, for each step.

    The lesson's logits are those of the whole vocabulary.
    """
    return [
        float(_mean((head.ids[guesses.argmax(-1)] == truth.argmax(-1)).float(), lesson.counted, step))
        for step, (guesses, truth) in enumerate(steps_of(head, embedding, tokens, lesson, steps))
    ]


_WINDOWS, _LENGTH = 12, 512
"""Held-out windows, and tokens of each, for the figures in the log."""


@dataclass(frozen=True, kw_only=True)
class HeadRecipe(Recipe):
    """The training of a head.

    `layers`: numbers of the target layers, from 0; the head reads their outputs. `proposed`: number of the most
    frequent tokens that the head can propose. `steps`: steps of the training-time test. `rate` multiplies the learning
    rates. `chats`: the workspace holds conversations.
    """

    layers: tuple[int, ...]
    proposed: int = 2048
    steps: int = 4
    tokens: int = 12_000_000
    rows: int = 16
    length: int = 384
    rate: float = 1.0
    chats: bool = False
    seed: int = 2

    @property
    def rates(self) -> Rates:
        """Return the learning rates."""
        return Rates().scaled(self.rate)


class TextLessons:
    """Texts of tokens, which the target reads anew for each step."""

    def __init__(self, workspace: Workspace, teacher: Teacher) -> None:
        self.stream, self.held_out, self._teacher = workspace.stream, workspace.held_out, teacher

    def counts(self, vocabulary: int) -> Ids:
        return np.bincount(self.stream(), minlength=vocabulary)

    def read(self, windows: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Lesson]:
        lesson = self._teacher.read(windows)
        return windows, lesson if ids is None else replace(lesson, logits=lesson.logits[..., ids])


def train_head(
    recipe: HeadRecipe,
    workspace: Workspace,
    target: Path,
    say: Callable[[str], None],
    device: str = "cpu",
    native: NativeLibrary | None = None,
) -> Training[TrainedHead]:
    """Train to the last token, from the checkpoint if there is one; return the state at the end.

    Raises `UserError` for a recipe that does not fit the target.
    """
    shape = head_shape(target)
    _check(recipe, shape, load_description(target).config.layers)
    length = min(_LENGTH, shape.context)
    places = LONGEST if recipe.chats else max(recipe.rows * recipe.length, length)
    layers = (*recipe.layers, FINAL) if recipe.chats else recipe.layers
    teacher = Teacher(target, places, layers, device, native=native)
    place, sizes = teacher.device, (shape.vocabulary, shape.hidden)
    embedding = target_embedding(target, *sizes).to(place, torch.float32)
    output = target_head(target, *sizes).to(place, torch.bfloat16)
    lessons = ChatLessons(workspace, teacher, output) if recipe.chats else TextLessons(workspace, teacher)
    torch.manual_seed(recipe.seed)
    ids = frequent_tokens(lessons.counts(shape.vocabulary), recipe.proposed).to(place)
    head = TrainedHead(shape, ids, len(recipe.layers)).to(place)
    with torch.no_grad():
        head.lm_head.weight.copy_(output[ids])
        head.norm.weight.copy_(target_norm(target, shape.hidden))
    lesson_loss = torch.compile(head_loss, dynamic=False) if recipe.compiled else head_loss

    def loss(model: TrainedHead, inputs: Tensor) -> Tensor:
        return lesson_loss(model, embedding, *lessons.read(inputs, ids), recipe.steps)

    windows = torch.from_numpy(evaluation_windows(lessons.held_out(), length, _WINDOWS)).to(place)

    def figures(model: TrainedHead) -> dict[str, float]:
        shares = [
            agreement_by_step(model, embedding, *lessons.read(each[None, :-1]), recipe.steps)
            for each in windows
        ]
        mean = np.mean(shares, axis=0)
        return {f"agreement_{step}": float(share) for step, share in enumerate(mean)}

    checkpoint = workspace.checkpoint("head")
    training = Training(recipe, recipe.rates, head, lessons.stream(), checkpoint, loss)
    if checkpoint.exists():
        training.load()
    say(f"head: {training.tokens:,} of {recipe.tokens:,} tokens")
    if training.tokens < recipe.tokens:
        run(training, figures, say=say)
    head.eval()
    return training


def frequent_tokens(counts: Ids, proposed: int) -> Tensor:
    """Return the ids of the most frequent tokens, ascending: int64 [proposed]."""
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:proposed])).to(torch.int64)


def _check(recipe: HeadRecipe, shape: Shape, target_layers: int) -> None:
    layers = list(recipe.layers)
    if sorted(set(layers)) != layers or not layers or layers[-1] >= target_layers or layers[0] < 0:
        raise UserError(f"layers {layers} cannot be read: name some of 0 to {target_layers - 1}, ascending")
    if not 0 < recipe.proposed <= shape.vocabulary:
        raise UserError(f"a head can propose 1 to {shape.vocabulary} tokens, not {recipe.proposed}")
    if recipe.length > shape.context:
        raise UserError(f"the target has a context of {shape.context} tokens, --length is {recipe.length}")
    if not 0 < recipe.steps < recipe.length:
        raise UserError(f"steps must be 1 to {recipe.length - 1}, not {recipe.steps}")


def export_head(
    head: TrainedHead, recipe: HeadRecipe, folder: Path, history: Sequence[Mapping[str, float]] = ()
) -> None:
    """Write the head in the layout of SafeAILab and SpecForge, without the embedding, which is the target's."""
    ids, vocabulary = head.ids.cpu(), head.shape.vocabulary
    config = {
        **llama_config(head.shape),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(ids),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(recipe.layers),
            "use_aux_hidden_state": True,
        },
    }
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in head.state_dict().items()
    }
    weights["d2t"] = ids - torch.arange(len(ids))
    weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    with replaced_folder(folder) as inside:
        write_json(inside / "config.json", config)
        write_weights(weights, inside)
        write_json(inside / "training.json", history)


def head_shape(target: Path) -> Shape:
    """Return the sizes of a head for this target: those of one layer, without scaled rotations."""
    config = load_description(target).config
    if not isinstance(config, DecoderConfig):
        raise UserError(f"{target} is no dense decoder: heads of others cannot be trained here.")
    return Shape(
        vocabulary=config.vocabulary,
        hidden=config.hidden,
        layers=1,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head=config.head_dim,
        intermediate=config.intermediate,
        context=config.context,
        rope_theta=config.rope.theta,
        epsilon=config.norm_epsilon,
    )
