"""Log-probabilities of the prompt: every token of it, once, as the model alone would give them."""

import math

import pytest
import torch

from ssd_serve.base.messages import Committed, SamplingParameters, Submit
from ssd_serve.drafter.inline import InlineChannel
from ssd_serve.kernels.batch import RequestRows, build_batch
from ssd_serve.verifier.control.budget import FixedSteps
from ssd_serve.verifier.engine import Engine
from tests.fakes import HELLO, Case, FakeModel, make_core, make_engine, mixed_requests, run

PROMPT = tuple(1 + (5 * place * place + place) % 39 for place in range(60))


def engine_of(slots: int = 4096, chunk: int = 32) -> Engine:
    case = Case(slots=slots, prefill_chunk=chunk, policy=lambda: FixedSteps(3))
    engine, _ = make_engine(case)
    engine.drafters.connect(InlineChannel(make_core(case), HELLO), synchronous=True)
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


def told(engine: Engine, submits: list[Submit]) -> dict[int, list[Committed]]:
    found: dict[int, list[Committed]] = {submit.request: [] for submit in submits}
    for submit in submits:
        assert engine.submit(submit) is None
    while engine.busy:
        for report in engine.step():
            if isinstance(report, Committed):
                found[report.request].append(report)
    return found


@pytest.mark.parametrize("chunk", [16, 32, 1000])
def test_prompt_logprobs_of_each_token_are_reported_once(chunk: int) -> None:
    submits = [scored(0), scored(1, top=0, temperature=0.3, repetition_penalty=1.4), *mixed_requests(6)[2:]]
    found = told(engine_of(chunk=chunk), submits)
    for number, top in ((0, 2), (1, 0)):
        entries = [entry for report in found[number] for entry in report.prompt_logprobs]
        assert [entry.chosen for entry in entries] == pytest.approx(expected(PROMPT), abs=1e-5)
        assert all(len(entry.top) == top for entry in entries)
        assert all(math.isfinite(entry.chosen) for entry in entries)
    assert not [report for number in range(2, 6) for report in found[number] if report.prompt_logprobs]


def test_the_text_is_the_same_with_them() -> None:
    plain = [Submit(0, PROMPT, SamplingParameters(max_tokens=9, ignore_eos=True), 0)]
    assert run(engine_of(), [scored(0)])[0].tokens == run(engine_of(), plain)[0].tokens


def test_a_cached_prompt_is_scored_all_the_same() -> None:
    engine = engine_of()
    for submits in ([scored(0)], [scored(1), scored(2)]):
        for reports in told(engine, submits).values():
            entries = [entry.chosen for report in reports for entry in report.prompt_logprobs]
            assert entries == pytest.approx(expected(PROMPT), abs=1e-5)
    plain = run(engine, [Submit(3, PROMPT, SamplingParameters(max_tokens=9), 3)])
    assert plain[3].figures.cached_prompt_tokens == len(PROMPT) - 1  # others may still use what they read


def test_a_request_that_is_preempted_while_it_reads_tells_nothing_twice() -> None:
    engine = engine_of(slots=90, chunk=1)
    older = Submit(0, PROMPT[:5], SamplingParameters(max_tokens=80, ignore_eos=True), 0)
    reports = told(engine, [older, scored(1)])[1]
    assert engine.scheduler.preemptions > 0
    entries = [entry.chosen for report in reports for entry in report.prompt_logprobs]
    assert entries == pytest.approx(expected(PROMPT), abs=1e-5)


def test_a_single_token_has_none() -> None:
    reports = told(engine_of(), [scored(0, (7,))])[0]
    assert all(report.tokens and not report.prompt_logprobs for report in reports)
