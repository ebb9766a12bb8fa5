"""`ssd bench quality`: what a dtype costs on held-out text, through the engine's own model code.

Nats a token of one model in several dtypes on the same positions, and how often its most probable token is
that of the first dtype. Nothing is timed, so it may run on a busy machine. Knows no request and no draft.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ssd_serve.base.errors import UserError
from ssd_serve.bench.tables import text_table
from ssd_serve.kernels.batch import Int64Array, RequestRows, build_batch
from ssd_serve.kernels.products.int8 import can_multiply_int8
from ssd_serve.models.interface import Model
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.recipes.corpus import standard_library
from ssd_serve.recipes.data import encode
from ssd_serve.recipes.evaluation import held_out_files
from ssd_serve.recipes.tokenizer import load_tokenizer

CHUNK = 1024
DTYPES = ("fp32", "bf16", "int8")


@dataclass(frozen=True, slots=True)
class Scores:
    """One chunk in one dtype."""

    losses: torch.Tensor  # float64 [positions], nats
    best: torch.Tensor  # int64 [positions], the most probable token


def measure_quality(
    folder: Path, *, positions: int, dtypes: Sequence[str] = DTYPES, say: Callable[[str], None]
) -> dict[str, object]:
    """Loss and agreement of each dtype over at least `positions` held-out positions, if there are as many."""
    held = held_out_files(folder, standard_library())
    documents = encode(held.files, load_tokenizer(folder))
    chunks = list(chosen_chunks([document.ids for document in documents], positions))
    models = {
        dtype: load_model(folder, ModelOptions(device="cpu", dtype=dtype, slots=CHUNK, context=None))
        for dtype in dtypes
    }
    found: dict[str, list[Scores]] = {dtype: [] for dtype in dtypes}
    for index, tokens in enumerate(chunks):
        for dtype, model in models.items():
            found[dtype].append(score(model, tokens))
        if index % 10 == 9:
            say(f"{index + 1} of {len(chunks)} chunks")
    return {
        "bench": "quality",
        "model": models[dtypes[0]].facts.name,
        "positions": sum(len(tokens) - 1 for tokens in chunks),
        "chunk": CHUNK,
        "held_out_files": len(held.files),
        "held_out_files_missing": held.missing,
        "int8_products": can_multiply_int8(),
        "results": [
            {"dtype": dtype, "weight_bytes": models[dtype].facts.weight_bytes, **row}
            for dtype, row in compare(found).items()
        ],
    }


def chosen_chunks(texts: Sequence[Int64Array], positions: int) -> Iterator[Int64Array]:
    """Pieces of up to `CHUNK` tokens and the one after them, the first of every text before any second one.

    Ends when `positions` predictions are there.
    """
    if not texts or max(map(len, texts)) < 2:
        raise UserError("there is no held-out text to score")
    taken = 0
    for start in range(0, max(map(len, texts)) - 1, CHUNK):
        for text in texts:
            piece = text[start : start + CHUNK + 1]
            if len(piece) < 2:
                continue
            yield piece
            taken += len(piece) - 1
            if taken >= positions:
                return


def score(model: Model, tokens: Int64Array) -> Scores:
    """Predict every token but the first from those before it."""
    inputs = tokens[:-1].tolist()
    places = range(len(inputs))
    rows = RequestRows(inputs, places, places, np.zeros(0, dtype=np.int32), wanted=places)
    logits = model.forward(build_batch([rows])).logits
    wanted = torch.from_numpy(tokens[1:])
    return Scores(F.cross_entropy(logits.double(), wanted, reduction="none"), logits.argmax(1))


def compare(found: dict[str, list[Scores]]) -> dict[str, dict[str, float]]:
    """Of each dtype: the mean loss, how much more that is than the first one's, and the agreement with it."""
    joined = {
        dtype: (torch.cat([each.losses for each in scores]), torch.cat([each.best for each in scores]))
        for dtype, scores in found.items()
    }
    first_losses, first_best = next(iter(joined.values()))
    rows: dict[str, dict[str, float]] = {}
    for dtype, (losses, best) in joined.items():
        more = losses - first_losses
        rows[dtype] = {
            "nats_per_token": round(float(losses.mean()), 5),
            "more_nats_per_token": round(float(more.mean()), 5),
            # Of the mean, as if positions were independent.
            "more_nats_standard_error": round(float(more.std() / len(more) ** 0.5), 6),
            "same_best_token": round(float((best == first_best).double().mean()), 5),
        }
    return rows


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    rows = (
        (
            row["dtype"],
            f"{row['nats_per_token']:.5f}",
            f"{row['more_nats_per_token']:+.5f}",
            f"{row['same_best_token']:.5f}",
            f"{row['weight_bytes'] / 1e6:.2f}",
        )
        for row in result["results"]
    )
    head = ("dtype", "nats a token", "more", "same best token", "weights MB")
    return f"{result['model']}, {result['positions']} held-out positions\n{text_table(head, rows)}"
