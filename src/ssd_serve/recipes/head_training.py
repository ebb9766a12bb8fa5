"""Trains an EAGLE-3 head for a finished target on the text of a workspace.

Goes on where it stopped. Knows what is trained on what; the loss and the engine's head live elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.parallel import Parallel
from ssd_serve.recipes.data import evaluation_windows
from ssd_serve.recipes.decoder import Shape
from ssd_serve.recipes.eagle3 import TrainedHead, agreement_by_step, head_loss
from ssd_serve.recipes.optimiser import Rates
from ssd_serve.recipes.processes import ALONE, TrainingProcess
from ssd_serve.recipes.teacher import Teacher, embedding_of, head_shape
from ssd_serve.recipes.training import TaughtRecipe, Training, run
from ssd_serve.recipes.workspace import Workspace

_WINDOWS, _LENGTH = 12, 512
"""Of held-out text, for the figures in the log."""


@dataclass(frozen=True, kw_only=True)
class HeadRecipe(TaughtRecipe):
    """How a head is trained: the outputs of which of the target's layers it reads, how many of the most
    frequent tokens it proposes, and how many steps it goes on from its own words."""

    layers: tuple[int, ...]
    proposed: int = 2048
    steps: int = 4
    tokens: int = 12_000_000
    rows: int = 16
    length: int = 384
    seed: int = 2


def train_head(
    recipe: HeadRecipe,
    workspace: Workspace,
    target: Path,
    say: Callable[[str], None],
    device: str = "cpu",
    native: NativeLibrary | None = None,
    process: TrainingProcess = ALONE,
) -> Training[TrainedHead]:
    """Train to the last token, from the checkpoint where there is one; returns where it ended."""
    plan = recipe.of_shape(head_shape(target), Rates())
    _check(recipe, plan.shape, len(load_description(target).sizes(Parallel()).kv))
    longest = min(_LENGTH, plan.shape.context)
    places = max(-(-recipe.rows // process.count) * recipe.length, longest)
    teacher = Teacher(target, places, recipe.layers, device, native=native)
    embedding = embedding_of(target, plan.shape, teacher.device)
    torch.manual_seed(recipe.seed)
    ids = frequent_tokens(workspace, recipe.proposed, plan.shape.vocabulary)
    head = TrainedHead(plan.shape, ids, len(recipe.layers)).to(teacher.device)
    of_lesson = torch.compile(head_loss, dynamic=False) if recipe.compiled else head_loss

    def loss(model: TrainedHead, inputs: Tensor, _wanted: Tensor) -> Tensor:
        return of_lesson(model, embedding, inputs, teacher.read(inputs), recipe.steps)

    windows = torch.from_numpy(evaluation_windows(workspace.held_out(), longest, _WINDOWS))
    windows = windows.to(teacher.device)

    def figures(model: TrainedHead) -> dict[str, float]:
        texts = [each[None, :-1] for each in windows]
        shares = [
            agreement_by_step(model, embedding, text, teacher.read(text), recipe.steps) for text in texts
        ]
        mean = np.mean(shares, axis=0)
        return {f"agreement_{step}": float(share) for step, share in enumerate(mean)}

    training = Training(plan, head, workspace.stream(), workspace.checkpoint("head"), loss, process)
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


def _check(recipe: HeadRecipe, shape: Shape, target_layers: int) -> None:
    layers: Sequence[int] = recipe.layers
    if sorted(set(layers)) != list(layers) or not layers or layers[-1] >= target_layers or layers[0] < 0:
        raise UserError(
            f"layers {list(layers)} are none to read: name some of 0 to {target_layers - 1}, ascending"
        )
    if not 0 < recipe.proposed <= shape.vocabulary:
        raise UserError(f"a head can propose 1 to {shape.vocabulary} tokens, not {recipe.proposed}")
    if recipe.length > shape.context:
        raise UserError(f"the target knows texts of {shape.context} tokens, not of {recipe.length}")
    if not 0 < recipe.steps < recipe.length:
        raise UserError(f"steps must be 1 to {recipe.length - 1}, not {recipe.steps}")
