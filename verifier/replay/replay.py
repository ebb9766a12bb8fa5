"""Runs a recorded session again, in one process: the same engine, and a tape in the place of the world.

The engine decides everything anew from what it heard then, so that a debugger sees what it saw; each round is
compared with what was recorded. Drafters do not run: what they said is on the tape. Knows the engine's seams;
prints nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from ssd_serve.cluster.channels.channel import Channel
from ssd_serve.errors import DeviceMemoryError, ProtocolError, RecordingError
from ssd_serve.kernels.batch import Batch
from ssd_serve.logs import Logger
from ssd_serve.messages import Abort, Finish, Hello, Message, Refusal, Submit, SubmitChoices
from ssd_serve.models.interface import ForwardEnd, ForwardResult, Model
from ssd_serve.models.wrapped import WrappedModel
from ssd_serve.verifier.build import EngineKind
from ssd_serve.verifier.drafts.drafters import Drafters
from ssd_serve.verifier.engine import Bounds, Engine
from ssd_serve.verifier.outside import Environment
from ssd_serve.verifier.planning.planner import RoundPlanner
from ssd_serve.verifier.replay.recorded import round_told
from ssd_serve.verifier.replay.tape import ChunkTrace, Kind, RoundTrace, TapeReader
from ssd_serve.verifier.round import InFlight, RequestStep, Rounds, Walk
from ssd_serve.verifier.scheduler import Scheduler

T = TypeVar("T")
Said = TypeVar("Said")


class TapeEndedError(RecordingError):
    """The engine asks for more than was recorded: the session was cut off here."""


class DifferenceError(RecordingError):
    """The engine did something else than what was recorded; the text says what."""


@dataclass(slots=True)
class Replayed:
    """What a replay has found so far."""

    rounds: int = 0
    tokens: int = 0
    requests: int = 0
    difference: str = ""
    """The first one; empty while everything is as it was recorded."""


class Replay(Environment):
    """Answers from a tape. `found` are the header's findings; `see` is shown every round that is equal."""

    def __init__(
        self,
        tape: TapeReader,
        found: Mapping[str, Any],
        see: Callable[[int, RoundTrace], None] = lambda _number, _round: None,
    ) -> None:
        self._tape = tape
        self._found = found
        self._see = see
        self.result = Replayed()

    def run(self, engine: Engine, until: int | None = None) -> Replayed:
        """Do with the engine what was done with it, to the end, to a difference, or for `until` rounds."""
        try:
            while until is None or self.result.rounds < until:
                kind = self._tape.next_kind()
                if kind is None:
                    break
                self._call(engine, kind, self._tape.take())
        except TapeEndedError:
            pass
        except DifferenceError as difference:
            self.result.difference = str(difference)
        return self.result

    def _call(self, engine: Engine, kind: Kind, value: float) -> None:
        if kind is Kind.STEP:
            engine.step()
        elif kind is Kind.DRAIN:
            engine.drain()
        elif kind is Kind.SUBMIT:
            self._submit(engine)
        elif kind is Kind.ABORT:
            engine.abort(self._said(Abort).request)
        elif kind is Kind.FINISH:
            engine.finish(self._said(Finish).request)
        elif kind is Kind.BEAT:
            engine.drafters.beat()
        elif kind is Kind.CONNECT:
            synchronous, stranger, peer = (bool(int(value) & bit) for bit in (1, 2, 4))
            engine.drafters.connect(
                _ReplayedChannel(self), synchronous, stranger, "elsewhere" if peer else ""
            )
        else:
            raise DifferenceError(f"{self._where()}: the engine does not ask for {kind.name} any more")

    def take(self, *expected: Kind) -> tuple[Kind, float]:
        """The next answer, which must be of an expected kind."""
        kind = self._tape.next_kind()
        if kind is None:
            raise TapeEndedError
        if kind not in expected:
            raise DifferenceError(
                f"{self._where()}: the engine asks for {expected[0].name} where {kind.name} was recorded"
            )
        return kind, self._tape.take()

    def messages(self) -> list[Message]:
        """What a channel gave; `ProtocolError` where it broke the protocol."""
        kind, count = self.take(Kind.HEARD, Kind.BROKEN)
        if kind is Kind.BROKEN:
            raise ProtocolError(self._said(Refusal).message)
        return [_as_message(self._tape.said()) for _ in range(int(count))]

    def shortage(self) -> str:
        """What a device said that has too little memory for this round; empty where it had enough."""
        if self._tape.next_kind() is not Kind.SHORT:
            return ""
        self._tape.take()
        return self._said(Refusal).message

    def _submit(self, engine: Engine) -> None:
        said = self._tape.said()
        if not isinstance(said, Submit | SubmitChoices):
            raise _misplaced(said)
        asked = len(said.choices) if isinstance(said, SubmitChoices) else 1
        self.result.requests += asked - len(engine.submit_all(said))

    def _said(self, kind: type[Said]) -> Said:
        said = self._tape.said()
        if not isinstance(said, kind):
            raise _misplaced(said)
        return said

    def _where(self) -> str:
        return f"round {self.result.rounds + 1}"

    def witness(self, walks: Sequence[Walk]) -> None:
        """Compare what a round decided with what was recorded."""
        told = round_told(walks)
        self.take(Kind.ROUND)
        recorded = self._said(RoundTrace)
        difference = first_difference(recorded, told)
        if difference:
            raise DifferenceError(f"{self._where()}, {difference}")
        self.result.rounds += 1
        self.result.tokens += sum(len(part.tokens) for part in told.parts)
        self._see(self.result.rounds, msgspec.structs.replace(told, decision=recorded.decision))

    @property
    def clock(self) -> Callable[[], float]:
        """See `Environment.clock`."""
        return lambda: self.take(Kind.CLOCK)[1]

    @property
    def drafts_inline(self) -> bool:
        """What an inline drafter said is on the tape too."""
        return False

    def found(self, name: str, kind: type[T], find: Callable[[], T]) -> T:
        """See `Environment.found`."""
        del find
        if name not in self._found:
            raise RecordingError(f"the recording does not say: {name}")
        try:
            return msgspec.convert(self._found[name], kind, str_keys=True)
        except msgspec.ValidationError as error:
            raise RecordingError(f"the recording's {name} cannot be read: {error}") from error

    def model(self, model: Model) -> Model:
        """See `Environment.model`."""
        return _ReplayedModel(model, self)

    def drafters(self, hello: Hello, log: Logger) -> Drafters:
        """See `Environment.drafters`."""

        def poll(channels: Sequence[Channel], timeout_s: float) -> Sequence[Channel]:
            del timeout_s
            return channels if self.take(Kind.POLLED)[1] else ()

        return Drafters(hello, self.clock, log, poll)

    @property
    def engine_kind(self) -> EngineKind:
        """See `Environment.engine_kind`."""
        return partial(_ReplayedEngine, self)


class _ReplayedEngine(Engine):
    """An engine whose device has too little memory where it had."""

    def __init__(
        self,
        replay: Replay,
        rounds: Rounds,
        scheduler: Scheduler,
        drafters: Drafters,
        decider: RoundPlanner,
        bounds: Bounds,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(rounds, scheduler, drafters, decider, bounds, clock, replay.witness)
        self._replay = replay

    def _compute(self, work: Sequence[RequestStep]) -> tuple[InFlight, float, list[Walk]]:
        done = super()._compute(work)
        if reason := self._replay.shortage():
            raise DeviceMemoryError(reason)
        return done


class _ReplayedChannel:
    """A drafter's channel whose answers come from the tape; nobody is at the other end."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    @property
    def closed(self) -> bool:
        """See `Channel.closed`."""
        return bool(self._replay.take(Kind.CLOSED)[1])

    @property
    def pending(self) -> int:
        """See `Channel.pending`."""
        return int(self._replay.take(Kind.PENDING)[1])

    def send(self, message: Message) -> bool:
        """See `Channel.send`."""
        del message
        return bool(self._replay.take(Kind.TAKEN)[1])

    def post(self, message: Message) -> bool:
        """See `Channel.post`."""
        return self.send(message)

    def flush(self) -> bool:
        """See `Channel.flush`."""
        return bool(self._replay.take(Kind.FLUSHED)[1])

    def receive(self) -> list[Message]:
        """See `Channel.receive`."""
        return self._replay.messages()

    def wait(self, timeout_s: float) -> bool:
        """Never: whether there was something to hear is on the tape."""
        del timeout_s
        return False

    def fileno(self) -> int:
        """There is no descriptor."""
        return -1

    def close(self) -> None:
        """Nothing to close."""


class _ReplayedModel(WrappedModel):
    """The real model; what its forwards' times are good for, and when they were over, is on the tape."""

    def __init__(self, model: Model, replay: Replay) -> None:
        super().__init__(model)
        self._replay = replay

    def forward(self, batch: Batch) -> ForwardResult:
        """See `Model.forward`."""
        result = self._model.forward(batch)
        if reason := self._replay.shortage():
            raise DeviceMemoryError(reason)
        captured_now = bool(self._replay.take(Kind.CAPTURED)[1])
        return replace(
            result, completion=_ReplayedEnd(result.completion, self._replay), captured_now=captured_now
        )


@dataclass(frozen=True, slots=True)
class _ReplayedEnd:
    """A `ForwardEnd` of a forward of today that was over then."""

    inner: ForwardEnd
    replay: Replay

    def ready(self) -> bool:
        """See `ForwardEnd.ready`."""
        return bool(self.replay.take(Kind.READY)[1])

    def wait(self) -> float:
        """See `ForwardEnd.wait`."""
        self.inner.wait()
        return self.replay.take(Kind.ENDED)[1]


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


def _misplaced(said: Message | RoundTrace) -> RecordingError:
    return RecordingError(f"the recording has a {type(said).__name__} in a wrong place: it is damaged")


def _as_message(said: Message | RoundTrace) -> Message:
    if isinstance(said, RoundTrace):
        raise _misplaced(said)
    return said
