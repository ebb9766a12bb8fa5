"""Tests of the verifier process: status, logged decisions, and messages that wait for a grammar."""

import io
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import pytest

from ssd_serve.base.contention import CoreContention
from ssd_serve.base.logs import Logger
from ssd_serve.base.messages import (
    Abort,
    Choice,
    CostEstimate,
    DecisionMessage,
    DecisionReason,
    Finish,
    Finished,
    SamplingParameters,
    ServerMessage,
    Status,
    Submit,
    SubmitChoices,
)
from ssd_serve.bench.memory_channel import memory_pair
from ssd_serve.sampling.grammar import Grammars
from ssd_serve.verifier.process import EngineLogReporter, GrammarQueue, VerifierLoop, engine_status
from tests.fakes import Case, make_engine

PROMPT = tuple(range(1, 21))


def test_finish_of_the_server_is_answered_with_figures() -> None:
    engine, _ = make_engine(Case(drafter="none"))
    assert engine.submit(Submit(1, PROMPT, SamplingParameters(max_tokens=100, ignore_eos=True), 7)) is None
    for _ in range(5):
        engine.step()
    finished = engine.finish(1)
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.figures.tokens, finished.figures.rounds) == ("stop", 5, 4)
    assert not engine.busy
    assert engine.finish(1) is None


def test_evictable_slots_are_not_in_use() -> None:
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
    decision = engine_status(engine).decision
    assert decision is not None
    assert (decision.layout, decision.why, decision.nodes) == ("off", DecisionReason.NO_DRAFTER, 0)


def test_reason_is_logged_when_it_changes_at_most_once_a_second() -> None:
    engine, _ = make_engine(Case(drafter="none"))
    log = io.StringIO()
    reporter = EngineLogReporter(engine, Logger("verifier", "debug", stream=log))

    def lines(now: float, why: DecisionReason) -> list[str]:
        log.seek(0)
        log.truncate()
        nodes = 2 * (why is DecisionReason.PAYS)
        engine.decision = DecisionMessage("async", why, nodes, 0.0, CostEstimate(2, 3.0, 0.02))
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


def test_a_busy_machine_is_logged_at_most_once_a_minute(tmp_path: Path) -> None:
    log, contention = io.StringIO(), CoreContention(tmp_path)
    reporter = EngineLogReporter(make_engine(Case(drafter="none"))[0], Logger("verifier", stream=log))
    for now, busy in ((0, False), (1, True), (2, True), (3, False), (30, True), (62, True)):
        contention.busy = busy
        reporter.report_contention(contention, now)
    lines = [line.partition("this machine ")[2].partition(":")[0] for line in log.getvalue().splitlines()]
    assert lines == ["is busy", "is no longer busy", "is busy"]


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


def test_idle_engine_gives_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = make_engine(Case(drafter="none"))
    released: list[Sequence[range]] = []
    monkeypatch.setattr(model, "release", released.append)
    mine, its = memory_pair()
    its.send(Submit(1, PROMPT, SamplingParameters(max_tokens=9, ignore_eos=True), 7))
    now, waits = 0.0, 0

    def wait() -> None:
        nonlocal now, waits
        now, waits = now + 10.0, waits + 1
        assert len(released) == (waits > 3), "after 30 s, and once"
        if waits == 9:
            its.close()

    mine.on_wait = wait
    quiet = Logger("verifier", "error")
    VerifierLoop(mine, [], engine, lambda: engine_status(engine), lambda: None, quiet, lambda: now).run()
    held = engine.scheduler.pool.used
    assert held == 28, "the latest conversation stays"
    assert sum(map(len, released[0])) == engine.scheduler.pool.slots - held


def test_rest_evicts_all_but_the_latest_conversations() -> None:
    engine, _ = make_engine(Case(drafter="none"))
    for number, prompt in enumerate(([1] * 30, [2] * 30)):
        engine.submit(Submit(number, tuple(prompt), SamplingParameters(max_tokens=2, ignore_eos=True), 7))
        while engine.busy:
            engine.step()
    engine.rest(kept=31)
    prefix = engine.scheduler.prefix
    assert prefix is not None
    assert engine.scheduler.pool.used == prefix.size == 31
    for prompt, cached in (([1] * 30, 0), ([2] * 30, 30)):
        assert len(prefix.follow(prefix.begin(), prompt, 30)) == cached


class SlowGrammars(Grammars):
    """Grammars that block in `compile` until `may` is set."""

    def __init__(self) -> None:
        super().__init__(str, 100, ())
        self.may, self.done = Event(), Event()
        self.known = {"known"}

    def is_compiled(self, grammar: str) -> bool:
        return grammar in self.known

    def compile(self, grammar: str) -> None:
        assert self.may.wait(10)
        self.known.add(grammar)
        self.done.set()


def submit(number: int, grammar: str = "") -> Submit:
    return Submit(number, (1,), SamplingParameters(grammar=grammar), 1)


def all_released(held: GrammarQueue, grammars: SlowGrammars) -> list[ServerMessage]:
    grammars.may.set()
    assert grammars.done.wait(10)
    found: list[ServerMessage] = []
    while held:
        found += held.released()
    return found


def test_messages_of_a_request_wait_for_its_grammar() -> None:
    grammars = SlowGrammars()
    held = GrammarQueue(grammars)
    several = SubmitChoices((1,), SamplingParameters(grammar="x"), (Choice(3, 1), Choice(4, 2)))
    assert held.hold(submit(2, "x"))
    assert held.hold(several)
    assert held.hold(Abort(2))
    assert held.hold(Finish(4))
    for message in (submit(5), submit(6, "known"), Abort(5), Finish(6)):
        assert not held.hold(message)
    assert held
    assert held.released() == []
    assert all_released(held, grammars) == [submit(2, "x"), several, Abort(2), Finish(4)]
    assert not held.hold(Abort(2))


def test_grammar_queue_without_grammars_holds_nothing() -> None:
    assert not GrammarQueue(None).hold(submit(1, "x"))
