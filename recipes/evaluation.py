"""Measures a pair of checkpoints on held-out files: loss, agreement, sampled functions.

Reads the list of held-out files that the target's folder carries, so that the figures are about text that
training never saw. Knows nothing of the engine: it uses the training decoder and, for sampling,
`transformers`.
"""

import ast
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ssd_serve.errors import UserError
from ssd_serve.recipes.checkpoint import read_decoder
from ssd_serve.recipes.corpus import SourceFile, read_sources
from ssd_serve.recipes.data import Document, Ids, encode
from ssd_serve.recipes.decoder import Decoder
from ssd_serve.recipes.tokenizer import load_tokenizer
from ssd_serve.recipes.workspace import text_hash

BEST = 4
"""How many of the draft's guesses count for containment."""


@dataclass(frozen=True)
class Held:
    """The held-out files that were found unchanged, and how many were not."""

    files: tuple[SourceFile, ...]
    missing: int


@dataclass(frozen=True)
class PairFigures:
    """Teacher-forced figures over held-out positions; losses in nats a token, shares 0 to 1.

    At temperature 1 target and draft choose with the same exponential noise at each position.
    """

    positions: int
    held_out_bytes: int
    target_loss: float
    target_bits_per_byte: float
    draft_loss: float
    draft_bits_per_byte: float
    agreement: float
    best_4_containment: float
    agreement_temperature_1: float
    best_4_containment_temperature_1: float


def held_out_files(target: Path, library: Path) -> Held:
    """The files named by the target's `held_out.json` whose text in `library` has the same hash."""
    path = target / "held_out.json"
    if not path.is_file():
        raise UserError(f"{target} has no held_out.json: which files are held out is not known.")
    wanted = {
        str(entry["path"]): str(entry["sha256"]) for entry in json.loads(path.read_text(encoding="utf-8"))
    }
    files = tuple(file for file in read_sources(library) if wanted.get(file.path) == text_hash(file))
    if not files:
        raise UserError(f"None of the {len(wanted)} held-out files is in {library} unchanged.")
    return Held(files, len(wanted) - len(files))


def scored_windows(document: Document, window: int) -> Iterator[tuple[Ids, int]]:
    """Windows of at most `window` tokens and the first position in each whose prediction is scored.

    Windows overlap by half, so that every scored position but a file's first ones has at least half a window
    before it.
    """
    inputs = len(document.ids) - 1
    scored = 0
    while scored < inputs:
        start = max(0, scored - window // 2)
        end = min(inputs, start + window)
        yield document.ids[start : end + 1], scored - start
        scored = end


class Totals:
    """Running sums over scored positions."""

    def __init__(self, seed: int) -> None:
        self.positions = 0
        self.sums = torch.zeros(6, dtype=torch.float64)
        self.generator = torch.Generator().manual_seed(seed)

    def add(self, logits: Tensor, guesses: Tensor, wanted: Tensor) -> None:
        """logits and guesses fp32 [n, vocabulary], wanted int64 [n]."""
        noise = torch.empty_like(logits).exponential_(generator=self.generator).log_().neg_()
        log_p, log_q = logits.log_softmax(-1), guesses.log_softmax(-1)
        values = [
            functional.nll_loss(log_p, wanted, reduction="sum"),
            functional.nll_loss(log_q, wanted, reduction="sum"),
        ]
        for p, q in ((log_p, log_q), (log_p + noise, log_q + noise)):
            best = q.topk(BEST, dim=-1).indices  # [n, BEST]
            equal = best == p.argmax(-1, keepdim=True)
            values += [equal[:, 0].sum(), equal.any(-1).sum()]
        self.sums += torch.stack([value.double() for value in values])
        self.positions += len(wanted)

    def figures(self, held_out_bytes: int) -> PairFigures:
        """The sums as figures."""
        mean = (self.sums / self.positions).tolist()
        bits = self.positions / math.log(2) / held_out_bytes
        return PairFigures(
            positions=self.positions,
            held_out_bytes=held_out_bytes,
            target_loss=mean[0],
            target_bits_per_byte=mean[0] * bits,
            draft_loss=mean[1],
            draft_bits_per_byte=mean[1] * bits,
            agreement=mean[2],
            best_4_containment=mean[3],
            agreement_temperature_1=mean[4],
            best_4_containment_temperature_1=mean[5],
        )


@torch.no_grad()
def measure_pair(
    target: Decoder, draft: Decoder, documents: Sequence[Document], window: int = 1024, seed: int = 0
) -> PairFigures:
    """Teacher-forced figures in fp32 over every position of the documents."""
    totals = Totals(seed)
    for document in documents:
        for ids, first in scored_windows(document, window):
            tokens = torch.from_numpy(ids)
            logits = target(tokens[None, :-1])[0, first:]  # [n, vocabulary]
            guesses = draft(tokens[None, :-1])[0, first:]
            totals.add(logits.float(), guesses.float(), tokens[1 + first :])
    return totals.figures(sum(document.bytes for document in documents))


def whole_function(text: str) -> bool:
    """Whether the function that `text` begins with ends within it and parses.

    It ends at the first line indented less than its body. A line inside brackets or a string may be so too,
    hence every such cut is tried.
    """
    lines = text.splitlines(keepends=True)
    header = header_lines(lines)
    body = next((line for line in lines[header:] if line.strip()), "")
    cuts = [index for index in range(header + 1, len(lines)) if indented_less(lines[index], body)]
    return any(is_one_function("".join(lines[:cut])) for cut in cuts)


def header_lines(lines: Sequence[str]) -> int:
    """How many lines the `def` takes up to its colon; 0 if it has its body on the same line."""
    for count in range(1, len(lines) + 1):
        if is_one_function("".join(lines[:count]).rstrip() + " pass\n"):
            return count
    return 0


def indented_less(line: str, body: str) -> bool:
    """Whether a line that is not blank begins further left than `body`."""
    return bool(line.strip()) and len(line) - len(line.lstrip()) < max(1, len(body) - len(body.lstrip()))


def is_one_function(text: str) -> bool:
    """Whether `text` is exactly one function definition."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return False
    return len(body) == 1 and isinstance(body[0], ast.FunctionDef)


def sampled_functions(target: Path, prompts: Sequence[str], seed: int, new_tokens: int = 512) -> list[str]:
    """Each prompt with its continuation at temperature 0.8; the end of text is marked by a `pass` line."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise UserError("Sampling needs the package transformers; install it or pass --samples 0.") from error
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.manual_seed(seed)
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True)
    length = batch["input_ids"].shape[1]
    output = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=True,
        temperature=0.8,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        pad_token_id=tokenizer.eos_token_id,
    )
    texts: list[str] = []
    for prompt, ids in zip(prompts, output[:, length:].tolist(), strict=True):
        end = "\npass\n" if tokenizer.eos_token_id in ids else ""
        texts.append(prompt + tokenizer.decode(ids, skip_special_tokens=True) + end)
    return texts


def signatures(files: Sequence[SourceFile], count: int) -> list[str]:
    """The first lines, up to the colon, of `count` top-level functions, spread over the files."""
    found = [
        line
        for file in files
        for line in file.text.splitlines()
        if line.startswith("def ") and line.endswith(":") and len(line) < 100
    ]
    step = max(1, len(found) // max(1, count))
    return found[::step][:count]


def evaluate_pair(
    target: Path, draft: Path, library: Path, samples: int = 100, seed: int = 0
) -> dict[str, object]:
    """All figures of a pair, ready for JSON."""
    held = held_out_files(target, library)
    documents = encode(held.files, load_tokenizer(target))
    figures = measure_pair(read_decoder(target), read_decoder(draft), documents, seed=seed)
    result: dict[str, object] = {
        **asdict(figures),
        "held_out_files": len(held.files),
        "held_out_files_missing": held.missing,
    }
    if samples:
        kinds = {
            "prompt_def": ["def"] * samples,
            "prompt_held_out_signature": signatures(held.files, samples),
        }
        counts: dict[str, object] = {"temperature": 0.8}
        for kind, prompts in kinds.items():
            texts = sampled_functions(target, prompts, seed)
            counts[kind] = {"samples": len(texts), "parsed": sum(map(whole_function, texts))}
        result["sampled"] = counts
    return result
