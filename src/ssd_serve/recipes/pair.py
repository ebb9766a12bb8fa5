"""Trains a pair in its workspace: the target to its last token, then the draft.

Each goes on where it stopped. Knows which loss is whose; not how a step is made or where text comes from.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.checkpoint import read_decoder
from ssd_serve.recipes.data import evaluation_windows
from ssd_serve.recipes.decoder import Decoder, initialise
from ssd_serve.recipes.training import (
    DRAFT,
    TARGET,
    Loss,
    Recipe,
    Training,
    agreement,
    held_out_loss,
    run,
    taught_by,
    text_loss,
)
from ssd_serve.recipes.workspace import Workspace

_WINDOWS, _LENGTH = 12, 1024
"""Of held-out text, for the figures in the log."""


@dataclass(frozen=True)
class PairRecipe:
    """What is trained, and the pair of folders whose weights it begins with, if any."""

    target: Recipe = TARGET
    draft: Recipe = DRAFT
    start: tuple[Path, Path] | None = None

    def of_tokens(self, target: int, draft: int) -> "PairRecipe":
        """The same with other numbers of tokens."""
        return replace(
            self, target=replace(self.target, tokens=target), draft=replace(self.draft, tokens=draft)
        )


def train_pair(recipe: PairRecipe, workspace: Workspace, say: Callable[[str], None]) -> None:
    """Train both to their last tokens, from their checkpoints where there are some."""
    windows = evaluation_windows(
        workspace.held_out(), min(_LENGTH, recipe.target.shape.context // 2), _WINDOWS
    )
    folders = recipe.start or (None, None)
    target = _train(
        workspace,
        "target",
        recipe.target,
        text_loss,
        _beginning(folders[0], recipe.target),
        lambda model: {"held_out_loss": held_out_loss(model, windows)},
        say,
    )
    _train(
        workspace,
        "draft",
        recipe.draft,
        taught_by(target),
        _beginning(folders[1], recipe.draft),
        lambda model: {
            "held_out_loss": held_out_loss(model, windows),
            "agreement": agreement(target, model, windows),
        },
        say,
    )


def _beginning(folder: Path | None, recipe: Recipe) -> Decoder:
    if folder is None:
        decoder = Decoder(recipe.shape)
        initialise(decoder, recipe.seed)
        return decoder
    decoder = read_decoder(folder)
    if decoder.shape != recipe.shape:
        raise UserError(f"{folder} has other sizes than the recipe: {decoder.shape}, not {recipe.shape}.")
    return decoder.train()


def _train(
    workspace: Workspace,
    role: str,
    recipe: Recipe,
    loss: Loss[Decoder],
    start: Decoder,
    figures: Callable[[Decoder], dict[str, float]],
    say: Callable[[str], None],
) -> Decoder:
    training = Training(recipe, start, workspace.stream(), workspace.checkpoint(role), loss)
    if training.checkpoint.exists():
        training.load()
    say(f"{role}: {training.tokens:,} of {recipe.tokens:,} tokens")
    if training.tokens < recipe.tokens:
        run(training, figures, say=say)
    return training.model.eval()
