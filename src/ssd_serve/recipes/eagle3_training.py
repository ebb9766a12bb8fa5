"""Trains an EAGLE-3 head for a target on the text of a workspace, and exports it with a model card."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.architectures.registry import load_description
from ssd_serve.models.parallel import Parallel
from ssd_serve.recipes.checkpoint import llama_config, replaced_folder, write_json, write_weights
from ssd_serve.recipes.data import Workspace, evaluation_windows
from ssd_serve.recipes.eagle3 import TrainedHead, agreement_by_step, head_loss
from ssd_serve.recipes.optimiser import Rates
from ssd_serve.recipes.processes import ALONE, TrainingProcess
from ssd_serve.recipes.teacher import Teacher, embedding_of, head_shape
from ssd_serve.recipes.training import Recipe, Training, run

_WINDOWS, _LENGTH = 12, 512
"""Held-out windows, and tokens of each, for the figures in the log."""


@dataclass(frozen=True, kw_only=True)
class HeadRecipe(Recipe):
    """The training of a head.

    `layers`: numbers of the target layers, from 0; the head reads their outputs. `proposed`: number of the most
    frequent tokens that the head can propose. `steps`: steps of the training-time test.
    """

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
    """Train to the last token, from the checkpoint if there is one; return the state at the end.

    Raises `UserError` for a recipe that does not fit the target.
    """
    shape = head_shape(target)
    _check(recipe, shape.vocabulary, shape.context, len(load_description(target).sizes(Parallel()).kv))
    length = min(_LENGTH, shape.context)
    places = max(-(-recipe.rows // process.count) * recipe.length, length)
    teacher = Teacher(target, places, recipe.layers, device, native=native)
    embedding = embedding_of(target, shape, teacher.device)
    torch.manual_seed(recipe.seed)
    ids = frequent_tokens(workspace, recipe.proposed, shape.vocabulary)
    head = TrainedHead(shape, ids, len(recipe.layers)).to(teacher.device)
    lesson_loss = torch.compile(head_loss, dynamic=False) if recipe.compiled else head_loss

    def loss(model: TrainedHead, inputs: Tensor) -> Tensor:
        return lesson_loss(model, embedding, inputs, teacher.read(inputs), recipe.steps)

    windows = torch.from_numpy(evaluation_windows(workspace.held_out(), length, _WINDOWS)).to(teacher.device)

    def figures(model: TrainedHead) -> dict[str, float]:
        texts = [each[None, :-1] for each in windows]
        shares = [
            agreement_by_step(model, embedding, text, teacher.read(text), recipe.steps) for text in texts
        ]
        mean = np.mean(shares, axis=0)
        return {f"agreement_{step}": float(share) for step, share in enumerate(mean)}

    checkpoint = workspace.checkpoint("head")
    training = Training(recipe, Rates(), head, workspace.stream(), checkpoint, loss, process)
    if checkpoint.exists():
        training.load()
    say(f"head: {training.tokens:,} of {recipe.tokens:,} tokens")
    if training.tokens < recipe.tokens:
        run(training, figures, say=say)
    head.eval()
    return training


def frequent_tokens(workspace: Workspace, count: int, vocabulary: int) -> Tensor:
    """Return the ids of the most frequent tokens of the text, ascending: int64 [count]."""
    counts = np.bincount(workspace.stream(), minlength=vocabulary)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count])).to(torch.int64)


def _check(recipe: HeadRecipe, vocabulary: int, context: int, target_layers: int) -> None:
    layers = list(recipe.layers)
    if sorted(set(layers)) != layers or not layers or layers[-1] >= target_layers or layers[0] < 0:
        raise UserError(f"layers {layers} cannot be read: name some of 0 to {target_layers - 1}, ascending")
    if not 0 < recipe.proposed <= vocabulary:
        raise UserError(f"a head can propose 1 to {vocabulary} tokens, not {recipe.proposed}")
    if recipe.length > context:
        raise UserError(f"the target knows texts of {context} tokens, not of {recipe.length}")
    if not 0 < recipe.steps < recipe.length:
        raise UserError(f"steps must be 1 to {recipe.length - 1}, not {recipe.steps}")


def export_head(
    head: TrainedHead, recipe: HeadRecipe, folder: Path, extra: Mapping[str, str] | None = None
) -> None:
    """Write the head in the layout of SafeAILab and SpecForge; the embedding is the target's.

    `extra` holds further text files by name.
    """
    ids, vocabulary = head.ids.cpu(), head.shape.vocabulary
    config = {
        **llama_config(head.shape),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(ids),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(recipe.layers),
            "use_aux_hidden_state": True,
        },
    }
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in head.state_dict().items()
    }
    weights["d2t"] = ids - torch.arange(len(ids))
    weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    with replaced_folder(folder) as inside:
        write_json(inside / "config.json", config)
        write_weights(weights, inside)
        for name, text in (extra or {}).items():
            (inside / name).write_text(text, encoding="utf-8")


def head_card(training: Training[TrainedHead], recipe: HeadRecipe, target: str, files: int) -> str:
    """Return the model card of a head that was trained on `files` files."""
    head, shape = training.model, training.model.shape
    last = training.history[-1] if training.history else {}
    rows = [
        f"| {name.removeprefix('agreement_')} | {value:.3f} |"
        for name, value in last.items()
        if name.startswith("agreement_")
    ]
    return "\n".join(
        [
            "---",
            "license: other",
            "tags: [eagle3, speculative-decoding]",
            "---",
            "",
            f"# An EAGLE-3 head for {target}",
            "",
            "Trained by `ssd recipe eagle3`; serve it with `ssd serve TARGET --draft HEAD`.",
            "",
            f"- One Llama layer: hidden {shape.hidden}, {shape.heads} heads of {shape.head} "
            f"({shape.kv_heads} KV heads), MLP {shape.intermediate}, bf16; the embedding is the target's.",
            f"- Reads the outputs of layers {', '.join(map(str, recipe.layers))} (from 0); proposes "
            f"{len(head.ids):,} of {shape.vocabulary:,} tokens, the most frequent of the text.",
            f"- {training.step:,} steps of {recipe.rows} windows of {recipe.length} tokens of {files} files, "
            f"{training.tokens:,} of {recipe.tokens:,} tokens, {training.worked / 60:.0f} minutes. The "
            "history is in `training.json`.",
            "- The licence of the training text applies.",
            "",
            "| tokens that the head drafted before | agreement with the target, temperature 0 |",
            "|---|---|",
            *rows,
            "",
        ]
    )
