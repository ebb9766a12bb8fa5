"""Training of heads: what all families share. A head reads a target's features and guesses the tokens that follow.

A family is a subclass of `Head` (its computation and published layout) and one of `HeadRecipe` (its sizes).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

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
from ssd_serve.recipes.decoder import Shape
from ssd_serve.recipes.training import (
    Lesson,
    Rates,
    Recipe,
    Teacher,
    Training,
    fast_products,
    product_dtype,
    run,
)


class Anchors(NamedTuple):
    """Places of the last token that a head knows: a vector of depth k is about the token k + 1 places further."""

    places: Tensor  # int64 [texts, n]
    context: Tensor  # int64 [texts, n]: features of so many places are known, at most `places`
    given: Tensor  # int64 [texts, n]: the text's own tokens stand at so many depths, which are not learnt


class Head(nn.Module, ABC):
    """A head as wide as its target, without an embedding of its own; it proposes the tokens `ids`, ascending.

    Parameters have the published names. Of `depths` tokens, `weights` are those of the cross entropy, `regressions`
    those of the distance (smooth L1) to the target's last feature, which such a head reads.
    """

    ids: Tensor

    def __init__(self, shape: Shape, ids: Tensor, weights: Sequence[float]) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("ids", ids, persistent=False)
        self.weights, self.depths = tuple(weights), len(weights)
        self.regressions = (0.0,) * self.depths

    @abstractmethod
    def forward(self, embedded: Tensor, features: Tensor, anchors: Anchors) -> list[Tensor]:
        """Return the vectors of each depth, [texts, n, hidden].

        `embedded` [texts, length, hidden] are the tokens in the target's embedding, `features` are [texts, length,
        width].
        """

    @abstractmethod
    def matrices(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the matrix [proposed, hidden] and the bias that make logits of each depth's vectors."""

    @abstractmethod
    def config(self) -> Mapping[str, object]:
        """Return what the published `config.json` has besides a Llama's."""

    def published(self) -> dict[str, Tensor]:
        """Return the tensors of the published layout."""
        gaps = self.ids - torch.arange(len(self.ids), device=self.ids.device)
        return {**self.state_dict(), "d2t": gaps}

    def anchors(self, counted: Tensor, generator: torch.Generator | None = None) -> Anchors:
        """Choose places to learn from bool [texts, length] `counted`; no generator: for figures."""
        del generator  # all places
        texts, length = counted.shape
        places = torch.arange(1, length - self.depths + 1, device=counted.device).expand(texts, -1)
        return Anchors(places, places, torch.zeros_like(places))


@dataclass(frozen=True)
class TargetParts:
    """Parts of the target that a new head takes."""

    shape: Shape
    layers: int
    ids: Tensor  # int64 [proposed], on the device
    output: Tensor  # the LM head's rows of `ids`, [proposed, hidden]
    norm: Tensor  # weight of the last norm, [hidden]
    unused: int  # a token that the texts do not contain
    mask: Tensor  # its embedding, [hidden]


@dataclass(frozen=True, kw_only=True)
class HeadRecipe(Recipe, ABC):
    """The training of a head.

    `layers`: numbers of the target layers, from 0, or `FINAL`; the head reads their outputs. `depths`: tokens that it
    guesses. `proposed`: number of the most frequent tokens that it can propose. `rate` multiplies the learning rates.
    `chats`: the workspace holds conversations. `name`: the checkpoint's in the workspace.
    """

    layers: tuple[int, ...] = (FINAL,)
    depths: int = 4
    proposed: int = 2048
    tokens: int = 12_000_000
    rows: int = 16
    length: int = 384
    rate: float = 1.0
    chats: bool = False
    seed: int = 2
    name: str = "head"
    peak: Rates = field(default_factory=lambda: Rates(head=0.001, norm=0.01))

    @property
    def rates(self) -> Rates:
        """Return the learning rates."""
        return self.peak.scaled(self.rate)

    @abstractmethod
    def make(self, parts: TargetParts) -> Head:
        """Make a new head."""


class _SoftCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of logits against distributions, in `product_dtype`; the forward makes the gradient."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, matrix: Tensor, bias: Tensor | None, wanted: Tensor) -> Tensor:
        dtype = product_dtype(vectors.device)
        narrow, rows = vectors.to(dtype), matrix.to(dtype)
        logits = (narrow @ rows.T).float()
        if bias is not None:
            logits += bias
        normaliser = logits.logsumexp(-1, keepdim=True)
        loss = (normaliser[:, 0] - (wanted * logits).sum(-1)).sum() / max(len(logits), 1)
        slope = logits.sub_(normaliser).exp_().sub_(wanted).div_(max(len(logits), 1))
        ctx.save_for_backward(slope.to(dtype), narrow, rows)
        ctx.bias = bias is not None
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slope, narrow, rows = ctx.saved_tensors
        bias = slope.float().sum(0) * grads[0] if ctx.bias else None
        matrix = (slope.T @ narrow).float() * grads[0] if ctx.needs_input_grad[1] else None
        return (slope @ rows).float() * grads[0], matrix, bias, None


soft_cross_entropy: Callable[..., Tensor] = _SoftCrossEntropy.apply
"""`_SoftCrossEntropy` of vectors, matrix, bias and distributions."""


def head_loss(
    head: Head, embedding: Tensor, tokens: Tensor, lesson: Lesson, anchors: Anchors, forward: Any = None
) -> Tensor:
    """Return the loss over the proposed tokens and all depths, in nats a token.

    The lesson's logits are those of the proposed tokens; `forward` is a compiled form of the head.
    """
    features, embedded = _features(lesson), functional.embedding(tokens, embedding)
    with fast_products(tokens.device):
        vectors: list[Tensor] = (head if forward is None else forward)(embedded, features, anchors)
    shares = functional.softmax(lesson.logits.float(), dim=-1).flatten(0, 1)
    matrices, total = head.matrices(), torch.zeros((), device=tokens.device)
    for depth, every in enumerate(vectors):
        at, counts = _labels(anchors, depth, lesson)
        own, at = every.flatten(0, 1)[counts], at[counts]
        total = total + head.weights[depth] * soft_cross_entropy(own, *matrices[depth], shares[at])
        if head.regressions[depth]:
            near = functional.smooth_l1_loss(own.float(), features.flatten(0, 1)[at])
            total = total + head.regressions[depth] * near
    return total


def _features(lesson: Lesson) -> Tensor:
    if lesson.features is None:
        raise ValueError("a head reads features")
    return lesson.features.float()


def _labels(anchors: Anchors, depth: int, lesson: Lesson) -> tuple[Tensor, Tensor]:
    """Return the rows of a depth's labels [texts * n] among those of all texts, and the numbers of those that count."""
    (texts, length), places = lesson.logits.shape[:2], anchors.places + depth
    inside = places.clamp(max=length - 1)
    counts = (places < length) & (depth >= anchors.given)
    if lesson.counted is not None:
        counts = counts & lesson.counted.gather(1, inside)
    rows = inside + length * torch.arange(texts, device=inside.device)[:, None]
    return rows.flatten(), counts.flatten().nonzero()[:, 0]


@torch.no_grad()
def held_out_figures(
    head: Head, embedding: Tensor, tokens: Tensor, lesson: Lesson, anchors: Anchors
) -> dict[str, tuple[float, int]]:
    """Count at temperature 0, for each depth, at how many of how many places both choose the same token.

    `agreement` is of all places, `accepted` of those where the text has the guesses of all depths before. The
    lesson's logits are those of the whole vocabulary.
    """
    with fast_products(tokens.device):
        vectors = head(functional.embedding(tokens, embedding), _features(lesson), anchors)
    truth = lesson.logits.flatten(0, 1).argmax(-1)
    following = functional.pad(tokens[:, 1:], (0, 1), value=-1).flatten()
    alive = torch.ones(anchors.places.numel(), dtype=torch.bool, device=tokens.device)
    found: dict[str, tuple[float, int]] = {}
    for depth, (every, (matrix, bias)) in enumerate(zip(vectors, head.matrices(), strict=True)):
        at, counts = _labels(anchors, depth, lesson)
        logits = functional.linear(every.flatten(0, 1).float(), matrix.float(), bias)
        guess = head.ids[logits.argmax(-1)]
        right = guess == truth[at]
        found[f"agreement_{depth}"] = float(right[counts].sum()), len(counts)
        still = counts[alive[counts]]
        found[f"accepted_{depth}"] = float(right[still].sum()), len(still)
        alive &= right & (guess == following[at])
    return found


_WINDOWS, _LENGTH = 12, 512
"""Held-out windows, and tokens of each, for the figures in the log."""


class TextLessons:
    """Texts of tokens; the target reads them again for each step."""

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
) -> Training[Head]:
    """Train to the last token, from the checkpoint if there is one; return the state at the end.

    Raises `UserError` for a recipe that does not fit the target.
    """
    shape = head_shape(target)
    layers = load_description(target).config.layers
    _check(recipe, shape, layers)
    length = min(_LENGTH, shape.context)
    places = LONGEST if recipe.chats else max(recipe.rows * recipe.length, length)
    read = (*(each for each in recipe.layers if each != FINAL), FINAL) if recipe.chats else recipe.layers
    teacher = Teacher(target, places, read, device, native=native)
    place, sizes = teacher.device, (shape.vocabulary, shape.hidden)
    embedding = target_embedding(target, *sizes).to(place, torch.float32)
    output = target_head(target, *sizes).to(place, product_dtype(place))
    lessons = (
        ChatLessons(workspace, teacher, output, recipe.layers)
        if recipe.chats
        else TextLessons(workspace, teacher)
    )
    counts = lessons.counts(shape.vocabulary)
    ids = frequent_tokens(counts, recipe.proposed).to(place)
    torch.manual_seed(recipe.seed)
    norm = target_norm(target, shape.hidden)
    unused = int(np.flatnonzero(counts == counts.min())[-1])
    parts = TargetParts(shape, layers, ids, output[ids].float(), norm, unused, embedding[unused])
    head = recipe.make(parts).to(place)
    forward = torch.compile(head, dynamic=False) if recipe.compiled else None

    def loss(model: Head, inputs: Tensor) -> Tensor:
        tokens, lesson = lessons.read(inputs, ids)
        generator = torch.Generator(place).manual_seed(recipe.seed * 1_000_003 + training.step)
        anchors = model.anchors(counted_places(tokens, lesson), generator)
        return head_loss(model, embedding, tokens, lesson, anchors, forward)

    windows = torch.from_numpy(evaluation_windows(lessons.held_out(), length, _WINDOWS)).to(place)

    def figures(model: Head) -> dict[str, float]:
        sums: dict[str, tuple[float, int]] = {}
        for each in windows:
            tokens, lesson = lessons.read(each[None, :-1])
            anchors = model.anchors(counted_places(tokens, lesson))
            for name, (right, count) in held_out_figures(model, embedding, tokens, lesson, anchors).items():
                before = sums.get(name, (0.0, 0))
                sums[name] = before[0] + right, before[1] + count
        shares = {name: right / max(count, 1) for name, (right, count) in sums.items()}
        chain = np.cumprod([shares[f"accepted_{depth}"] for depth in range(model.depths)])
        return {**shares, "tokens_per_round": 1.0 + float(chain.sum())}

    checkpoint = workspace.checkpoint(recipe.name)
    training = Training(recipe, recipe.rates, head, lessons.stream(), checkpoint, loss)
    if checkpoint.exists():
        training.load()
    say(f"{recipe.name}: {training.tokens:,} of {recipe.tokens:,} tokens")
    if training.tokens < recipe.tokens:
        run(training, figures, say=say)
    head.eval()
    return training


def counted_places(tokens: Tensor, lesson: Lesson) -> Tensor:
    """Return which places to learn the logits of: bool [texts, length]."""
    return torch.ones_like(tokens, dtype=torch.bool) if lesson.counted is None else lesson.counted


def frequent_tokens(counts: Ids, proposed: int) -> Tensor:
    """Return the ids of the most frequent tokens, ascending: int64 [proposed]."""
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:proposed])).to(torch.int64)


def _check(recipe: HeadRecipe, shape: Shape, target_layers: int) -> None:
    layers = [each for each in recipe.layers if each != FINAL]
    if sorted(set(layers)) != layers or not recipe.layers or {*layers} - {*range(target_layers)}:
        raise UserError(f"layers {layers} cannot be read: name some of 0 to {target_layers - 1}, ascending")
    if not 0 < recipe.proposed <= shape.vocabulary:
        raise UserError(f"a head can propose 1 to {shape.vocabulary} tokens, not {recipe.proposed}")
    if recipe.length > shape.context:
        raise UserError(f"the target has a context of {shape.context} tokens, --length is {recipe.length}")
    if not 0 < recipe.depths < recipe.length:
        raise UserError(f"a head can guess 1 to {recipe.length - 1} tokens, not {recipe.depths}")


def export_head(head: Head, folder: Path, history: Sequence[Mapping[str, float]] = ()) -> None:
    """Write the head in its published layout, with the history of its training."""
    config = {**llama_config(head.shape), **head.config()}
    weights = {
        name: value.detach().to("cpu", torch.bfloat16 if value.is_floating_point() else None).contiguous()
        for name, value in head.published().items()
    }
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
