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

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.base.errors import UserError
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.heads.load import target_head
from ssd_serve.models.weights.checkpoint import Checkpoint
from ssd_serve.models.weights.formats import format_of
from ssd_serve.recipes.chats import LONGEST, ChatLessons
from ssd_serve.recipes.checkpoint import LlamaCheckpoint
from ssd_serve.recipes.data import Workspace, evaluation_windows, load_tokenizer
from ssd_serve.recipes.decoder import Decoder, rotary_tables
from ssd_serve.recipes.distil import Distilled, DistilRecipe, export_distilled, read_draft
from ssd_serve.recipes.heads import counted_places, soft_cross_entropy
from ssd_serve.recipes.training import Lesson, Teacher, Training, fast_products, product_dtype, run

KEPT, LEAST = 0.7, 0.1
"""Share of the places of a position that the next one keeps, and of all places that the last ones keep."""
TEXT_WEIGHT = 0.1
"""Weight of the text's own tokens relative to the target's distribution."""
_WINDOWS, _LENGTH = 12, 512


@dataclass(frozen=True, kw_only=True)
class PardRecipe(DistilRecipe):
    """`positions` that a block has, and the mask's token; None: one that no answer contains."""

    positions: int = 8
    mask: int | None = None


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


def masked_vectors(
    model: Decoder, window: Tensor, counted: Tensor, mask: int, positions: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the LM head's inputs [rows, hidden] of a window int64 [length], where rows count, and their masks and
    places."""
    masks, places = masked_rows(counted, positions, seed)
    anchors = places - masks
    own = (anchors[:, None] == anchors) & (masks <= masks[:, None])
    visible = torch.where(masks == 0, places <= anchors[:, None], own)
    cos, sin = (each[places] for each in rotary_tables(model.shape, len(window), window.device))
    counts = counted[places] & (places < len(window) - 1)  # the last token's follower is not in the window
    with fast_products(window.device):
        vectors = model.model(torch.where(masks == 0, window[places], mask)[None], cos, sin, visible)
    return vectors[0, counts], masks[counts], places[counts]


def pard_loss(model: Decoder, tokens: Tensor, lesson: Lesson, mask: int, positions: int) -> Tensor:
    """Return the loss on windows int64 [windows, length], in nats for each row with a token of the target."""
    counts, losses = counted_places(tokens, lesson), list[Tensor]()
    for window, truth, counted in zip(tokens, lesson.logits, counts, strict=True):
        vectors, _, places = masked_vectors(model, window, counted, mask, positions, int(window.sum()))
        wanted = truth.float().softmax(-1)[places]
        wanted[torch.arange(len(places)), window[places + 1]] += TEXT_WEIGHT
        losses.append(soft_cross_entropy(vectors, model.lm_head.weight, None, wanted / (1 + TEXT_WEIGHT)))
    return torch.stack(losses).mean()


@torch.no_grad()
def agreement_by_position(
    model: Decoder, tokens: Tensor, lesson: Lesson, mask: int, positions: int
) -> Tensor:
    """Count the answers' tokens at which both choose the same at temperature 0, and all: [2, positions]."""
    found = torch.zeros(2, positions)
    for window, truth, counted in zip(tokens, lesson.logits, counted_places(tokens, lesson), strict=True):
        vectors, masks, places = masked_vectors(model, window, counted, mask, positions, 0)
        same = model.lm_head(vectors.float()).argmax(-1) == truth.argmax(-1)[places]
        for row, those in enumerate((masks[same], masks)):
            found[row] += torch.bincount(those, minlength=positions).cpu()
    return found


def first_draft(target: Path, layers: Sequence[int]) -> LlamaCheckpoint:
    """Return a draft of some of the target's layers, by number from 0, with its embedding and LM head."""
    raw, _ = format_of(target).config(target)
    count = int(raw["num_hidden_layers"])
    if sorted({*layers}) != list(layers) or not 0 <= layers[0] <= layers[-1] < count:
        raise UserError(f"layers {list(layers)} cannot be cut: name some of 0 to {count - 1}, ascending")
    weights: dict[str, Tensor] = {}
    with Checkpoint(target, partly=True) as file:
        for name in file.names():
            layer = re.match(r"model\.layers\.(\d+)", name)
            if layer is None or int(layer[1]) in layers:
                place = "" if layer is None else f"model.layers.{layers.index(int(layer[1]))}"
                own = place + name.removeprefix(layer[0] if layer else "")
                weights[own] = file.read(name, file.shape(name)).to(torch.bfloat16)
    return LlamaCheckpoint({**raw, "num_hidden_layers": len(layers)}, weights)


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
    student, theirs = read_draft(source, target).to(device), load_description(target).config
    teacher = Teacher(target, LONGEST, (FINAL,), device, native=native)
    head = target_head(target, theirs.vocabulary, theirs.hidden)
    head = head.to(teacher.device, product_dtype(teacher.device))
    lessons = ChatLessons(workspace, teacher, head)
    counts, shape = lessons.counts(theirs.vocabulary), student.shape
    mask = int(np.flatnonzero(counts == counts.min())[-1]) if recipe.mask is None else recipe.mask
    if not 0 <= mask < shape.vocabulary == theirs.vocabulary or recipe.length > shape.context:
        raise UserError(
            f"the draft has {shape.vocabulary} tokens and a context of {shape.context}, the target "
            f"{theirs.vocabulary} tokens; --mask is {mask}, --length {recipe.length}"
        )
    with torch.no_grad():
        student.model.embed_tokens.weight[mask] = student.model.embed_tokens.weight.mean(0)
    held_out = evaluation_windows(lessons.held_out(), min(_LENGTH, shape.context), _WINDOWS)
    windows = torch.from_numpy(held_out).to(teacher.device)

    def loss(model: Decoder, places: Tensor) -> Tensor:
        return pard_loss(model, *lessons.read(places), mask, recipe.positions)

    def figures(model: Decoder) -> dict[str, float]:
        read = (lessons.read(each[None, :-1]) for each in windows)
        found = torch.stack([agreement_by_position(model, *each, mask, recipe.positions) for each in read])
        right, seen = found.sum(0)
        return {
            f"agreement_{place}": share for place, share in enumerate((right / seen.clamp(min=1)).tolist())
        }

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
