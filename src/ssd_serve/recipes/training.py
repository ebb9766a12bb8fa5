"""Trains the embedded pair: first the target on text, then the draft on what the finished target says.

Each has its own loop, checkpoint and schedule, which counts tokens: a training that is stopped and resumed on
a shared machine ends where it would have ended. A teacher that still learns is a poor one (a draft that
learned beside its target stood behind one that learned from the text), so the draft waits. Knows models and
token streams; does not know requests or how drafts are used.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.data import Ids, Sampler, Stream
from ssd_serve.recipes.decoder import Decoder, Shape
from ssd_serve.recipes.optimiser import Optimiser, Rates, Schedule
from ssd_serve.recipes.processes import ALONE, TrainingProcess

ARGMAX_WEIGHT = 0.3
"""Weight of the target's first choice beside its distribution: a draft is judged by its first guess."""


@dataclass(frozen=True)
class Phase:
    """From this share of the tokens on, train on batches of `rows` windows of `length` tokens."""

    progress: float
    rows: int
    length: int


@dataclass(frozen=True)
class Recipe:
    """How one model is trained."""

    shape: Shape
    tokens: int
    phases: tuple[Phase, ...] = (Phase(0.0, 16, 512), Phase(0.7, 8, 1024))
    rates: Rates = field(default_factory=Rates)
    seed: int = 0
    compiled: bool = True
    report_seconds: float = 300.0
    checkpoint_seconds: float = 240.0


TARGET = Recipe(Shape(4096, 384, layers=5, heads=6, kv_heads=2, head=64, intermediate=768), tokens=60_000_000)
DRAFT = Recipe(
    Shape(4096, 256, layers=2, heads=4, kv_heads=2, head=64, intermediate=704), tokens=12_000_000, seed=1
)
"""The embedded pair."""


@dataclass(frozen=True, kw_only=True)
class TaughtRecipe:
    """How a model is trained whose teacher is the engine's own: on steps of `rows` windows of `length`
    tokens. What is compiled is a part of the loss."""

    tokens: int
    rows: int
    length: int
    seed: int
    compiled: bool = True
    report_seconds: float = 300.0
    checkpoint_seconds: float = 240.0

    @property
    def least(self) -> int:
        """Tokens of text that it needs."""
        return 4 * self.length

    def of_shape(self, shape: Shape, rates: Rates) -> Recipe:
        """The training of a model of these sizes."""
        return Recipe(
            shape,
            tokens=self.tokens,
            phases=(Phase(0.0, self.rows, self.length),),
            rates=rates,
            seed=self.seed,
            compiled=False,
            report_seconds=self.report_seconds,
            checkpoint_seconds=self.checkpoint_seconds,
        )


M = TypeVar("M", bound=nn.Module)
Loss: TypeAlias = Callable[[M, Tensor, Tensor], Tensor]
"""Of a model on inputs and the tokens that follow them, int64 [rows, length] each: nats a token, a scalar."""


class Training(Generic[M]):
    """The state of one model's training: weights, optimiser, counters and the place in the data."""

    def __init__(
        self,
        recipe: Recipe,
        model: M,
        stream: Stream,
        checkpoint: Path,
        loss: Loss[M],
        process: TrainingProcess = ALONE,
    ) -> None:
        """The model has the weights that it begins with, the same ones in each process."""
        for phase in recipe.phases:
            process.check(phase.rows)
        self.process = process
        self.recipe = recipe
        self.checkpoint = checkpoint
        self.schedule = Schedule(recipe.tokens)
        self.model = model
        self.optimiser = Optimiser(model, recipe.rates)
        self.sampler = Sampler(stream, recipe.seed)
        self.step = 0
        self.tokens = 0
        self.worked = 0.0  # seconds in steps, over all runs
        self.history: list[dict[str, float]] = []
        self._loss: Loss[M] = torch.compile(loss, dynamic=False) if recipe.compiled else loss

    def phase(self) -> Phase:
        """The phase at this many tokens."""
        progress = self.schedule.progress(self.tokens)
        return [phase for phase in self.recipe.phases if progress >= phase.progress][-1]

    def train_step(self) -> float:
        """One step; returns the loss."""
        phase = self.phase()
        batch = torch.from_numpy(self.sampler.batch(phase.rows, phase.length))
        windows = self.process.rows(batch).to(device_of(self.model))
        inputs, wanted = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()  # [own rows, length]
        loss = self._loss(self.model, inputs, wanted)
        torch.autograd.backward([loss])
        loss = self.process.mean(self.model, loss)
        momentum = 0.85 + 0.10 * min(1.0, self.step / 200)
        self.optimiser.step(self.schedule.rate(self.tokens), momentum)
        self.step += 1
        self.tokens += phase.rows * phase.length
        return float(loss.detach())

    def save(self) -> None:
        """Write the checkpoint, replacing the last one in one move."""
        state = {
            "decoder": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "shape": asdict(self.recipe.shape),
            "taken": dict(self.sampler.taken),
            "step": self.step,
            "tokens": self.tokens,
            "of_tokens": self.recipe.tokens,
            "worked": self.worked,
            "history": self.history,
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self.checkpoint)

    def load(self) -> None:
        """Continue from the checkpoint; the number of tokens stays the one given to this training."""
        state = read_state(self.checkpoint)
        self.model.load_state_dict(state["decoder"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.sampler.taken = state["taken"]
        self.step, self.tokens, self.worked = state["step"], state["tokens"], state["worked"]
        self.history = state["history"]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What `Training.save` wrote."""
    try:
        state: dict[str, Any] = torch.load(checkpoint, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises whatever its parser stumbles over
        raise UserError(f"{checkpoint} is no checkpoint; remove it to begin anew: {error}") from error
    return state


def device_of(model: nn.Module) -> torch.device:
    """Where its weights are."""
    return next(model.parameters()).device


def text_loss(model: Decoder, inputs: Tensor, wanted: Tensor) -> Tensor:
    """Cross entropy of the text."""
    with torch.autocast(inputs.device.type, torch.bfloat16):
        logits = model(inputs)
    return functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())


def taught_by(target: Decoder) -> Loss[Decoder]:
    """The loss of a draft whose teacher is a target that no longer learns."""

    def loss(model: Decoder, inputs: Tensor, _wanted: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            with torch.no_grad():
                logits = target(inputs)
            guesses = model(inputs)
        return distillation(logits.float().flatten(0, 1), guesses.float().flatten(0, 1))

    return loss


def distillation(teacher: Tensor, student: Tensor) -> Tensor:
    """Cross entropy against the teacher's distribution and its first choice; [n, vocabulary] each, fp32."""
    log_q = functional.log_softmax(student, dim=-1)
    soft = -(functional.softmax(teacher, dim=-1) * log_q).sum(-1).mean()
    return soft + ARGMAX_WEIGHT * functional.nll_loss(log_q, teacher.argmax(-1))


@torch.no_grad()
def held_out_loss(model: Decoder, windows: Ids) -> float:
    """Nats a token on windows int64 [n, length + 1]."""
    texts = torch.from_numpy(windows).to(device_of(model))
    losses = [float(text_loss(model, tokens[None, :-1], tokens[None, 1:])) for tokens in texts]
    return sum(losses) / len(losses)


@torch.no_grad()
def agreement(target: Decoder, draft: Decoder, windows: Ids) -> float:
    """Share of positions at which both choose the same at temperature 0, on windows int64 [n, length + 1]."""
    texts = torch.from_numpy(windows).to(device_of(draft))
    with torch.autocast(texts.device.type, torch.bfloat16):
        equal = [
            target(tokens[None, :-1]).argmax(-1) == draft(tokens[None, :-1]).argmax(-1) for tokens in texts
        ]
    return float(torch.cat(equal).float().mean())


def run(
    training: Training[M],
    figures: Callable[[M], dict[str, float]],
    clock: Callable[[], float] = time.time,
    say: Callable[[str], None] = print,
) -> None:
    """Train to the last token, with a report and a checkpoint every few minutes and at the end, of the first
    process."""
    recipe, first = training.recipe, training.process.first
    reported = saved = clock()
    since = training.tokens
    losses: list[float] = []
    while training.tokens < recipe.tokens:
        began = clock()
        losses.append(training.train_step())
        now = clock()
        training.worked += now - began
        if not first:
            continue
        if training.step in (1, 10, 50, 100) or now - reported >= recipe.report_seconds:
            record = {
                "step": training.step,
                "tokens": training.tokens,
                "tokens_per_s": (training.tokens - since) / max(now - reported, 1e-9),
                "train_loss": sum(losses) / len(losses),
                **figures(training.model),
            }
            training.history.append(record)
            stamp = time.strftime("%H:%M:%S", time.localtime(now))
            say(stamp + " " + json.dumps({key: round(value, 4) for key, value in record.items()}))
            losses.clear()
            reported, since = clock(), training.tokens
        if now - saved >= recipe.checkpoint_seconds:
            training.save()
            saved = now
    if not first:
        return
    training.history.append({"step": training.step, "tokens": training.tokens, **figures(training.model)})
    training.save()
    say("done " + json.dumps(training.history[-1]))
