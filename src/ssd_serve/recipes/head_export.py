"""Exports a trained head as others do, with a model card, the history of its training and its picture.

Knows a trained head and what is said of its training; does not train.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ssd_serve.recipes.checkpoint import llama_config, replaced_folder, write_json, write_weights
from ssd_serve.recipes.eagle3 import TrainedHead
from ssd_serve.recipes.export import STEPPING, data_lines, state_of
from ssd_serve.recipes.head_training import HeadRecipe

PICTURE = "training.svg"


@dataclass(frozen=True)
class HeadStory:
    """What a head's card says beside its sizes: whose head it is, what it has read, how it was trained, and
    figures by name that were measured elsewhere."""

    target: str
    summary: Mapping[str, Any]
    step: int
    tokens: int
    of_tokens: int
    worked_seconds: float
    history: Sequence[Mapping[str, float]]
    figures: Mapping[str, float | str]


def export_head(head: TrainedHead, recipe: HeadRecipe, folder: Path, story: HeadStory | None = None) -> None:
    """Write it as SafeAILab's and SpecForge's heads are written; the embedding is the target's."""
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
        if story is not None:
            write_json(inside / "held_out.json", story.summary["held_out"])
            drawn = write_history(story.history, inside)
            (inside / "README.md").write_text(head_card(head, recipe, story, drawn), encoding="utf-8")


def write_history(history: Sequence[Mapping[str, float]], folder: Path) -> bool:
    """Write `training.json` and, where matplotlib is installed, its picture; returns whether it is."""
    write_json(folder / "training.json", list(history))
    if find_spec("matplotlib") is None:
        return False
    from ssd_serve.recipes.curve import curve

    (folder / PICTURE).write_text(curve(history), encoding="utf-8")
    return True


def head_card(head: TrainedHead, recipe: HeadRecipe, story: HeadStory, drawn: bool) -> str:
    """The README.md beside the weights."""
    shape = head.shape
    count = sum(parameter.numel() for parameter in head.parameters())
    return "\n".join(
        [
            "---",
            "license: other",
            "license_name: permissive-data",
            "tags: [eagle3, speculative-decoding]",
            "---",
            "",
            f"# An EAGLE-3 head of {story.target}",
            "",
            "Guesses what that model says next, from what it has computed; of no use without it. Trained by "
            "`ssd recipe eagle3`, served by `ssd serve TARGET --draft HEAD`.",
            "",
            "## What it is",
            "",
            f"- One Llama layer, hidden {shape.hidden}, {shape.heads} heads of {shape.head} "
            f"({shape.kv_heads} KV heads), MLP {shape.intermediate}; {count / 1e6:.2f} million parameters, "
            "bf16; the embedding is the target's.",
            f"- Reads the outputs of the target's layers {', '.join(map(str, recipe.layers))} (from 0) and "
            f"proposes {len(head.ids):,} of its {shape.vocabulary:,} tokens, the most frequent of the text.",
            "",
            "## Data and licence",
            "",
            *data_lines(story.summary, "`held_out.json`"),
            "",
            "## Training",
            "",
            *_training_lines(recipe, story),
            *([f"- The whole way, also in `training.json`: ![loss and agreement]({PICTURE})"] * drawn),
            "",
            "## Measured",
            "",
            *_figure_lines(story),
            "",
        ]
    )


def _training_lines(recipe: HeadRecipe, story: HeadStory) -> list[str]:
    return [
        f"- {story.step:,} steps of {recipe.rows} texts of {recipe.length} tokens, {story.tokens:,} tokens, "
        f"{story.worked_seconds / 60:.0f} minutes ({state_of(story.tokens, story.of_tokens)}).",
        f"- Training-time test of {recipe.steps} steps: the first reads the target's outputs, the others "
        "what the head itself has said; each learns the target's distribution over the proposed tokens.",
        STEPPING,
    ]


def _figure_lines(story: HeadStory) -> list[str]:
    """Agreement at the end of the training, and what was measured elsewhere."""
    last = story.history[-1] if story.history else {}
    own = [
        "| first choice is the target's, temperature 0, held-out text, "
        f"after {name.removeprefix('agreement_')} own words | {value:.3f} |"
        for name, value in last.items()
        if name.startswith("agreement_")
    ]
    others = [
        f"| {name} | {value if isinstance(value, str) else format(value, '.4g')} |"
        for name, value in story.figures.items()
    ]
    return ["| figure | value |", "|---|---|", *own, *others]
