"""Following docs/adding.md gives a sampling parameter that acts in every path and is held to its range."""

import pytest

from tests.adding_clone import Clone

pytestmark = pytest.mark.slow

ACTS = """
import torch
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.sampling.batched_processors import process_rows
from ssd_serve.sampling.choice import sample
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.parameters import COMPILED, UnsupportedParameters, needs_processing, has_truncation
from ssd_serve.sampling.processors import RowContext, process
from ssd_serve.sampling.rows import SamplingRows

logits = 3 * torch.randn((40, 50), generator=torch.Generator().manual_seed(5))
for top_a in (0.04, 0.5):
    parameters = SamplingParameters(temperature=0.7, top_k=40, top_a=top_a)
    assert has_truncation(parameters) and needs_processing(parameters, 0)
    assert UnsupportedParameters(COMPILED).needs_process(parameters)
    rows = [SamplingRows(parameters, seed, 9) for seed in range(40)]
    one_by_one = torch.stack([process(line, parameters, RowContext()) for line in logits])
    probabilities = (logits / 0.7).double().softmax(1)
    kept = probabilities >= top_a * probabilities.amax(1, keepdim=True) ** 2
    best = torch.zeros_like(kept).scatter_(1, (logits / 0.7).topk(40).indices, True)
    assert torch.equal(one_by_one.isfinite(), kept & best)
    assert 0 < kept.sum() < kept.numel()
    assert torch.equal(process_rows(logits, rows), one_by_one)
    choices = sample(logits, rows, NoiseRows(50, 64)).choices
    assert all(kept[row, choice] for row, choice in enumerate(choices))
    free = [row._replace(parameters=SamplingParameters(temperature=0.7, top_k=40)) for row in rows]
    assert choices != sample(logits, free, NoiseRows(50, 64)).choices
greedy = SamplingParameters(temperature=0.0, top_a=0.5)
assert not has_truncation(greedy)
print("acts")
"""
REQUESTS = """
import json
from ssd_serve import SamplingParams
from ssd_serve.base.errors import RequestError
from ssd_serve.sampling.validation import engine_parameters
from ssd_serve.server.openapi import SecuritySchemes, build_document
from ssd_serve.server.openai.protocol import ChatRequest, CompletionRequest
from tests.server.fakes import READY

request = CompletionRequest.model_validate_json('{"prompt": "a", "top_a": 0.2}')
for each in (request, SamplingParams(top_a=0.2)):
    assert engine_parameters(each, READY, max_tokens=3, logprobs=None).top_a == 0.2
assert engine_parameters(SamplingParams(), READY, max_tokens=3, logprobs=None).top_a == 0.0
assert "top_a" in ChatRequest.model_fields
document = build_document("x", "1", SecuritySchemes())["components"]["schemas"]
for name in ("CompletionRequest", "ChatRequest"):
    (number, _) = document[name]["properties"]["top_a"]["anyOf"]
    assert (number["type"], number["minimum"], number["maximum"]) == ("number", 0, 1), number
try:
    SamplingParams(top_a=1.5)
except RequestError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return Clone("A sampling parameter", tmp_path_factory.mktemp("clone"))


def test_added_parameter_acts_in_reference_and_batched_paths(clone: Clone) -> None:
    assert clone.run("-c", ACTS) == "acts\n"


def test_added_parameter_is_validated_over_http_and_in_python(clone: Clone) -> None:
    assert clone.run("-c", REQUESTS) == "top_a: input should be less than or equal to 1\n"


def test_tests_of_the_parameter_table_cover_the_added_one(clone: Clone) -> None:
    """The table's own tests cover the new parameter: predicates, the reference path, and the native kernel
    that declines it."""
    files = ["tests/sampling/test_parameters.py", "tests/sampling/test_validation.py"]
    chosen = "top_a and not equals_the_reference or http_and_python or table or order"
    output = clone.run("-m", "pytest", "-q", *files, "-k", chosen)
    assert "passed" in output
    assert "deselected" in output
