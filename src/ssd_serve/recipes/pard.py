"""Adapts a Llama draft to guess several positions at once (PARD): masks after some tokens learn the tokens to come.

The draft learns from the target's distribution on the target's own answers. With each further position fewer places
are kept, each with all its earlier masks (conditional drop, An et al. 2025, arXiv 2504.18583).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.base.errors import UserError
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.heads.load import target_head
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.formats import format_of
from ssd_serve.recipes.chats import LONGEST, ChatLessons
from ssd_serve.recipes.checkpoint import LlamaCheckpoint
from ssd_serve.recipes.data import Stream, Workspace, evaluation_windows, load_tokenizer
from ssd_serve.recipes.decoder import Decoder, rotary_tables
from ssd_serve.recipes.distil import Distilled, DistilRecipe, export_distilled, read_draft
from ssd_serve.recipes.training import Lesson, Teacher, Training, run

KEPT, LEAST = 0.7, 0.1
"""Share of the places of a position that the next one keeps, and of all places that the last ones keep."""
TEXT_WEIGHT = 0.1
"""Weight of the text's own tokens besides the target's distribution."""
_WINDOWS, _LENGTH = 12, 512


@dataclass(frozen=True, kw_only=True)
class PardRecipe(DistilRecipe):
    """`positions` that a block has, and the mask's token; None: one that the texts do not contain."""

    positions: int = 8
    mask: int | None = None
    rows: int = 4
    compiled: bool = False


def masked_rows(counted: Tensor, positions: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return how many masks precede and end each row (0: a token), and its place: int64 [rows] each.

    All tokens of a window come first, then masks below places of `counted`, bool [length].
    """
    anchors = counted.nonzero()[:, 0].cpu()
    anchors = anchors[torch.randperm(len(anchors), generator=torch.Generator().manual_seed(seed))]
    masks, places = [torch.zeros(len(counted), dtype=torch.int64)], [torch.arange(len(counted))]
    for mask in range(1, positions):
        chosen = anchors[: int(len(anchors) * max(KEPT**mask, LEAST))] + mask
        places.append(chosen[chosen < len(counted)])
        masks.append(torch.full_like(places[-1], mask))
    return torch.cat(masks).to(counted.device), torch.cat(places).to(counted.device)


def masked_guesses(
    model: Decoder, window: Tensor, counted: Tensor, mask: int, positions: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [rows, vocabulary] of the rows that count of a window int64 [length], their masks and places."""
    masks, places = masked_rows(counted, positions, seed)
    anchors = places - masks
    own = (anchors[:, None] == anchors) & (masks <= masks[:, None])
    visible = torch.where(masks == 0, places <= anchors[:, None], own)
    cos, sin = (each[places] for each in rotary_tables(model.shape, len(window), window.device))
    counts = counted[places] & (places < len(window) - 1)  # the last token's follower is not in the window
    with torch.autocast(window.device.type, torch.bfloat16):
        outputs = model.model(torch.where(masks == 0, window[places], mask)[None], cos, sin, visible)
        return model.lm_head(outputs[0, counts]).float(), masks[counts], places[counts]


def pard_loss(model: Decoder, tokens: Tensor, lesson: Lesson, mask: int, positions: int) -> Tensor:
    """Return the loss on windows int64 [windows, length], in nats a row whose token the target wrote."""
    losses: list[Tensor] = []
    for window, truth, counted in zip(tokens, lesson.logits, _counted(lesson), strict=True):
        guesses, _, places = masked_guesses(model, window, counted, mask, positions, int(window.sum()))
        wanted = functional.softmax(truth.float(), dim=-1)[places]
        wanted[torch.arange(len(places)), window[places + 1]] += TEXT_WEIGHT
        each = (1 + TEXT_WEIGHT) * torch.logsumexp(guesses, dim=-1) - (wanted * guesses).sum(-1)
        losses.append(each.sum() / max(1, len(each)))
    return torch.stack(losses).mean()


@torch.no_grad()
def agreement_by_position(
    model: Decoder, tokens: Tensor, lesson: Lesson, mask: int, positions: int
) -> list[float]:
    """Return the share of answers' tokens at which both choose the same at temperature 0, for each position."""
    right, seen = torch.zeros(positions), torch.zeros(positions)
    for window, truth, counted in zip(tokens, lesson.logits, _counted(lesson), strict=True):
        guesses, masks, places = masked_guesses(model, window, counted, mask, positions, 0)
        same = guesses.argmax(-1) == truth.argmax(-1)[places]
        right += torch.bincount(masks[same], minlength=positions).cpu()
        seen += torch.bincount(masks, minlength=positions).cpu()
    shares: list[float] = (right / seen.clamp(min=1)).tolist()
    return shares


def _counted(lesson: Lesson) -> Tensor:
    if lesson.counted is None:
        raise ValueError("a lesson of conversations counts places")
    return lesson.counted


def first_draft(target: Path, layers: Sequence[int]) -> LlamaCheckpoint:
    """Return a draft of some of the target's layers, by number from 0, with its embedding and LM head."""
    raw, _ = format_of(target).config(target)
    count = int(raw["num_hidden_layers"])
    if sorted({*layers}) != list(layers) or not 0 <= layers[0] <= layers[-1] < count:
        raise UserError(f"layers {list(layers)} cannot be cut: name some of 0 to {count - 1}, ascending")
    weights: dict[str, Tensor] = {}
    with Checkpoint(target, partly=True) as file:
        for name in file.names():
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            if layer is None or int(layer[1]) in layers:
                own = (
                    name
                    if layer is None
                    else f"model.layers.{layers.index(int(layer[1]))}.{name[layer.end() :]}"
                )
                weights[own] = file.read(name, file.shape(name)).to(torch.bfloat16)
    return LlamaCheckpoint({**raw, "num_hidden_layers": len(layers)}, weights)


def mask_token(tokens: Stream, folder: Path) -> int:
    """Return a token that is not in the texts, the last special one if there is one."""
    tokenizer = load_tokenizer(folder)
    special = [token for token, each in tokenizer.get_added_tokens_decoder().items() if each.special]
    absent = np.setdiff1d(special, tokens)
    return int((absent if len(absent) else np.setdiff1d(np.arange(tokenizer.get_vocab_size()), tokens))[-1])


def adapt(
    recipe: PardRecipe,
    workspace: Workspace,
    target: Path,
    source: LlamaCheckpoint,
    say: Callable[[str], None],
    device: str = "cpu",
    native: NativeLibrary | None = None,
) -> Distilled:
    """Train to the last token, from the checkpoint if there is one."""
    student = read_draft(source, target).to(device)
    shape, theirs = student.shape, load_description(target).config
    mask = recipe.mask if recipe.mask is not None else mask_token(workspace.stream(), target)
    if not 0 <= mask < shape.vocabulary == theirs.vocabulary or not recipe.length <= shape.context:
        raise UserError(
            f"the draft has {shape.vocabulary} tokens and a context of {shape.context}, the target "
            f"{theirs.vocabulary} tokens; --mask is {mask}, --length {recipe.length}"
        )
    with torch.no_grad():
        student.model.embed_tokens.weight[mask] = student.model.embed_tokens.weight.mean(0)
    teacher = Teacher(target, LONGEST, (FINAL,), device, native=native)
    head = target_head(target, theirs.vocabulary, theirs.hidden).to(teacher.device, torch.bfloat16)
    lessons = ChatLessons(workspace, teacher, head)
    held_out = evaluation_windows(lessons.held_out(), min(_LENGTH, shape.context), _WINDOWS)
    windows = torch.from_numpy(held_out).to(teacher.device)

    def loss(model: Decoder, places: Tensor) -> Tensor:
        return pard_loss(model, *lessons.read(places), mask, recipe.positions)

    def figures(model: Decoder) -> dict[str, float]:
        lesson = (lessons.read(each[None, :-1]) for each in windows)
        shares = [agreement_by_position(model, *each, mask, recipe.positions) for each in lesson]
        return {f"agreement_{index}": share for index, share in enumerate(np.mean(shares, axis=0).tolist())}

    before, checkpoint = figures(student), workspace.checkpoint("pard")
    training = Training(recipe, recipe.rates, student, lessons.stream(), checkpoint, loss)
    training.history.append({"step": 0, "tokens": 0, **before})
    if checkpoint.exists():
        training.load()
    say(f"draft: {training.tokens:,} of {recipe.tokens:,} tokens; the mask is token {mask}")
    if training.tokens < recipe.tokens:
        run(training, figures, say=say)
    keys = {"pard_token": mask, "pard_k": recipe.positions, "spd_type": "pard"}
    return Distilled(training, replace(source, config={**source.config, **keys}), before, figures(student))


def export_pard(adapted: Distilled, draft: Path, folder: Path) -> None:
    """Write the draft as published ones are, with the tokenizer of `draft`, a folder or a GGUF file."""
    export_distilled(adapted, draft, folder)
    if not (folder / "tokenizer.json").exists():
        load_tokenizer(draft).save(str(folder / "tokenizer.json"))
