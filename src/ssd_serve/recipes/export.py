"""Exports a trained pair from a training checkpoint: two folders in Hugging Face layout, with model cards.

Works at any time of a training. Knows the checkpoint's contents and the figures measured; does not train.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd_serve.recipes.checkpoint import replaced_folder, write_decoder, write_json
from ssd_serve.recipes.decoder import Decoder, Shape
from ssd_serve.recipes.functions import NEW_TOKENS
from ssd_serve.recipes.tokenizer import save_tokenizer
from ssd_serve.recipes.training import read_state
from ssd_serve.recipes.workspace import LIBRARY_TIMES, Workspace


@dataclass(frozen=True)
class Trained:
    """What an export needs of a training checkpoint."""

    decoder: Decoder
    step: int
    tokens: int
    of_tokens: int
    worked_seconds: float


def read_trained(checkpoint: Path) -> Trained:
    """Read a model and its counters from a training checkpoint."""
    state = read_state(checkpoint)
    decoder = Decoder(Shape(**state["shape"]))
    decoder.load_state_dict(state["decoder"])
    return Trained(
        decoder.eval(),
        step=state["step"],
        tokens=state["tokens"],
        of_tokens=state["of_tokens"],
        worked_seconds=state["worked"],
    )


def export_pair(
    workspace: Workspace, target: Path, draft: Path, figures: Mapping[str, Any] | None = None
) -> None:
    """Write both folders, each replaced in one move; `figures`, of `evaluate-pair`, go into the cards."""
    summary = workspace.summary()
    tokenizer = workspace.tokenizer()
    for role, destination in (("target", target), ("draft", draft)):
        trained = read_trained(workspace.checkpoint(role))
        with replaced_folder(destination) as folder:
            write_decoder(trained.decoder, folder)
            save_tokenizer(tokenizer, folder, trained.decoder.shape.context)
            if role == "target":
                write_json(folder / "held_out.json", summary["held_out"])
                _set_sampling(folder / "generation_config.json", figures)
            card = model_card(role, trained, summary, figures)
            (folder / "README.md").write_text(card, encoding="utf-8")


def best_sampling(figures: Mapping[str, Any] | None) -> dict[str, float]:
    """The temperature and top-p by which most functions parse that say something; empty without samples."""
    sampled = (figures or {}).get("sampled", [])
    best = max(sampled, key=lambda entry: entry["parsed"] - entry["empty"], default=None)
    return {} if best is None else {name: float(best[name]) for name in ("temperature", "top_p")}


def _set_sampling(file: Path, figures: Mapping[str, Any] | None) -> None:
    """Let requests that name no sampling take what parses best."""
    sampling = best_sampling(figures)
    if sampling:
        known = json.loads(file.read_text(encoding="utf-8"))
        write_json(file, {**known, "do_sample": True, **sampling})


def model_card(
    role: str, trained: Trained, summary: Mapping[str, Any], figures: Mapping[str, Any] | None
) -> str:
    """The README.md beside the weights."""
    return "\n".join(
        [
            "---",
            "license: other",
            "license_name: permissive-data",
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
            *shape_lines(trained.decoder.shape),
            "",
            "## Data and licence",
            "",
            *data_lines(summary),
            "",
            "## Training",
            "",
            *training_lines(role, trained),
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
    "draft": "The draft model of the embedded pair: distilled from the target beside it by "
    "`ssd recipe train-pair`, so as to guess the target's choices. It is not meant to be used alone.",
}

STEPPING = (
    "- Muon for the matrices, AdamW for the rest, bf16 autocast; the learning rate is constant, then "
    "falls linearly to zero at the last token."
)

LIMITS = (
    "It is not an assistant, knows no facts and cannot follow instructions. It continues text that looks "
    "like Python source: plausible names, lines that mostly make sense, no understanding; of the functions "
    "that it writes some do not parse, as the figures above say, and few do what their names promise. The "
    "chat template turns messages into comments and lets the model continue with code. It may repeat "
    "passages of its training data, which are under the licences above. Do not use its output for anything "
    "but trying out and measuring the server."
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


def data_lines(summary: Mapping[str, Any], listed: str = "the target's `held_out.json`") -> list[str]:
    """The corpus, whose held-out files are listed there."""
    if "texts" in summary:
        return text_lines(summary)
    packages: list[Mapping[str, Any]] = summary["packages"]
    files = f"{summary['train_files']:,} files, {summary['train_bytes'] / 1e6:.1f} MB, "
    files += f"{summary['train_tokens']:,} tokens."
    if library := summary.get("library"):
        of = [f"- The Python sources of the folder `{library}`: {files}", "- Licence of that: its own."]
    else:
        of = [
            f"- The Python sources of the standard library of CPython {platform.python_version()}, its tests "
            f"included: {files}",
            "- Licence of that: Python Software Foundation License Version 2, "
            "copyright Python Software Foundation; some modules carry notices of their own.",
        ]
    lines = [
        *of,
        f"- Held out by a hash of the path: {len(summary['held_out'])} files, "
        f"{summary['held_out_bytes'] / 1e6:.2f} MB, {summary['held_out_tokens']:,} tokens, "
        f"listed in {listed}. {summary['removed_files']} files that share 40 % or more of their "
        "three-line runs with a held-out file were removed before the tokenizer was trained.",
    ]
    if packages:
        named = "; ".join(f"{each['name']} {each['version']} ({each['licence']})" for each in packages)
        lines.append(
            f"- The Python sources of {len(packages)} packages under permissive licences, as they declare "
            f"them: {sum(each['files'] for each in packages):,} files, "
            f"{sum(each['tokens'] for each in packages):,} tokens, each text once, without files that "
            "repeat half of others or stand near a held-out one; a pass over them is "
            f"{LIBRARY_TIMES} over the library: {named}."
        )
    return lines


def text_lines(summary: Mapping[str, Any]) -> list[str]:
    """Texts that a person brought."""
    texts: list[Mapping[str, Any]] = summary["texts"]
    named = ", ".join(f"`{Path(each['path']).name}`" for each in texts[:8])
    return [
        f"- {len(texts)} files of text ({named}{', ...' if len(texts) > 8 else ''}), "
        f"{sum(each['bytes'] for each in texts) / 1e6:.1f} MB: {summary['train_tokens']:,} tokens, and "
        f"{summary['held_out_tokens']:,} of the last twentieth of each, which is held out.",
        "- Licence of that: its own.",
    ]


def state_of(tokens: int, of_tokens: int) -> str:
    """Whether a training came to its end."""
    return "finished" if tokens >= of_tokens else f"not finished: {tokens / of_tokens:.0%} of its tokens"


def training_lines(role: str, trained: Trained) -> list[str]:
    """Steps, tokens and time."""
    lesson = {
        "target": "It learned from the text alone.",
        "draft": "It learned from the finished target's distribution, with extra weight on its first choice.",
    }
    return [
        f"- {trained.step:,} steps, {trained.tokens:,} tokens, {trained.worked_seconds / 60:.0f} minutes "
        f"on a CPU in the background of other work ({state_of(trained.tokens, trained.of_tokens)}). "
        f"{lesson[role]}",
        f"{STEPPING} Windows of 512, then of 1,024 tokens.",
        "- Text further from the beginning than the longest window is read worse: loss rises from about "
        "1,500 tokens of context on.",
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


def sampled_lines(sampled: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of sampled functions, one line for each temperature and top-p; empty without samples."""
    if not sampled:
        return []
    lines = [
        "",
        "Functions sampled from the target after held-out signatures, cut at their end. *Parse*: pass "
        "`ast.parse` as one whole function; *broken*: a syntax error before the end; *unfinished*: no end "
        f"within {NEW_TOKENS} new tokens. Of those that parse, *distinct*: unlike one another; *empty*: a "
        "body of nothing but a docstring, `pass` or `...`; *repetitive*: fewer than half of the lines "
        "differ; *lines*: the median.",
        "",
        "| temperature | top-p | parse | broken | unfinished | distinct | empty | repetitive | lines |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in sampled:
        cells = [entry[key] for key in ("broken", "unfinished", "distinct", "empty", "repetitive")]
        lines.append(
            f"| {entry['temperature']:g} | {entry['top_p']:g} | {entry['parsed']} of {entry['samples']} | "
            f"{' | '.join(map(str, cells))} | {entry['median_lines']:g} |"
        )
    return lines
