"""Measures a pair of checkpoints on held-out files: loss, agreement, sampled functions.

Reads the list of held-out files that the target's folder carries, so that the figures are about text that
training never saw. Knows nothing of the engine (it uses the training decoder) and not how functions are
sampled and judged.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.checkpoint import read_decoder
from ssd_serve.recipes.corpus import SourceFile, read_sources
from ssd_serve.recipes.data import Document, Ids, encode
from ssd_serve.recipes.decoder import Decoder
from ssd_serve.recipes.functions import TEMPERATURES, FunctionSampler
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


class EvaluationTotals:
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
    totals = EvaluationTotals(seed)
    for document in documents:
        for ids, first in scored_windows(document, window):
            tokens = torch.from_numpy(ids)
            logits = target(tokens[None, :-1])[0, first:]  # [n, vocabulary]
            guesses = draft(tokens[None, :-1])[0, first:]
            totals.add(logits.float(), guesses.float(), tokens[1 + first :])
    return totals.figures(sum(document.bytes for document in documents))


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
    target: Path,
    draft: Path,
    library: Path,
    samples: int = 100,
    seed: int = 0,
    temperatures: Sequence[float] = TEMPERATURES,
) -> dict[str, object]:
    """All figures of a pair, ready for JSON; functions are sampled after held-out signatures."""
    held = held_out_files(target, library)
    documents = encode(held.files, load_tokenizer(target))
    figures = measure_pair(read_decoder(target), read_decoder(draft), documents, seed=seed)
    result: dict[str, object] = {
        **asdict(figures),
        "held_out_files": len(held.files),
        "held_out_files_missing": held.missing,
    }
    if samples:
        prompts = signatures(held.files, samples)
        result["sampled"] = FunctionSampler(target).measure(prompts, temperatures, seed)
    return result
