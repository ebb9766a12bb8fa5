"""What the front end is told: figures when it ends a request, slots in use without what can be evicted."""

from ssd_serve.messages import Finished, SamplingParameters, Submit
from ssd_serve.verifier.process import _status  # pyright: ignore[reportPrivateUsage]
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
    assert _status(engine).slots_used >= len(PROMPT)
    engine.finish(1)
    assert engine.scheduler.pool.used > 0
    assert _status(engine).slots_used == 0
