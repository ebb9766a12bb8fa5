"""Tests of resumed requests: the rest of the output equals that of an uninterrupted request."""

import pytest
from msgspec.structs import replace

from ssd_serve.base.messages import (
    Committed,
    Finished,
    SamplingParameters,
    Submit,
)
from ssd_serve.verifier.control.wait import FixedSteps
from ssd_serve.verifier.engine import Engine
from tests.fakes import EOS, VOCABULARY, Case, make_engine, mixed_requests, run
from tests.verifier.drafter_factory import connect_inline


def engine_of(drafter: str = "inline", **fields: int) -> Engine:
    case = Case(**{"slots": 4096, **fields}, policy=lambda: FixedSteps(3))  # type: ignore[arg-type]
    engine, _ = make_engine(case)
    if drafter == "inline":
        connect_inline(engine, case)
    return engine


@pytest.mark.parametrize("drafter", ["none", "inline"])
@pytest.mark.parametrize("share", [0.3, 0.95])
def test_resumed_output_equals_the_whole(drafter: str, share: float) -> None:
    submits = mixed_requests(16)
    whole = run(engine_of("none"), submits)
    cuts = {each.request: int(share * len(whole[each.request].tokens)) for each in submits}
    resumed = [replace(each, output=whole[each.request].tokens[: cuts[each.request]]) for each in submits]
    rest = run(engine_of(drafter), resumed)
    for number, cut in cuts.items():
        assert rest[number].tokens == whole[number].tokens[cut:]
        assert rest[number].reason == whole[number].reason


def test_resume_of_a_complete_output_is_finished_at_once() -> None:
    engine = engine_of()
    parameters = SamplingParameters(max_tokens=3, stop_token_ids=(9,))
    for number, (output, reason, stop) in enumerate(
        (((5, 6, 7), "length", None), ((5, EOS), "stop", EOS), ((5, 6, 9), "stop", 9))
    ):
        answer = engine.submit(Submit(number, (1, 2), parameters, 7, output))
        assert isinstance(answer, Finished)
        assert (answer.reason, answer.stop_token) == (reason, stop)
    assert not engine.busy


def test_resumed_request_is_not_refused_by_a_full_queue() -> None:
    engine = engine_of(max_running=1, max_waiting=1)
    for number in range(6):
        engine.submit(Submit(number, (1, 2), SamplingParameters(max_tokens=100, ignore_eos=True), 7, (3,)))
        engine.step()
    assert len(engine.scheduler.waiting) == 5
    refused = engine.submit(Submit(9, (1, 2), SamplingParameters(), 7, (VOCABULARY,)))
    assert refused is not None
    assert "token ids" in refused.message


def test_resume_does_not_repeat_prompt_logprobs() -> None:
    parameters = SamplingParameters(max_tokens=4, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    prompt = tuple(range(1, 31))
    whole = reports(engine_of(prefill_chunk=8), Submit(0, prompt, parameters, 5))
    scores = [entry.chosen for report in whole for entry in report.prompt_logprobs]
    tokens = tuple(token for report in whole for token in report.tokens)
    for scored, known in ((0, 0), (11, 0), (29, 0), (29, 2)):
        again = reports(engine_of(), Submit(0, prompt, parameters, 5, tokens[:known], scored))
        found = [entry.chosen for report in again for entry in report.prompt_logprobs]
        assert found == pytest.approx(scores[scored:], abs=1e-5)
        assert tuple(token for report in again for token in report.tokens) == tokens[known:]
        assert sum(len(report.logprobs) for report in again) == 4 - known


def reports(engine: Engine, submit: Submit) -> list[Committed]:
    assert engine.submit(submit) is None
    found: list[Committed] = []
    while engine.busy:
        found += [report for report in engine.step() if isinstance(report, Committed)]
    return found
