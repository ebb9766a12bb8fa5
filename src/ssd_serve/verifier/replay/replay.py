"""Runs a recorded session again, in one process: the same engine, and a tape in the place of the world.

The engine decides everything anew from what it heard then, so that a debugger sees what it saw; each round is
compared with what was recorded. Drafters do not run: what they said is on the tape. Knows the engine's seams;
prints nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ssd_serve.base.draft_messages import Message, Refusal
from ssd_serve.drafter.inline import InProcessChannel
from ssd_serve.base.errors import DeviceMemoryError, ProtocolError, RecordingError
from ssd_serve.base.messages import ServerMessage, Submit, SubmitChoices
from ssd_serve.verifier.engine import Engine
from ssd_serve.verifier.environment import MeasuredStart
from ssd_serve.verifier.observer import Observer, Turn
from ssd_serve.verifier.planning.decision import Decision
from ssd_serve.verifier.replay.recording import round_trace
from ssd_serve.verifier.replay.tape import Answer, ChunkTrace, Connection, Kind, RoundTrace, TapeReader
from ssd_serve.verifier.replay.taped import taped
from ssd_serve.verifier.round import Walk


class _Halt(BaseException):
    """Ends a replay from within the engine, for which any `Exception` may be the failure of a drafter."""

    def __init__(self, difference: str = "", error: RecordingError | None = None) -> None:
        """No `difference` and no `error`: the tape has ended."""
        super().__init__(difference)
        self.difference = difference
        self.error = error


@dataclass(slots=True)
class Replayed:
    """What a replay has found so far."""

    rounds: int = 0
    tokens: int = 0
    requests: int = 0
    difference: str = ""
    """The first one; empty while everything is as it was recorded."""


class Replay(Observer):
    """Answers from a tape, in the place of the world. `see` is shown every round that is equal."""

    def __init__(
        self,
        tape: TapeReader,
        measured: MeasuredStart,
        see: Callable[[int, RoundTrace], None] = lambda _number, _round: None,
    ) -> None:
        self._tape = tape
        self._see = see
        self.environment = replace(taped(self, self), measured=measured, drafts_inline=False)
        """What the verifier must be given that runs the session again."""
        self.result = Replayed()

    def run(self, engine: Engine, until: int | None = None) -> Replayed:
        """Do with the engine what was done with it, to the end, to a difference, or for `until` rounds."""
        try:
            while until is None or self.result.rounds < until:
                kind = self._next_kind()
                if kind is None:
                    break
                self._call(engine, kind, self._tape.take())
        except _Halt as halt:
            if halt.error is not None:
                raise halt.error from None
            self.result.difference = halt.difference
        return self.result

    def _call(self, engine: Engine, kind: Kind, value: float) -> None:
        if kind is Kind.TURN:
            turns = {Turn.STEP: engine.step, Turn.DRAIN: engine.drain, Turn.BEAT: engine.drafters.beat}
            turns[Turn(int(value))]()
        elif kind is Kind.ASKED:
            self._ask(engine)
        elif kind is Kind.CONNECT:
            how: Connection = self._said(Connection)
            peer = "elsewhere" if how.elsewhere else ""
            engine.drafters.connect(_Nobody(), how.synchronous, how.stranger, peer)
        else:
            raise _Halt(f"{self._where()}: the engine does not ask for {kind.name} any more")

    def _ask(self, engine: Engine) -> None:
        message: ServerMessage = self._said(ServerMessage)
        answers = engine.ask(message)
        if isinstance(message, Submit | SubmitChoices):
            asked = len(message.choices) if isinstance(message, SubmitChoices) else 1
            self.result.requests += asked - len(answers)

    def answer(self, kind: Kind, value: Answer) -> Answer:
        """What was answered then."""
        answer = type(value)(self._take(kind)[1])
        if kind is Kind.ENDED:
            self._fail_if_short()  # there was too little memory to choose tokens
        return answer

    def messages(self, receive: Callable[[], list[Message]]) -> list[Message]:
        """What a channel gave then, or its `ProtocolError`."""
        del receive
        kind, count = self._take(Kind.HEARD, Kind.BROKEN)
        if kind is Kind.BROKEN:
            broken: Refusal = self._said(Refusal)
            raise ProtocolError(broken.message)
        return [self._said(Message) for _ in range(int(count))]

    def connected(self, connection: Connection) -> None:
        """Nothing: it is this replay's doing."""

    def decided(self, walks: Sequence[Walk], decision: Decision) -> None:
        """Compare what a round decided with what was recorded."""
        trace = round_trace(walks, decision)
        self._take(Kind.ROUND)
        recorded: RoundTrace = self._said(RoundTrace)
        difference = first_difference(recorded, trace)
        if difference:
            raise _Halt(f"{self._where()}, {difference}")
        self.result.rounds += 1
        self.result.tokens += sum(len(part.tokens) for part in trace.parts)
        self._see(self.result.rounds, recorded)

    def _take(self, *expected: Kind) -> tuple[Kind, float]:
        """The next entry, which must be of an expected kind."""
        self._fail_if_short()
        kind = self._next_kind()
        if kind is None:
            raise _Halt
        if kind not in expected:
            raise _Halt(
                f"{self._where()}: the engine asks for {expected[0].name} where {kind.name} was recorded"
            )
        return kind, self._tape.take()

    def _fail_if_short(self) -> None:
        """Have too little memory where the device had."""
        if self._next_kind() is Kind.SHORT:
            self._tape.take()
            refusal: Refusal = self._said(Refusal)
            raise DeviceMemoryError(refusal.message)

    def _next_kind(self) -> Kind | None:
        try:
            return self._tape.next_kind()
        except RecordingError as error:
            raise _Halt(error=error) from error

    def _said(self, kind: Any) -> Any:
        said = self._tape.said()
        if not isinstance(said, kind):
            error = f"the recording has a {type(said).__name__} in a wrong place: it is damaged"
            raise _Halt(error=RecordingError(error))
        return said

    def _where(self) -> str:
        return f"round {self.result.rounds + 1}"


class _Nobody(InProcessChannel):
    """The other end of a drafter's channel: what it said is on the tape."""

    def send(self, message: Message) -> bool:
        del message
        return False

    def receive(self) -> list[Message]:
        return []

    def wait(self, timeout_s: float) -> bool:
        del timeout_s
        return False


def first_difference(recorded: RoundTrace, told: RoundTrace) -> str:
    """In what two rounds differ first, in tokens before anything else; empty when they are equal."""
    if recorded.parts == told.parts:
        return ""
    before, now = ({part.request: part for part in each.parts} for each in (recorded, told))
    for request, part in before.items():
        other = now.get(request)
        if other is not None and other.tokens != part.tokens:
            return f"request {request}, {_token_difference(part, other)}"
    for request, part in before.items():
        other = now.get(request)
        if other is not None and other != part:
            return f"request {request}: recorded {_work(part)}, now {_work(other)}"
    return f"recorded were the requests {list(before)}, now they are {list(now)}"


def _token_difference(recorded: ChunkTrace, told: ChunkTrace) -> str:
    index = 0
    while recorded.tokens[index : index + 1] == told.tokens[index : index + 1]:
        index += 1
    one, other = (
        f"token {part.tokens[index]}" if index < len(part.tokens) else "no token" for part in (recorded, told)
    )
    return f"position {recorded.position + index}: recorded {one}, now {other}"


def _work(part: ChunkTrace) -> str:
    return f"position {part.position}, {part.rows} rows, nodes {list(part.nodes)}, {part.accepted} accepted"
