"""Tests of messages to the front end: figures, slots in use, and reported and logged decisions."""

import io

from ssd_serve.base.logs import Logger
from ssd_serve.base.messages import (
    CostEstimate,
    DecisionReason,
    Finished,
    SamplingParameters,
    Status,
    Submit,
)
from ssd_serve.bench.memory_channel import memory_pair
from ssd_serve.verifier.control.decision import Decision, SpeculationMode
from ssd_serve.verifier.process import VerifierLoop
from ssd_serve.verifier.reporting import EngineLogReporter, engine_status
from tests.fakes import Case, make_engine

PROMPT = tuple(range(1, 21))


def test_a_request_that_the_server_ends_is_answered_with_its_figures() -> None:
    engine, _ = make_engine(Case(drafter="none"))
    assert engine.submit(Submit(1, PROMPT, SamplingParameters(max_tokens=100, ignore_eos=True), 7)) is None
    for _ in range(5):
        engine.step()
    finished = engine.finish(1)
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.figures.tokens, finished.figures.rounds) == ("stop", 5, 4)
    assert not engine.busy
    assert engine.finish(1) is None


def test_slots_that_can_be_evicted_are_not_in_use() -> None:
    engine, _ = make_engine(Case(drafter="none"))
    engine.submit(Submit(1, PROMPT, SamplingParameters(max_tokens=100, ignore_eos=True), 7))
    engine.step()
    assert engine_status(engine).slots_used >= len(PROMPT)
    engine.finish(1)
    assert engine.scheduler.pool.used > 0
    assert engine_status(engine).slots_used == 0


def test_status_has_the_decision_of_the_last_round() -> None:
    engine, _ = make_engine(Case(drafter="none"))
    assert engine_status(engine).decision is None
    engine.submit(Submit(1, PROMPT, SamplingParameters(max_tokens=100, ignore_eos=True), 7))
    engine.step()
    told = engine_status(engine).decision
    assert told is not None
    assert (told.layout, told.why, told.nodes) == ("off", DecisionReason.NO_DRAFTER, 0)


def test_reason_is_logged_when_it_changes_at_most_once_a_second() -> None:
    engine, _ = make_engine(Case(drafter="none"))
    log = io.StringIO()
    reporter = EngineLogReporter(engine, Logger("verifier", "debug", stream=log))

    def lines(now: float, why: DecisionReason) -> list[str]:
        log.seek(0)
        log.truncate()
        engine.decision = Decision(
            SpeculationMode.ASYNC,
            why,
            2 * (why is DecisionReason.PAYS),
            0.0,
            CostEstimate(2, 3.0, 0.02),
            None,
        )
        reporter.report(now)
        return log.getvalue().splitlines()

    (line,) = lines(10.0, DecisionReason.PAYS)
    assert 'speculates why="speculation pays" mode=async nodes=2' in line
    assert 'chosen="150.0 tokens/s, 20.0 ms a round" other=unknown' in line
    assert lines(20.0, DecisionReason.PAYS) == []
    (line,) = lines(30.0, DecisionReason.NO_DRAFTER)
    assert 'does not speculate why="no drafter answers"' in line
    assert lines(30.5, DecisionReason.PAYS) == []
    assert len(lines(31.0, DecisionReason.PAYS)) == 1


def test_final_status_precedes_last_tokens() -> None:
    engine, _ = make_engine(Case(drafter="none"))
    mine, its = memory_pair()
    its.send(Submit(1, PROMPT, SamplingParameters(max_tokens=9, ignore_eos=True), 7))

    received: list[object] = []

    def leave_with_the_last_tokens() -> None:
        received.extend(its.receive())
        its.close()

    mine.on_wait = leave_with_the_last_tokens
    quiet = Logger("verifier", "error")
    VerifierLoop(mine, [], engine, lambda: engine_status(engine), lambda: None, quiet).run()
    before_the_end = received[: [isinstance(message, Finished) for message in received].index(True)]
    counted = [message for message in before_the_end if isinstance(message, Status)]
    assert counted[-1].totals.tokens == 9
