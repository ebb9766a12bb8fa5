"""The training loop of drafts: steps, checkpoints, and a schedule that counts tokens.

A training that is stopped and resumed ends with the weights that it would have had without the stop.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.data import Sampler, Stream
from ssd_serve.recipes.optimiser import Optimiser, Rates, Schedule
from ssd_serve.recipes.processes import ALONE, TrainingProcess


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training on `tokens` tokens in all, in steps of `rows` windows of `length` tokens.

    `compiled` concerns the part of the loss that is computed from the teacher's output.
    """

    tokens: int
    rows: int
    length: int
    seed: int
    compiled: bool = True
    report_seconds: float = 300.0
    checkpoint_seconds: float = 240.0

    @property
    def min_tokens(self) -> int:
        """Tokens of text that the training needs at least."""
        return 4 * self.length


M = TypeVar("M", bound=nn.Module)
Loss: TypeAlias = Callable[[M, Tensor], Tensor]
"""Loss of a model on windows int64 [rows, length]: nats a token, a scalar."""


class Training(Generic[M]):
    """The state of a training: weights, optimiser, counters and the place in the data."""

    def __init__(
        self,
        recipe: Recipe,
        rates: Rates,
        model: M,
        stream: Stream,
        checkpoint: Path,
        loss: Loss[M],
        process: TrainingProcess = ALONE,
    ) -> None:
        """`model` must begin with the same weights in each process."""
        process.check(recipe.rows)
        self.process = process
        self.recipe = recipe
        self.checkpoint = checkpoint
        self.schedule = Schedule(recipe.tokens)
        self.model = model
        self.optimiser = Optimiser(model, rates)
        self.sampler = Sampler(stream, recipe.seed)
        self.step = 0
        self.tokens = 0
        self.worked = 0.0  # seconds in steps, over all runs
        self.history: list[dict[str, float]] = []
        self._loss = loss

    def train_step(self) -> float:
        """Run one step and return its loss."""
        batch = torch.from_numpy(self.sampler.batch(self.recipe.rows, self.recipe.length))
        device = next(self.model.parameters()).device
        inputs = self.process.rows(batch)[:, :-1].to(device).contiguous()  # [own rows, length]
        loss = self._loss(self.model, inputs)
        torch.autograd.backward([loss])
        loss = self.process.mean(self.model, loss)
        momentum = 0.85 + 0.10 * min(1.0, self.step / 200)
        self.optimiser.step(self.schedule.rate(self.tokens), momentum)
        self.step += 1
        self.tokens += self.recipe.rows * self.recipe.length
        return float(loss.detach())

    def save(self) -> None:
        """Write the checkpoint, replacing the last one in one move."""
        state = {
            "decoder": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "taken": dict(self.sampler.taken),
            "step": self.step,
            "tokens": self.tokens,
            "worked": self.worked,
            "history": self.history,
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self.checkpoint)

    def load(self) -> None:
        """Continue from the checkpoint; the number of tokens stays the one given to this training."""
        try:
            state: dict[str, Any] = torch.load(self.checkpoint, weights_only=True, map_location="cpu")
        except Exception as error:  # torch raises whatever its parser stumbles over
            raise UserError(
                f"{self.checkpoint} is no checkpoint; remove it to begin anew: {error}"
            ) from error
        self.model.load_state_dict(state["decoder"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.sampler.taken = state["taken"]
        self.step, self.tokens, self.worked = state["step"], state["tokens"], state["worked"]
        self.history = state["history"]


def run(
    training: Training[M],
    figures: Callable[[M], dict[str, float]],
    clock: Callable[[], float] = time.time,
    say: Callable[[str], None] = print,
) -> None:
    """Train to the last token; the first process reports and saves every few minutes and at the end."""
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
    if first:
        training.history.append({"step": training.step, "tokens": training.tokens, **figures(training.model)})
        training.save()
        say("done " + json.dumps(training.history[-1]))
