"""Goes on training a person's own Llama draft on what their target says of their texts.

The target is the engine's own model, whatever the server can load; the draft is a training decoder, which
keeps its sizes, tokenizer and configuration. Knows what is trained on what; not how a step is made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.recipes.checkpoint import (
    TOKENIZER_FILES,
    LlamaCheckpoint,
    read_checkpoint,
    replaced_folder,
    write_json,
    write_weights,
)
from ssd_serve.recipes.data import evaluation_windows
from ssd_serve.recipes.decoder import Decoder
from ssd_serve.recipes.head_export import write_history
from ssd_serve.recipes.optimiser import Rates
from ssd_serve.recipes.own_draft import read_own_draft, weights_of
from ssd_serve.recipes.processes import ALONE, TrainingProcess
from ssd_serve.recipes.teacher import Teacher
from ssd_serve.recipes.training import TaughtRecipe, Training, distillation, run
from ssd_serve.recipes.workspace import Workspace

RATES = Rates(matrix=5e-4, embedding=5e-5, head=5e-5, norm=5e-5, matrix_decay=0.0)
"""For a model that has learned already."""
_WINDOWS = 24
"""Of held-out text, for the figures."""


@dataclass(frozen=True, kw_only=True)
class DistilRecipe(TaughtRecipe):
    """How a draft goes on learning; learning rates are times `rate`."""

    tokens: int = 2_000_000
    rows: int = 8
    length: int = 512
    rate: float = 1.0
    seed: int = 3

    @property
    def rates(self) -> Rates:
        """The learning rates."""
        names = ("matrix", "embedding", "head", "norm")
        return replace(RATES, **{name: self.rate * getattr(RATES, name) for name in names})


@dataclass(frozen=True)
class Distilled:
    """A draft after its training, the checkpoint that it began with, and figures on held-out text of then and
    of now."""

    training: Training[Decoder]
    source: LlamaCheckpoint
    before: Mapping[str, float]
    after: Mapping[str, float]


def check_tokenizers(target: Path, draft: Path) -> None:
    """Raise `UserError` where ids do not mean the same to both."""
    if Tokenizer(target).vocabulary_hash() != Tokenizer(draft).vocabulary_hash():
        raise UserError(
            f"{draft} has another tokenizer than {target}: what the target says of its tokens teaches only "
            "drafts that have the same."
        )


def distil(
    recipe: DistilRecipe,
    workspace: Workspace,
    target: Path,
    draft: Path,
    say: Callable[[str], None],
    device: str = "cpu",
    native: NativeLibrary | None = None,
    process: TrainingProcess = ALONE,
) -> Distilled:
    """Train to the last token, from the checkpoint where there is one."""
    source = read_checkpoint(draft)
    student = read_own_draft(source, draft).to(device)
    if recipe.length > student.shape.context:
        raise UserError(f"the draft knows texts of {student.shape.context} tokens, not of {recipe.length}")
    teacher = Teacher(target, max(1, recipe.rows // process.count) * recipe.length, (), device, native=native)
    windows = torch.from_numpy(evaluation_windows(workspace.held_out(), recipe.length, _WINDOWS)).to(device)
    of_logits = torch.compile(draft_loss, dynamic=False) if recipe.compiled else draft_loss

    def loss(model: Decoder, inputs: Tensor, _wanted: Tensor) -> Tensor:
        return of_logits(model, inputs, teacher.read(inputs).logits)

    def figures(model: Decoder) -> dict[str, float]:
        return held_out_figures(model, teacher, windows) if process.first else {}

    before = figures(student)
    plan = recipe.of_shape(student.shape, recipe.rates)
    training = Training(plan, student, workspace.stream(), workspace.checkpoint("distilled"), loss, process)
    training.history.append({"step": 0, "tokens": 0, **before})
    if training.checkpoint.exists():
        training.load()
    say(f"draft: {training.tokens:,} of {plan.tokens:,} tokens; before: {said(before)}")
    if training.tokens < plan.tokens:
        run(training, figures, say=say)
    after = figures(student)
    say(f"after: {said(after)}")
    return Distilled(training, source, before, after)


def draft_loss(model: Decoder, inputs: Tensor, truth: Tensor) -> Tensor:
    """What a draft has still to learn of its target's logits, of the ids that both of them have."""
    with torch.autocast(inputs.device.type, torch.bfloat16):
        guesses = model(inputs)
    common = min(guesses.shape[-1], truth.shape[-1])
    return distillation(
        truth[..., :common].float().flatten(0, 1), guesses[..., :common].float().flatten(0, 1)
    )


@torch.no_grad()
def held_out_figures(model: Decoder, teacher: Teacher, windows: Tensor) -> dict[str, float]:
    """Of windows int64 [n, length + 1]: the draft's loss on the text, nats a token, and the share of places
    at which its choice at temperature 0 is the target's."""
    losses, equal = list[Tensor](), list[Tensor]()
    for window in windows:
        inputs = window[None, :-1]
        with torch.autocast(inputs.device.type, torch.bfloat16):
            guesses = model(inputs)[0].float()
        losses.append(functional.cross_entropy(guesses, window[1:]))
        equal.append((guesses.argmax(-1) == teacher.read(inputs).logits[0].argmax(-1)).float())
    return {
        "held_out_loss": float(torch.stack(losses).mean()),
        "agreement": float(torch.cat(equal).mean()),
    }


def said(figures: Mapping[str, float]) -> str:
    """Figures in words."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in figures.items())


def export_distilled(
    distilled: Distilled, target: str, draft: Path, texts: Sequence[str], folder: Path
) -> None:
    """Write the draft as it was, with other weights and a card. Its tokenizer's files come along."""
    with replaced_folder(folder) as inside:
        write_json(inside / "config.json", distilled.source.config)
        write_weights(weights_of(distilled.training.model, distilled.source), inside)
        for name in TOKENIZER_FILES:
            if (draft / name).is_file():
                (inside / name).write_bytes((draft / name).read_bytes())
        drawn = write_history(distilled.training.history, inside)
        card = distilled_card(distilled, target, draft.name, texts, drawn)
        (inside / "README.md").write_text(card, encoding="utf-8")


def distilled_card(distilled: Distilled, target: str, draft: str, texts: Sequence[str], drawn: bool) -> str:
    """The README.md beside the weights."""
    training, before, after = distilled.training, distilled.before, distilled.after
    rows = [
        f"| {label} | {before[name]:.3f} | {after[name]:.3f} |"
        for name, label in (
            ("held_out_loss", "loss on the text, nats a token"),
            ("agreement", "first choice is the target's, temperature 0"),
        )
    ]
    return "\n".join(
        [
            f"# {draft}, distilled from {target}",
            "",
            f"The draft model {draft} after `ssd recipe distil`: it has learned what {target} says of "
            f"{', '.join(texts)}. Licence and use are those of {draft}.",
            "",
            f"{training.step:,} steps, {training.tokens:,} tokens, {training.worked / 60:.0f} minutes. On "
            f"the last twentieth of each text, which it has not read:",
            "",
            "| figure | before | after |",
            "|---|---|---|",
            *rows,
            "",
            *(["![loss and agreement](training.svg)", ""] * drawn),
        ]
    )
