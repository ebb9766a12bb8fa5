"""Tests of the grammar queue: requests wait in order for their grammars, and other requests do not."""

from threading import Event

from ssd_serve.base.messages import (
    Abort,
    Choice,
    Finish,
    SamplingParameters,
    ServerMessage,
    Submit,
    SubmitChoices,
)
from ssd_serve.sampling.grammar import Grammars
from ssd_serve.verifier.process import GrammarQueue


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


def test_request_and_its_messages_wait_for_the_grammar() -> None:
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


def test_without_grammars_nothing_waits() -> None:
    assert not GrammarQueue(None).hold(submit(1, "x"))
