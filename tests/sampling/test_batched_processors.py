"""Many rows processed at once against `processors.process`, row by row, to the bit."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.sampling.batched_processors import process_rows
from ssd_serve.sampling.overrides import LogitOverrides
from ssd_serve.sampling.processors import TokenCounts, process
from ssd_serve.sampling.rows import SamplingRows
from tests.examples import examples
from tests.sampling.test_native_choice import VOCABULARY, awkward_logits, requests


def one_by_one(logits: torch.Tensor, rows: list[SamplingRows]) -> torch.Tensor:
    found = [process(line, row.parameters, row.before) for line, row in zip(logits, rows, strict=True)]
    return torch.stack(found)


@given(st.lists(requests(), min_size=1, max_size=4), st.integers(0, 1000))
@settings(max_examples=examples(400))
def test_batched_processing_equals_the_reference(trees: list[SamplingRows], seed: int) -> None:
    rows = [row for each in trees for row in each.split()]
    logits = awkward_logits(len(rows), VOCABULARY, seed)
    before = logits.clone()
    assert torch.equal(process_rows(logits, rows), one_by_one(logits, rows))
    assert torch.equal(logits.nan_to_num(9.0), before.nan_to_num(9.0)), "the logits must not change"


IDS = st.integers(-3, VOCABULARY + 3)  # also such that the vocabulary does not have
FEW = st.integers(0, 2)  # words of these are met often
EDITING = st.builds(
    SamplingParameters,
    temperature=st.just(0.0),
    logit_bias=st.dictionaries(IDS, st.sampled_from([-100.0, 2.5]), max_size=4),
    allowed_token_ids=st.none() | st.lists(IDS, max_size=9).map(tuple),
    bad_words=st.lists(st.lists(FEW, max_size=4).map(tuple), max_size=6).map(tuple),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.lists(IDS, max_size=3).map(tuple),
)


@given(EDITING, st.lists(FEW, max_size=6), st.lists(FEW, max_size=4).map(tuple), st.integers(0, 1000))
@settings(max_examples=examples(400))
def test_logit_overrides_apply_to_all_rows_of_a_request(
    parameters: SamplingParameters, output: list[int], path: tuple[int, ...], seed: int
) -> None:
    edits, counts = LogitOverrides(parameters, (0,)), TokenCounts((), output)
    first = SamplingRows(parameters, 0, 9, counts, path, 1, (0,), None, [0, 1, 2], [-1, 0, 1], [1, 2, 3])
    rows = first._replace(overrides=edits).split()
    logits = awkward_logits(len(rows), VOCABULARY, seed)
    assert torch.equal(process_rows(logits, rows), one_by_one(logits, rows))


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_batched_processing_has_constant_operator_count() -> None:
    parameters = SamplingParameters(
        temperature=0.0,
        logit_bias=dict.fromkeys(range(30), 1.0),
        allowed_token_ids=tuple(range(36)),
        bad_words=((1,), (2,)),
        min_tokens=9,
    )
    edits = LogitOverrides(parameters, (0,))
    operators: list[int] = []
    for number in (2, 2, 200):
        rows = [SamplingRows(parameters, 0, 0, overrides=edits)] * number
        with Counting() as counting:
            process_rows(torch.zeros((number, VOCABULARY)), rows)
        operators.append(counting.count)
    assert operators[0] > operators[1] == operators[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameters", [SamplingParameters(top_p=0.9), SamplingParameters(top_k=50, top_p=0.8)]
)
def test_top_k_and_top_p_sort_large_batches_in_chunks(parameters: SamplingParameters) -> None:
    logits = 4 * torch.randn((9, 1 << 20), generator=torch.Generator().manual_seed(1))
    rows = [SamplingRows(parameters, 0, index) for index in range(9)]
    assert torch.equal(process_rows(logits, rows), one_by_one(logits, rows))
