"""Trains an EAGLE-3 head for a finished target on the text of a workspace.

Goes on where it stopped. Knows what is trained on what; the loss and the engine's head live elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ssd_serve.errors import UserError
from ssd_serve.recipes.checkpoint import read_decoder
from ssd_serve.recipes.data import evaluation_windows
from ssd_serve.recipes.decoder import Decoder, Shape
from ssd_serve.recipes.eagle3 import TrainedHead, agreement_by_step, head_loss
from ssd_serve.recipes.training import Phase, Recipe, Training, run
from ssd_serve.recipes.workspace import Workspace

_WINDOWS, _LENGTH = 12, 512
"""Of held-out text, for the figures in the log."""


@dataclass(frozen=True)
class HeadRecipe:
    """How a head is trained: the outputs of which of the target's layers it reads, how many of the most
    frequent tokens it proposes, and how many steps it goes on from its own words."""

    layers: tuple[int, ...]
    proposed: int = 2048
    steps: int = 4
    tokens: int = 12_000_000
    rows: int = 16
    length: int = 384
    seed: int = 2
    compiled: bool = True
    report_seconds: float = 300.0
    checkpoint_seconds: float = 240.0

    def of_target(self, shape: Shape) -> Recipe:
        """The training of a head as wide as this target."""
        return Recipe(
            replace(shape, layers=1),
            tokens=self.tokens,
            phases=(Phase(0.0, self.rows, self.length),),
            seed=self.seed,
            compiled=self.compiled,
            report_seconds=self.report_seconds,
            checkpoint_seconds=self.checkpoint_seconds,
        )


def train_head(
    recipe: HeadRecipe, workspace: Workspace, target: Path, say: Callable[[str], None]
) -> Training[TrainedHead]:
    """Train to the last token, from the checkpoint where there is one; returns where it ended."""
    teacher = read_decoder(target)
    _check(recipe, teacher)
    ids = frequent_tokens(workspace, recipe.proposed, teacher.shape.vocabulary)
    plan = recipe.of_target(teacher.shape)
    torch.manual_seed(recipe.seed)
    head = TrainedHead(plan.shape, ids, len(recipe.layers))

    def loss(model: TrainedHead, inputs: Tensor, _wanted: Tensor) -> Tensor:
        return head_loss(model, teacher, inputs, recipe.layers, recipe.steps)

    windows = torch.from_numpy(evaluation_windows(workspace.held_out(), _LENGTH, _WINDOWS))

    def figures(model: TrainedHead) -> dict[str, float]:
        shares = [
            agreement_by_step(model, teacher, each[None, :-1], recipe.layers, recipe.steps)
            for each in windows
        ]
        mean = np.mean(shares, axis=0)
        return {f"agreement_{step}": float(share) for step, share in enumerate(mean)}

    training = Training(plan, head, workspace.stream(), workspace.checkpoint("head"), loss)
    if training.checkpoint.exists():
        training.load()
    say(f"head: {training.tokens:,} of {plan.tokens:,} tokens")
    if training.tokens < plan.tokens:
        run(training, figures, say=say)
    head.eval()
    return training


def frequent_tokens(workspace: Workspace, count: int, vocabulary: int) -> Tensor:
    """Ids of the most frequent tokens of the text, ascending: int64 [count]."""
    counts = np.bincount(workspace.stream(), minlength=vocabulary)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count])).to(torch.int64)


def _check(recipe: HeadRecipe, target: Decoder) -> None:
    layers: Sequence[int] = recipe.layers
    if (
        sorted(set(layers)) != list(layers)
        or not layers
        or layers[-1] >= target.shape.layers
        or layers[0] < 0
    ):
        raise UserError(
            f"layers {list(layers)} are none to read: name some of 0 to {target.shape.layers - 1}, ascending"
        )
    if not 0 < recipe.proposed <= target.shape.vocabulary:
        raise UserError(f"a head can propose 1 to {target.shape.vocabulary} tokens, not {recipe.proposed}")
    if not 0 < recipe.steps < recipe.length:
        raise UserError(f"steps must be 1 to {recipe.length - 1}, not {recipe.steps}")
