"""Tests of round traces: they agree with the committed tokens, keep their bounds, and cost nothing unasked."""

from itertools import pairwise

import pytest
from msgspec.structs import replace

from ssd_serve.base.messages import (
    Committed,
    RequestOptions,
    RoundTrace,
    SamplingParameters,
    Submit,
    VerifierReport,
)
from ssd_serve.verifier import tracing
from ssd_serve.verifier.control.wait import FixedSteps
from ssd_serve.verifier.engine import Engine
from tests.fakes import Case, make_engine
from tests.verifier.drafter_factory import connect_inline

GREEDY = SamplingParameters(temperature=0.0, max_tokens=24, ignore_eos=True)
TRACED = Submit(1, (1, 2, 3), GREEDY, 0, options=RequestOptions(trace=True))
PROMPT = len(TRACED.prompt)


def drafted(blur: float = 0.3) -> Engine:
    case = Case(slots=4096, policy=lambda: FixedSteps(3), blur=blur)
    engine, _ = make_engine(case)
    connect_inline(engine, case)
    return engine


def committed(engine: Engine, submit: Submit) -> list[Committed]:
    assert engine.submit(submit) is None
    reports: list[VerifierReport] = []
    while engine.busy:
        reports += engine.step()
    return [report for report in reports if isinstance(report, Committed)]


def traces_of(reports: list[Committed]) -> list[RoundTrace]:
    return [report.trace for report in reports if report.trace is not None]


def test_accepted_nodes_and_bonus_token_are_the_committed_tokens() -> None:
    reports = committed(drafted(), TRACED)
    traces, context = traces_of(reports), PROMPT
    assert len(traces) == len(reports)
    for report, trace in zip(reports, traces, strict=True):
        assert (*(trace.nodes[index].token for index in trace.accepted), trace.bonus) == report.tokens
        assert trace.context == context
        context += len(report.tokens)
        parent = -1
        for index in trace.accepted:
            assert trace.nodes[index].parent == parent
            parent = index
    assert [trace.first for trace in traces] == [True, *[False] * (len(traces) - 1)]
    assert any(trace.accepted for trace in traces)
    assert any(len(trace.accepted) < len(trace.nodes) for trace in traces)


def test_nodes_have_depth_rank_source_and_estimate() -> None:
    traces = traces_of(committed(drafted(), TRACED))
    nodes = [(trace, node) for trace in traces for node in trace.nodes]
    assert nodes
    for trace, node in nodes:
        assert node.depth == (1 if node.parent < 0 else trace.nodes[node.parent].depth + 1)
        assert node.sources
        assert node.rank is not None
        assert node.rank >= 0
        assert node.logprob is not None
        assert node.logprob <= 0
    assert {growth.source for trace in traces for growth in trace.growth} == {nodes[0][1].sources[0]}


def test_times_rise_within_and_between_rounds() -> None:
    traces = traces_of(committed(drafted(), TRACED))
    for trace in traces:
        assert 0 <= trace.start_s <= trace.forward_at_s <= trace.forward_at_s + trace.forward_s <= trace.end_s
        assert all(growth.at_s <= trace.end_s for growth in trace.growth)
    assert all(before.end_s <= after.start_s for before, after in pairwise(traces))


def test_trace_keeps_its_bounds_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_ROUNDS", 3)
    monkeypatch.setattr(tracing, "MAX_NODES", 2)
    whole = traces_of(committed(drafted(), replace(TRACED, options=RequestOptions(trace=True))))
    assert [trace.cut for trace in whole] == [False, False, False, True]
    assert max(len(trace.nodes) for trace in whole) == 2
    assert any(trace.left_out for trace in whole)
    assert whole[-1].nodes == ()
    for trace in whole:
        assert all(node.parent < index for index, node in enumerate(trace.nodes))
        assert len(trace.growth) <= 2


def test_untraced_requests_record_nothing_and_have_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = committed(drafted(), TRACED)
    monkeypatch.setattr(tracing.RequestTrace, "__init__", None)
    untraced = committed(drafted(), replace(TRACED, options=RequestOptions()))
    assert [report.tokens for report in untraced] == [report.tokens for report in traced]
    assert all(report.trace is None for report in untraced)


def test_round_that_drafted_nothing_has_a_bonus_token_only() -> None:
    engine, _ = make_engine(Case(drafter="none", slots=4096))
    traces = traces_of(committed(engine, TRACED))
    assert len(traces) == GREEDY.max_tokens
    assert not any(trace.nodes or trace.accepted for trace in traces)


def test_progress_of_a_prompt_counts_its_chunks_and_cached_tokens() -> None:
    engine, _ = make_engine(Case(slots=4096, prefill_chunk=32))
    asked = RequestOptions(return_progress=True)
    for number, cached in ((1, 0), (2, 64)):
        prompt = (*[token % 30 for token in range(64)], *[30 + number] * 50)
        reports = committed(engine, Submit(number, prompt, GREEDY, 0, options=asked))
        found = [report.progress for report in reports if report.progress is not None]
        assert [(each.processed, each.total, each.cache) for each in found] == [
            (done, 114, cached) for done in range(cached + 32, 114, 32)
        ]
        assert all(earlier.time_ms <= later.time_ms for earlier, later in pairwise(found))
        assert not any(report.progress for report in reports if report.tokens)
    assert all(report.tokens for report in committed(engine, Submit(3, (5,) * 100, GREEDY, 0)))
