"""What transformers says of pairs of texts: how probable the second one is behind the first."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = (
    ("def add(a, b):\n    return a", " + b"),
    ("import os\nimport", " sys"),
    ("for i in range(10):\n    print", "(i)"),
    ("class A:\n    def __init__(self", "):\n        self"),
    ('"""A module."""\n\nfrom typing', " import"),
    ("def fibonacci(n):\n    if n < 2:\n        return", " n\n    return fibonacci(n - 1)"),
    ("The weather in Rome is", " zebra purple"),
    ("x = [1, 2, 3]\nfor value in x:", "\n    print(value)\n"),
)


@dataclass(frozen=True, slots=True)
class PairScore:
    """Of one pair."""

    context: str
    continuation: str
    log_likelihood: float
    greedy: bool
    """Whether every token of it is the most probable one."""


def scores(folder: Path) -> Sequence[PairScore]:
    """By the model in this folder, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [_score(tokenizer, model, *texts) for texts in TEXTS]


def _score(tokenizer: Any, model: Any, context: str, continuation: str) -> PairScore:
    before, whole = (
        tokenizer(text, add_special_tokens=False).input_ids for text in (context, context + continuation)
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([whole])).logits[0]  # [tokens, vocabulary]
    rows = torch.log_softmax(logits.float(), -1)[len(before) - 1 : -1]
    tokens = torch.tensor(whole[len(before) :])
    chosen = rows.gather(1, tokens[:, None])[:, 0]
    return PairScore(context, continuation, float(chosen.sum()), bool((rows.argmax(1) == tokens).all()))
