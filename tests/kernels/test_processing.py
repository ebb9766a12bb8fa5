"""Many rows processed at once against `processors.process`, row by row, to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_serve.kernels.processing import process_rows
from ssd_serve.kernels.processors import process
from ssd_serve.kernels.sampling_rows import SamplingRows
from ssd_serve.messages import SamplingParameters
from tests.kernels.test_native_choosing import VOCABULARY, awkward_logits, requests


def one_by_one(logits: torch.Tensor, rows: list[SamplingRows]) -> torch.Tensor:
    return torch.stack(
        [
            process(line, row.parameters, row.counts, row.path, row.generated, row.eos)
            for line, row in zip(logits, rows, strict=True)
        ]
    )


@given(st.lists(requests(), min_size=1, max_size=4), st.integers(0, 1000))
@settings(max_examples=400)
def test_equals_the_definition(asked: list[SamplingRows], seed: int) -> None:
    rows = [row for each in asked for row in each.single()]
    logits = awkward_logits(len(rows), VOCABULARY, seed)
    before = logits.clone()
    assert torch.equal(process_rows(logits, rows), one_by_one(logits, rows))
    assert torch.equal(logits.nan_to_num(9.0), before.nan_to_num(9.0)), "the logits must not change"


@pytest.mark.parametrize(
    "parameters", [SamplingParameters(top_p=0.9), SamplingParameters(top_k=50, top_p=0.8)]
)
def test_more_rows_than_are_ordered_together(parameters: SamplingParameters) -> None:
    logits = 4 * torch.randn((9, 1 << 20), generator=torch.Generator().manual_seed(1))
    rows = [SamplingRows(parameters, 0, index) for index in range(9)]
    assert torch.equal(process_rows(logits, rows), one_by_one(logits, rows))
