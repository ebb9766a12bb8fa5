"""The engine's promises to its front end: refusals, ends, bounds, aborts."""

import dataclasses
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from ssd_serve.base.draft_messages import DrafterMessage, Open
from ssd_serve.base.messages import (
    Committed,
    Finished,
    Refused,
    SamplingParameters,
    Submit,
    VerifierReport,
)
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.interface import ForwardResult
from ssd_serve.verifier.control.wait import FixedSteps
from ssd_serve.verifier.engine import Engine
from tests import fakes
from tests.fakes import EOS, VOCABULARY, Case, FakeModel, make_core, make_engine, mixed_requests, run
from tests.verifier.drafter_factory import CoreDrafter, connect_inline

GREEDY = SamplingParameters(temperature=0.0, max_tokens=20, ignore_eos=True)


def speculating(case: Case | None = None) -> tuple[Engine, FakeModel]:
    case = case or Case(slots=4096, policy=lambda: FixedSteps(3), blur=0.0)
    engine, model = make_engine(case)
    connect_inline(engine, case)
    return engine, model


def plain() -> Engine:
    return make_engine(Case(drafter="none", slots=4096))[0]


def finished(reports: Sequence[VerifierReport]) -> list[Finished]:
    return [report for report in reports if isinstance(report, Finished)]


class CapturingModel(FakeModel):
    """Model with a capture in every forward."""

    def forward(self, batch: Batch) -> ForwardResult:
        return dataclasses.replace(super().forward(batch), includes_capture=True)


@pytest.mark.parametrize(("kind", "learns"), [(FakeModel, True), (CapturingModel, False)])
def test_forwards_with_capture_are_not_observed(
    kind: type[FakeModel], learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fakes, "FakeModel", kind)
    engine, _ = make_engine(Case(drafter="none", slots=4096))
    observed: list[object] = []
    monkeypatch.setattr(engine.planner, "observe", observed.append)
    engine.submit(Submit(1, (1, 2), GREEDY, 0))
    while engine.busy:
        engine.step()
    assert bool(observed) == learns


@pytest.mark.parametrize(
    ("prompt", "parameters", "field", "word"),
    [
        ((), GREEDY, "prompt", "empty"),
        ((1, VOCABULARY), GREEDY, "prompt", "token ids"),
        ((-1,), GREEDY, "prompt", "token ids"),
        ((1,) * 90, GREEDY, "max_tokens", "exceed the context of 99 tokens"),
        ((1,), SamplingParameters(max_tokens=0), "max_tokens", "at least 1"),
    ],
)
def test_impossible_requests_are_refused_with_the_field(
    prompt: tuple[int, ...], parameters: SamplingParameters, field: str, word: str
) -> None:
    engine, _ = make_engine(Case(slots=100))
    refused = engine.submit(Submit(1, prompt, parameters, 0))
    assert isinstance(refused, Refused)
    assert refused.field == field
    assert word in refused.message
    assert not engine.busy


def test_number_in_use_and_full_queue_are_refused() -> None:
    engine, _ = make_engine(Case(max_running=1, max_waiting=1, slots=4096))
    assert engine.submit(Submit(1, (1,), GREEDY, 0)) is None
    engine.step()
    again = engine.submit(Submit(1, (1,), GREEDY, 0))
    assert isinstance(again, Refused)
    assert again.field == "request"
    assert engine.submit(Submit(2, (1,), GREEDY, 0)) is None
    full = engine.submit(Submit(3, (1,), GREEDY, 0))
    assert isinstance(full, Refused)
    assert full.retry_after_s > 0


@pytest.mark.parametrize("steps", [0, 1, 4, 11])
def test_abort_frees_all_slots(steps: int) -> None:
    engine, _ = speculating(Case(slots=4096, prefix=False, policy=lambda: FixedSteps(3)))
    for submit in mixed_requests(3):
        engine.submit(submit)
    for _ in range(steps):
        engine.step()
    for number in range(3):
        engine.abort(number)
        engine.abort(number)
    assert not engine.busy
    assert engine.scheduler.pool.used == 0
    assert engine.step() == []


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_no_row_beyond_max_tokens(max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds are the verifier's: the drafter here ignores them."""
    case = Case(slots=4096, policy=lambda: FixedSteps(6), blur=0.0)
    engine, model = make_engine(case)
    core = make_core(case)
    handle = core.handle

    def without_limit(message: DrafterMessage) -> list[DrafterMessage]:
        if isinstance(message, Open):
            message = replace(message, parameters=replace(message.parameters, max_tokens=1000))
        return handle(message)

    monkeypatch.setattr(core, "handle", without_limit)
    CoreDrafter(engine, core)
    parameters = SamplingParameters(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    output = run(engine, [Submit(1, (3, 4), parameters, 0)])[1]
    assert len(output.tokens) == max_tokens
    assert max(model.positions) == 2 + max_tokens - 2
    assert (output.figures.accepted > 0) == (max_tokens > 2)


@pytest.mark.parametrize("index", [0, 5])
def test_stop_token_id_ends_the_text_anywhere_in_a_round(index: int) -> None:
    submit = Submit(1, (3, 4), GREEDY, 0)
    text = run(plain(), [submit])[1].tokens
    stop = text[index]
    stopping = SamplingParameters(temperature=0.0, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    engine, _ = speculating()
    output = run(engine, [Submit(1, (3, 4), stopping, 0)])[1]
    assert output.tokens == text[: text.index(stop) + 1]
    assert output.reason == "stop"
    assert engine.scheduler.prefix is not None
    assert engine.scheduler.pool.used == engine.scheduler.prefix.size


def test_eos_ends_the_text_unless_ignored_or_before_min_tokens() -> None:
    towards_end = {EOS: 100.0}
    for parameters, length in (
        (SamplingParameters(logit_bias=towards_end, max_tokens=9), 1),
        (SamplingParameters(logit_bias=towards_end, max_tokens=9, ignore_eos=True), 9),
        (SamplingParameters(logit_bias=towards_end, max_tokens=9, min_tokens=4), 5),
    ):
        engine, _ = speculating()
        output = run(engine, [Submit(1, (3, 4), parameters, 0)])[1]
        assert len(output.tokens) == length
        assert output.reason == ("length" if length == 9 else "stop")


def test_finished_has_stop_token_and_number_of_tokens() -> None:
    engine, _ = speculating()
    parameters = SamplingParameters(logit_bias={EOS: 100.0}, max_tokens=9, min_tokens=3)
    engine.submit(Submit(1, (3, 4), parameters, 0))
    tokens: list[int] = []
    ended: list[Finished] = []
    while engine.busy:
        reports = engine.step()
        ended += finished(reports)
        tokens += [token for each in reports if isinstance(each, Committed) for token in each.tokens]
    assert [each.stop_token for each in ended] == [EOS]
    assert ended[0].figures.tokens == len(tokens) == 4


@pytest.mark.parametrize("chunk", [1, 32])
def test_chunks_and_reused_prefixes_give_the_same_tokens(chunk: int) -> None:
    start = tuple(range(1, 24))
    submits = [
        Submit(number, (*start, *range(1, 2 + number)), SamplingParameters(max_tokens=8), 40 + number)
        for number in range(5)
    ]
    expected = run(make_engine(Case(drafter="none", prefix=False, slots=4096, prefill_chunk=64))[0], submits)
    engine, _ = speculating(
        Case(slots=4096, prefill_chunk=chunk, max_running=2, policy=lambda: FixedSteps(2))
    )
    outputs = run(engine, submits)
    assert {n: o.tokens for n, o in outputs.items()} == {n: o.tokens for n, o in expected.items()}
    assert sum(output.figures.cached_prompt_tokens for output in outputs.values()) >= 2 * len(start)


def test_hits_and_awaited_expansions_are_counted() -> None:
    engine, _ = speculating(
        Case(slots=4096, policy=lambda: FixedSteps(4), blur=0.0, growth=GrowthLimits(4, 3, 8, 96))
    )
    figures = run(engine, [Submit(1, (3, 4), GREEDY, 0)])[1].figures
    assert 0 < engine.totals.awaited_expansions <= engine.drafters.expansions
    assert figures.hits + figures.misses == figures.rounds
    assert figures.accepted > 0
    assert figures.tokens == 20 == figures.rounds + figures.accepted + 1
    assert figures.drafted >= figures.accepted
