"""Exports a trained pair from a training checkpoint: two folders in Hugging Face layout, with model cards.

Works at any time of a training. Knows the checkpoint's contents and the figures measured; does not train.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ssd_serve.recipes.checkpoint import replaced_folder, write_decoder, write_json
from ssd_serve.recipes.decoder import Decoder, Shape
from ssd_serve.recipes.functions import NEW_TOKENS
from ssd_serve.recipes.tokenizer import save_tokenizer
from ssd_serve.recipes.workspace import Workspace


@dataclass(frozen=True)
class Trained:
    """What an export needs of a training checkpoint."""

    target: Decoder
    draft: Decoder
    step: int
    tokens: int
    worked_seconds: float
    progress: float


def read_trained(checkpoint: Path) -> Trained:
    """Read both models and the counters from a training checkpoint."""
    state: dict[str, Any] = torch.load(checkpoint, weights_only=True)
    models: list[Decoder] = []
    for role in ("target", "draft"):
        decoder = Decoder(Shape(**state[f"{role}_shape"]))
        decoder.load_state_dict(state[role])
        models.append(decoder.eval())
    history = state["history"]
    return Trained(
        target=models[0],
        draft=models[1],
        step=state["step"],
        tokens=state["tokens"],
        worked_seconds=state["worked"],
        progress=float(history[-1]["progress"]) if history else 0.0,
    )


def export_pair(
    workspace: Workspace, target: Path, draft: Path, figures: Mapping[str, Any] | None = None
) -> None:
    """Write both folders, each replaced in one move; `figures`, of `evaluate-pair`, go into the cards."""
    trained = read_trained(workspace.checkpoint)
    summary = workspace.summary()
    tokenizer = workspace.tokenizer()
    for role, decoder, destination in (("target", trained.target, target), ("draft", trained.draft, draft)):
        with replaced_folder(destination) as folder:
            write_decoder(decoder, folder)
            save_tokenizer(tokenizer, folder, decoder.shape.context)
            if role == "target":
                write_json(folder / "held_out.json", summary["held_out"])
            card = model_card(role, decoder.shape, trained, summary, figures)
            (folder / "README.md").write_text(card, encoding="utf-8")


def model_card(
    role: str, shape: Shape, trained: Trained, summary: Mapping[str, Any], figures: Mapping[str, Any] | None
) -> str:
    """The README.md beside the weights."""
    return "\n".join(
        [
            "---",
            "license: other",
            "license_name: psf-2.0-data",
            "language: [code]",
            "tags: [python, llama, speculative-decoding]",
            "---",
            "",
            f"# The embedded {role}",
            "",
            INTRODUCTIONS[role],
            "",
            "## What it is",
            "",
            *shape_lines(shape),
            "",
            "## Data and licence",
            "",
            *data_lines(summary),
            "",
            "## Training",
            "",
            *training_lines(trained),
            "",
            "## Measured",
            "",
            *figure_lines(figures),
            "",
            "## What it is not",
            "",
            LIMITS,
            "",
        ]
    )


INTRODUCTIONS = {
    "target": "A small language model of Python code, trained from nothing by `ssd recipe train-pair`, so "
    "that the server has something real to serve without a download. The draft beside it guesses "
    "its choices.",
    "draft": "The draft model of the embedded pair: distilled from the target beside it, in the same "
    "training by `ssd recipe train-pair`, so as to guess the target's choices. It is not meant to be used "
    "alone.",
}

LIMITS = (
    "It is not an assistant, knows no facts and cannot follow instructions. It continues text that looks "
    "like the Python standard library: plausible names, lines that mostly make sense, "
    "functions that often do not parse, no understanding. The chat "
    "template turns messages into comments and lets the model continue with code. It may repeat passages of "
    "its training data, which are under the PSF licence. Do not use its output for anything but trying out "
    "and measuring the server."
)


def shape_lines(shape: Shape) -> list[str]:
    """The architecture, in a few lines."""
    return [
        f"- Llama architecture, {shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads of "
        f"{shape.head} ({shape.kv_heads} KV heads), MLP {shape.intermediate}, untied embeddings, "
        f"context {shape.context}.",
        f"- {shape.parameters / 1e6:.2f} million parameters, {shape.body_parameters / 1e6:.2f} million of "
        "them not embedding or head; bf16.",
        f"- Byte-level BPE tokenizer with {shape.vocabulary:,} entries, shared by target and draft; "
        "`<|endoftext|>` begins every document.",
    ]


def data_lines(summary: Mapping[str, Any]) -> list[str]:
    """The corpus."""
    return [
        f"- The Python sources of the standard library of CPython {platform.python_version()}, its tests "
        f"included: {summary['train_files']:,} files, {summary['train_bytes'] / 1e6:.1f} MB, "
        f"{summary['train_tokens']:,} tokens.",
        "- Licence of the data: Python Software Foundation License Version 2, "
        "copyright Python Software Foundation; some modules carry notices of their own.",
        f"- Held out by a hash of the path: {len(summary['held_out'])} files, "
        f"{summary['held_out_bytes'] / 1e6:.2f} MB, {summary['held_out_tokens']:,} tokens, listed in the "
        f"target's `held_out.json`. {summary['removed_files']} files that share 40 % or more of their "
        "three-line runs with a held-out file were removed before the tokenizer was trained.",
    ]


def training_lines(trained: Trained) -> list[str]:
    """Steps, tokens and time."""
    state = "finished" if trained.progress >= 1.0 else f"not finished: {trained.progress:.0%} of its time"
    return [
        f"- {trained.step:,} steps, {trained.tokens:,} tokens, {trained.worked_seconds / 60:.0f} minutes "
        f"on a CPU in the background of other work ({state}).",
        "- Muon for the matrices, AdamW for the rest, bf16 autocast; the learning rate follows the wall "
        "clock: constant, then linear to zero. Windows of 512, then of 1,024 tokens.",
        "- Text further from the beginning than the longest window is read worse: loss rises from about "
        "1,500 tokens of context on.",
        "- The draft learns in the same steps: first from the text, later from the target's distribution "
        "with extra weight on its first choice, in the last part alone from the finished target.",
    ]


def figure_lines(figures: Mapping[str, Any] | None) -> list[str]:
    """What `ssd recipe evaluate-pair` measured."""
    if figures is None:
        return ["Not measured yet: run `ssd recipe evaluate-pair`."]
    lines = [
        f"On {figures['positions']:,} held-out positions, teacher-forced, fp32:",
        "",
        "| figure | value |",
        "|---|---|",
        f"| target's loss, nats a token (bits a byte) | {figures['target_loss']:.3f} "
        f"({figures['target_bits_per_byte']:.3f}) |",
        f"| draft's loss, nats a token (bits a byte) | {figures['draft_loss']:.3f} "
        f"({figures['draft_bits_per_byte']:.3f}) |",
        f"| draft's first guess is the target's choice, temperature 0 | {figures['agreement']:.3f} |",
        f"| target's choice among the draft's best 4, temperature 0 | {figures['best_4_containment']:.3f} |",
        f"| the same two at temperature 1 with shared noise | {figures['agreement_temperature_1']:.3f}, "
        f"{figures['best_4_containment_temperature_1']:.3f} |",
    ]
    return [*lines, *sampled_lines(figures.get("sampled", []))]


PROMPTS = {
    "prompt_def": "`def`",
    "prompt_def_space": "`def` and a token for the space",
    "prompt_held_out_signature": "a held-out signature",
}
"""What the kinds of prompts are called in a card."""


def sampled_lines(sampled: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of sampled functions, one line for each prompt and temperature; empty without samples."""
    if not sampled:
        return []
    lines = [
        "",
        "Functions sampled from the target, cut at their end. *Parse*: pass `ast.parse` as one whole "
        "function; *broken*: a syntax error before the end; *unfinished*: no end within "
        f"{NEW_TOKENS} new tokens. Of those that parse, *distinct*: unlike one another; *empty*: a body "
        "of nothing but a docstring, `pass` or `...`; *repetitive*: fewer than half of the lines differ; "
        "*lines*: the median.",
        "",
        "| after | temperature | parse | broken | unfinished | distinct | empty | repetitive | lines |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, name in PROMPTS.items():
        for entry in sampled:
            counts = entry[kind]
            cells = [counts[key] for key in ("broken", "unfinished", "distinct", "empty", "repetitive")]
            lines.append(
                f"| {name} | {entry['temperature']:g} | {counts['parsed']} of {counts['samples']} | "
                f"{' | '.join(map(str, cells))} | {counts['median_lines']:g} |"
            )
    return lines
