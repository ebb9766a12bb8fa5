"""Trains a Llama draft of the user's own on the target's distribution over the user's texts.

The target is any model that the server can load. The draft keeps its sizes, tokenizer and configuration.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.recipes.checkpoint import (
    LlamaCheckpoint,
    copy_tokenizer,
    read_checkpoint,
    replaced_folder,
    shape_of,
    write_json,
    write_weights,
)
from ssd_serve.recipes.data import Workspace, evaluation_windows
from ssd_serve.recipes.decoder import Decoder
from ssd_serve.recipes.training import Rates, Recipe, Teacher, Training, fast_products, run

RATES = Rates(matrix=5e-4, embedding=5e-5, head=5e-5, norm=5e-5, matrix_decay=0.0)
"""Learning rates of a model that is trained already."""
_WINDOWS = 24
"""Windows of held-out text, for the figures."""
_ARGMAX_WEIGHT = 0.3
"""Weight of the target's first choice besides its distribution: a draft is judged by its first candidate."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class DistilRecipe(Recipe):
    """A training of a draft; `rate` multiplies the learning rates."""

    tokens: int = 2_000_000
    rows: int = 8
    length: int = 512
    rate: float = 1.0
    seed: int = 3

    @property
    def rates(self) -> Rates:
        """Return the learning rates."""
        return RATES.scaled(self.rate)


@dataclass(frozen=True)
class Distilled:
    """A trained draft, its original checkpoint, and figures on held-out text before and after."""

    training: Training[Decoder]
    source: LlamaCheckpoint
    before: Mapping[str, float]
    after: Mapping[str, float]


def check_tokenizers(target: Path, draft: Path) -> None:
    """Raise `UserError` unless both models have the same tokenizer."""
    if Tokenizer(target).vocabulary_hash() != Tokenizer(draft).vocabulary_hash():
        raise UserError(
            f"{draft} has another tokenizer than {target}: a draft can only be distilled from a target with "
            "the same tokenizer."
        )


def distil(
    recipe: DistilRecipe,
    workspace: Workspace,
    target: Path,
    draft: Path,
    say: Callable[[str], None],
    device: str = "cpu",
    native: NativeLibrary | None = None,
) -> Distilled:
    """Train to the last token, from the checkpoint if there is one."""
    source = read_checkpoint(draft)
    student = read_draft(source, draft).to(device)
    if recipe.length > student.shape.context:
        raise UserError(
            f"the draft has a context of {student.shape.context} tokens, --length is {recipe.length}"
        )
    teacher = Teacher(target, recipe.rows * recipe.length, (), device, native=native)
    windows = torch.from_numpy(evaluation_windows(workspace.held_out(), recipe.length, _WINDOWS)).to(device)
    logits_loss = torch.compile(draft_loss, dynamic=False) if recipe.compiled else draft_loss

    def loss(model: Decoder, inputs: Tensor) -> Tensor:
        return logits_loss(model, inputs, teacher.read(inputs).logits)

    def figures(model: Decoder) -> dict[str, float]:
        return held_out_figures(model, teacher, windows)

    before = figures(student)
    checkpoint = workspace.checkpoint("distilled")
    training = Training(recipe, recipe.rates, student, workspace.stream(), checkpoint, loss)
    training.history.append({"step": 0, "tokens": 0, **before})
    if checkpoint.exists():
        training.load()
    say(f"draft: {training.tokens:,} of {recipe.tokens:,} tokens; before: {_in_words(before)}")
    if training.tokens < recipe.tokens:
        run(training, figures, say=say)
    after = figures(student)
    say(f"after: {_in_words(after)}")
    return Distilled(training, source, before, after)


def draft_loss(model: Decoder, inputs: Tensor, truth: Tensor) -> Tensor:
    """Return the cross entropy against the target's logits `truth`, over the ids that both models have."""
    with fast_products(inputs.device):
        guesses = model(inputs)
    common = min(guesses.shape[-1], truth.shape[-1])
    teacher = truth[..., :common].float().flatten(0, 1)
    log_q = functional.log_softmax(guesses[..., :common].float().flatten(0, 1), dim=-1)
    soft = -(functional.softmax(teacher, dim=-1) * log_q).sum(-1).mean()
    return soft + _ARGMAX_WEIGHT * functional.nll_loss(log_q, teacher.argmax(-1))


@torch.no_grad()
def held_out_figures(model: Decoder, teacher: Teacher, windows: Tensor) -> dict[str, float]:
    """Return the draft's loss on windows int64 [n, length + 1], in nats a token, and its agreement.

    The agreement is the share of positions at which both models choose the same token at temperature 0.
    """
    losses, equal = list[Tensor](), list[Tensor]()
    for window in windows:
        inputs = window[None, :-1]
        with fast_products(inputs.device):
            guesses = model(inputs)[0].float()
        losses.append(functional.cross_entropy(guesses, window[1:]))
        equal.append((guesses.argmax(-1) == teacher.read(inputs).logits[0].argmax(-1)).float())
    return {
        "held_out_loss": float(torch.stack(losses).mean()),
        "agreement": float(torch.cat(equal).mean()),
    }


def _in_words(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in figures.items())


def read_draft(checkpoint: LlamaCheckpoint, folder: Path) -> Decoder:
    """Load a checkpoint as a training decoder in fp32. Raises `UserError` if it cannot be trained."""
    config, weights = checkpoint.config, checkpoint.weights
    if config.get("quantization_config"):
        raise UserError(f"{folder} is quantised: a draft learns from weights of 16 bits or more.")
    decoder = Decoder(shape_of(config))
    if _is_tied(checkpoint):
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    wanted = {name: value.shape for name, value in decoder.state_dict().items()}
    found = {name: value for name, value in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    if _is_tied(checkpoint):
        found[_HEAD] = found.get(_EMBEDDING, found.get(_HEAD, Tensor()))
    wrong = [name for name in {*wanted, *found} if name not in found or wanted.get(name) != found[name].shape]
    if wrong:
        named = ", ".join(sorted(wrong)[:4])
        raise UserError(
            f"{folder} is no plain Llama model: its weights {named} are missing, other or too many."
        )
    decoder.load_state_dict({name: value.float() for name, value in found.items()})
    return decoder.train()


def _is_tied(checkpoint: LlamaCheckpoint) -> bool:
    return bool(checkpoint.config.get("tie_word_embeddings")) or _HEAD not in checkpoint.weights


def export_distilled(distilled: Distilled, draft: Path, folder: Path) -> None:
    """Write the trained draft with the names and dtypes of its checkpoint, and its tokenizer."""
    source, own = distilled.source, distilled.training.model.state_dict()
    weights = {
        name: own[name].detach().to("cpu", value.dtype).contiguous() if name in own else value
        for name, value in source.weights.items()
        if not (name == _HEAD and _is_tied(source))
    }
    with replaced_folder(folder) as inside:
        write_json(inside / "config.json", source.config)
        write_weights(weights, inside)
        write_json(inside / "training.json", distilled.training.history)
        copy_tokenizer(draft, inside)
