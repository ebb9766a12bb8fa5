"""Tests of prompt log-probabilities: each token once, as the model alone gives them."""

import math

import pytest
import torch

from ssd_serve.base.messages import Committed, SamplingParameters, Submit
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.verifier.control.wait import FixedSteps
from ssd_serve.verifier.engine import Engine
from tests.fakes import Case, FakeModel, make_engine, mixed_requests, run
from tests.verifier.drafter_factory import connect_inline

PROMPT = tuple(1 + (5 * place * place + place) % 39 for place in range(60))


def engine_of(slots: int = 4096, chunk: int = 32) -> Engine:
    case = Case(slots=slots, prefill_chunk=chunk, policy=lambda: FixedSteps(3))
    engine, _ = make_engine(case)
    connect_inline(engine, case)
    return engine


def scored(number: int, prompt: tuple[int, ...] = PROMPT, top: int = 2, **fields: float) -> Submit:
    parameters = SamplingParameters(prompt_logprobs=top, max_tokens=9, ignore_eos=True, **fields)  # type: ignore[arg-type]
    return Submit(number, prompt, parameters, number)


def expected(prompt: tuple[int, ...]) -> list[float]:
    """The model's own log-probability of each token after the first, all rows in one forward."""
    model, count = FakeModel(len(prompt)), len(prompt)
    rows = RequestRows(
        list(prompt), list(range(count)), range(count), torch.zeros(0).int().numpy(), list(range(count))
    )
    values = torch.log_softmax(model.forward(build_batch([rows])).logits.float(), 1)
    return [float(values[place, token]) for place, token in enumerate(prompt[1:])]


def committed(engine: Engine, submits: list[Submit]) -> dict[int, list[Committed]]:
    found: dict[int, list[Committed]] = {submit.request: [] for submit in submits}
    for submit in submits:
        assert engine.submit(submit) is None
    while engine.busy:
        for report in engine.step():
            if isinstance(report, Committed):
                found[report.request].append(report)
    return found


@pytest.mark.parametrize("chunk", [16, 1000])
def test_prompt_logprobs_of_each_token_are_reported_once(chunk: int) -> None:
    submits = [scored(0), scored(1, top=0, temperature=0.3, repetition_penalty=1.4), *mixed_requests(6)[2:]]
    found = committed(engine_of(chunk=chunk), submits)
    for number, top in ((0, 2), (1, 0)):
        entries = [entry for report in found[number] for entry in report.prompt_logprobs]
        assert [entry.chosen for entry in entries] == pytest.approx(expected(PROMPT), abs=1e-5)
        assert all(len(entry.top) == top for entry in entries)
        assert all(math.isfinite(entry.chosen) for entry in entries)
    assert not [report for number in range(2, 6) for report in found[number] if report.prompt_logprobs]


def test_cached_prompt_has_prompt_logprobs() -> None:
    engine = engine_of()
    output: tuple[int, ...] = ()
    for submits in ([scored(0)], [scored(1), scored(2)]):
        for reports in committed(engine, submits).values():
            output = tuple(token for report in reports for token in report.tokens)
            entries = [entry.chosen for report in reports for entry in report.prompt_logprobs]
            assert entries == pytest.approx(expected(PROMPT), abs=1e-5)
    plain = run(engine, [Submit(2, PROMPT, SamplingParameters(max_tokens=9, ignore_eos=True), 2)])
    assert plain[2].tokens == output
    assert plain[2].figures.cached_prompt_tokens == len(PROMPT) - 1


def test_preempted_prefill_reports_prompt_logprobs_once() -> None:
    engine = engine_of(slots=90, chunk=1)
    older = Submit(0, PROMPT[:5], SamplingParameters(max_tokens=80, ignore_eos=True), 0)
    reports = committed(engine, [older, scored(1)])[1]
    assert engine.scheduler.preemptions > 0
    entries = [entry.chosen for report in reports for entry in report.prompt_logprobs]
    assert entries == pytest.approx(expected(PROMPT), abs=1e-5)


def test_prompt_of_one_token_has_no_logprobs() -> None:
    reports = committed(engine_of(), [scored(0, (7,))])[0]
    assert all(report.tokens and not report.prompt_logprobs for report in reports)
