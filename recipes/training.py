"""Trains the embedded pair: a target, and in the same loop a draft distilled from it.

Early on both learn from the text: a target that still changes fast is a poor teacher (a draft that learned
from it alone stood 0.4 nats behind one that learned from the text). Later the draft learns from the target's
current logits on the same batch, so there is no separate pass of the teacher; when the target's learning rate
has reached zero, the draft finishes alone. Knows models and token streams; does not know requests or how
drafts are used.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ssd_serve.recipes.data import Ids, Sampler, evaluation_windows
from ssd_serve.recipes.decoder import Decoder, Shape, initialise
from ssd_serve.recipes.optimiser import Optimiser, Rates, Schedule
from ssd_serve.recipes.workspace import Workspace

ARGMAX_WEIGHT = 0.3
"""Weight of the target's first choice beside its distribution: a draft is judged by its first guess."""


@dataclass(frozen=True)
class Phase:
    """From this share of the time on, train on batches of `rows` windows of `length` tokens."""

    progress: float
    rows: int
    length: int


EMBEDDED_TARGET = Shape(4096, 384, layers=5, heads=6, kv_heads=2, head=64, intermediate=768)
EMBEDDED_DRAFT = Shape(4096, 256, layers=2, heads=4, kv_heads=2, head=64, intermediate=704)
MUON_RATES = Rates()


@dataclass(frozen=True)
class Recipe:
    """What is trained and how; the defaults make the embedded pair."""

    target: Shape = EMBEDDED_TARGET
    draft: Shape = EMBEDDED_DRAFT
    phases: tuple[Phase, ...] = (Phase(0.0, 8, 512), Phase(0.35, 4, 1024))
    distil_from: float = 0.55
    distil_to: float = 0.85
    """Between these shares of the time the draft's loss moves from the text to the target's logits."""
    evaluation_windows: int = 12
    target_share: float = 0.92
    """The target's learning rate reaches zero at this share of the time; the rest is the draft's alone."""
    target_rates: Rates = MUON_RATES
    draft_rates: Rates = MUON_RATES
    seed: int = 0
    compiled: bool = True
    report_seconds: float = 300.0
    checkpoint_seconds: float = 240.0


JointLoss: TypeAlias = Callable[[Decoder, Decoder, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Training:
    """The state of one training: models, optimisers, counters and the place in the data."""

    def __init__(self, recipe: Recipe, workspace: Workspace, schedule: Schedule) -> None:
        self.recipe = recipe
        self.workspace = workspace
        self.schedule = schedule
        self.target, self.draft = Decoder(recipe.target), Decoder(recipe.draft)
        initialise(self.target, recipe.seed)
        initialise(self.draft, recipe.seed + 1)
        self.target_optimiser = Optimiser(self.target, recipe.target_rates)
        self.draft_optimiser = Optimiser(self.draft, recipe.draft_rates)
        self.sampler = Sampler(workspace.stream(), recipe.seed)
        self.step = 0
        self.tokens = 0
        self.worked = 0.0  # seconds in steps, over all runs
        self.history: list[dict[str, float]] = []
        wrap: Callable[[Any], Any] = (
            (lambda f: torch.compile(f, dynamic=False)) if recipe.compiled else (lambda f: f)
        )
        self._joint_loss: JointLoss = wrap(joint_loss)
        self._draft_loss: Callable[[Decoder, Decoder, Tensor], Tensor] = wrap(draft_loss)

    def target_schedule(self) -> Schedule:
        """The target's part of the schedule: the same start, an earlier end."""
        span = (self.schedule.deadline - self.schedule.start) * self.recipe.target_share
        return Schedule(
            self.schedule.start, self.schedule.start + span, self.schedule.warm_up, self.schedule.decay
        )

    def phase(self, now: float) -> Phase:
        """The phase at this time."""
        progress = self.schedule.progress(now)
        return [phase for phase in self.recipe.phases if progress >= phase.progress][-1]

    def distilled_share(self, now: float) -> float:
        """How much of the draft's loss is the target's logits at this time, 0 to 1; the rest is the text."""
        first, last = self.recipe.distil_from, self.recipe.distil_to
        return min(1.0, max(0.0, (self.schedule.progress(now) - first) / (last - first)))

    def train_step(self, now: float) -> tuple[float, float]:
        """One step at this time; returns the losses of target (nan in the finish) and draft."""
        phase = self.phase(now)
        windows = torch.from_numpy(self.sampler.batch(phase.rows, phase.length))
        inputs, wanted = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()  # [rows, length]
        target_rate, draft_rate = self.target_schedule().rate(now), self.schedule.rate(now)
        momentum = 0.85 + 0.10 * min(1.0, self.step / 200)
        if target_rate > 0.0:
            share = torch.tensor(self.distilled_share(now))  # a tensor, so that no value is compiled in
            target_loss, distil_loss = self._joint_loss(self.target, self.draft, inputs, wanted, share)
            torch.autograd.backward([target_loss + distil_loss])
            self.target_optimiser.step(target_rate, momentum)
            target_value = float(target_loss.detach())
        else:
            distil_loss = self._draft_loss(self.target, self.draft, inputs)
            torch.autograd.backward([distil_loss])
            target_value = float("nan")
        self.draft_optimiser.step(draft_rate, momentum)
        self.step += 1
        self.tokens += inputs.numel()
        return target_value, float(distil_loss.detach())

    def save(self) -> None:
        """Write the checkpoint, replacing the last one in one move."""
        state = {
            "target": self.target.state_dict(),
            "draft": self.draft.state_dict(),
            "target_optimiser": self.target_optimiser.state_dict(),
            "draft_optimiser": self.draft_optimiser.state_dict(),
            "target_shape": asdict(self.recipe.target),
            "draft_shape": asdict(self.recipe.draft),
            "schedule": asdict(self.schedule),
            "taken": dict(self.sampler.taken),
            "step": self.step,
            "tokens": self.tokens,
            "worked": self.worked,
            "history": self.history,
        }
        part = self.workspace.checkpoint.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self.workspace.checkpoint)

    def load(self) -> None:
        """Continue from the checkpoint; the schedule stays the one given to this training."""
        state = torch.load(self.workspace.checkpoint, weights_only=True)
        self.target.load_state_dict(state["target"])
        self.draft.load_state_dict(state["draft"])
        self.target_optimiser.load_state_dict(state["target_optimiser"])
        self.draft_optimiser.load_state_dict(state["draft_optimiser"])
        self.sampler.taken = state["taken"]
        self.step, self.tokens, self.worked = state["step"], state["tokens"], state["worked"]
        self.history = state["history"]


def stored_schedule(workspace: Workspace) -> Schedule:
    """The schedule that the checkpoint was trained with."""
    return Schedule(**torch.load(workspace.checkpoint, weights_only=True)["schedule"])


def joint_loss(
    target: Decoder, draft: Decoder, inputs: Tensor, wanted: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the target, and the draft's loss, in nats a token.

    inputs and wanted int64 [rows, length], share fp32 scalar: the weight of distillation in the draft's loss.
    Both losses are scalars whose gradients do not mix.
    """
    with torch.autocast("cpu", torch.bfloat16):
        logits = target(inputs)
        guesses = draft(inputs)
    labels = wanted.flatten()
    flat, guessed = logits.float().flatten(0, 1), guesses.float().flatten(0, 1)  # [rows * length, vocabulary]
    taught = (1.0 - share) * functional.cross_entropy(guessed, labels) + share * distillation(
        flat.detach(), guessed
    )
    return functional.cross_entropy(flat, labels), taught


def draft_loss(target: Decoder, draft: Decoder, inputs: Tensor) -> Tensor:
    """The draft's distillation loss against a target that no longer learns."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            logits = target(inputs)
        guesses = draft(inputs)
    return distillation(logits.float().flatten(0, 1), guesses.float().flatten(0, 1))


def distillation(teacher: Tensor, student: Tensor) -> Tensor:
    """Cross entropy against the teacher's distribution and its first choice; [n, vocabulary] each, fp32."""
    log_q = functional.log_softmax(student, dim=-1)
    soft = -(functional.softmax(teacher, dim=-1) * log_q).sum(-1).mean()
    return soft + ARGMAX_WEIGHT * functional.nll_loss(log_q, teacher.argmax(-1))


@torch.no_grad()
def quick_figures(target: Decoder, draft: Decoder, windows: Ids) -> dict[str, float]:
    """Held-out loss of both and their agreement at temperature 0, on windows int64 [n, length + 1]."""
    loss, guess_loss, agreement = 0.0, 0.0, 0.0
    for row in windows:
        tokens = torch.from_numpy(row)
        with torch.autocast("cpu", torch.bfloat16):
            logits = target(tokens[None, :-1])[0].float()  # [length, vocabulary]
            guesses = draft(tokens[None, :-1])[0].float()
        loss += float(functional.cross_entropy(logits, tokens[1:]))
        guess_loss += float(functional.cross_entropy(guesses, tokens[1:]))
        agreement += float((logits.argmax(-1) == guesses.argmax(-1)).float().mean())
    count = len(windows)
    return {"held_out_loss": loss / count, "draft_loss": guess_loss / count, "agreement": agreement / count}


def run(
    training: Training, clock: Callable[[], float] = time.time, say: Callable[[str], None] = print
) -> None:
    """Train until the deadline, with a report and a checkpoint every few minutes and at the end."""
    recipe, workspace = training.recipe, training.workspace
    windows = evaluation_windows(
        workspace.held_out(), min(1024, recipe.phases[-1].length), recipe.evaluation_windows
    )
    reported = saved = clock()
    since = training.tokens
    losses: list[tuple[float, float]] = []
    while (now := clock()) < training.schedule.deadline:
        losses.append(training.train_step(now))
        after = clock()
        training.worked += after - now
        if training.step in (1, 10, 50, 100) or after - reported >= recipe.report_seconds:
            figures = quick_figures(training.target, training.draft, windows)
            mean = np.mean(losses, axis=0)
            record = {
                "step": training.step,
                "tokens": training.tokens,
                "progress": training.schedule.progress(after),
                "tokens_per_s": (training.tokens - since) / max(after - reported, 1e-9),
                "cpu_s": time.process_time(),
                "distillation": float(mean[1]),
                **({} if np.isnan(mean[0]) else {"train_loss": float(mean[0])}),
                **figures,
            }
            training.history.append(record)
            stamp = time.strftime("%H:%M:%S", time.localtime(after))
            say(stamp + " " + json.dumps({key: round(value, 4) for key, value in record.items()}))
            losses.clear()
            reported, since = clock(), training.tokens
        if after - saved >= recipe.checkpoint_seconds:
            training.save()
            saved = after
    training.history.append(
        {"step": training.step, "tokens": training.tokens, "progress": 1.0}
        | quick_figures(training.target, training.draft, windows)
    )
    training.save()
    say("done " + json.dumps(training.history[-1]))
