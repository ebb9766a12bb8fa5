"""The engine's seams with a tape beside them: what is asked, what is heard and what is decided is noted.

Each of these classes does what the one that it stands for does, and nothing else. Knows the tape; not where
it is, and nothing of replays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ssd_serve.cluster.channels.channel import Channel
from ssd_serve.cluster.channels.polling import poll
from ssd_serve.errors import DeviceMemoryError, ProtocolError
from ssd_serve.kernels.batch import Batch
from ssd_serve.logs import Logger
from ssd_serve.messages import (
    Abort,
    Finish,
    Finished,
    Hello,
    Message,
    Refusal,
    Refused,
    Submit,
    SubmitChoices,
    VerifierReport,
)
from ssd_serve.models.interface import ForwardEnd, ForwardResult, Model
from ssd_serve.models.wrapped import WrappedModel
from ssd_serve.verifier.drafts.drafters import Drafters
from ssd_serve.verifier.engine import Bounds, Engine
from ssd_serve.verifier.planning.decision import Decision
from ssd_serve.verifier.planning.planner import RoundPlanner
from ssd_serve.verifier.replay.tape import ChunkTrace, Kind, RoundTrace, TapeWriter
from ssd_serve.verifier.round import InFlight, RequestStep, Rounds, Walk
from ssd_serve.verifier.scheduler import Scheduler


class RecordedEngine(Engine):
    """Notes what it is asked, and what its rounds decide."""

    def __init__(
        self,
        tape: TapeWriter,
        rounds: Rounds,
        scheduler: Scheduler,
        drafters: Drafters,
        decider: RoundPlanner,
        bounds: Bounds,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(rounds, scheduler, drafters, decider, bounds, clock, self._see)
        self._tape = tape
        self._stepping = False

    def submit_all(self, message: Submit | SubmitChoices) -> list[Refused | Finished]:
        """See `Engine.submit_all`."""
        self._tape.say(Kind.SUBMIT, message)
        return super().submit_all(message)

    def abort(self, number: int) -> None:
        """See `Engine.abort`."""
        self._tape.say(Kind.ABORT, Abort(number))
        super().abort(number)

    def finish(self, number: int) -> Finished | None:
        """See `Engine.finish`."""
        self._tape.say(Kind.FINISH, Finish(number))
        return super().finish(number)

    def step(self) -> list[VerifierReport]:
        """See `Engine.step`."""
        self._tape.note(Kind.STEP)
        self._stepping = True
        try:
            reports = super().step()
        except BaseException:
            self._tape.flush()  # what led to it is what one wants to see again
            raise
        self._stepping = False
        if self.busy:
            self._tape.flush_when_due()
        else:
            self._tape.flush()  # the process may be ended now
        return reports

    def drain(self) -> None:
        """See `Engine.drain`."""
        if self._stepping:
            super().drain()
            return
        self._tape.note(Kind.DRAIN)
        super().drain()
        self._tape.flush_when_due()

    def _compute(self, work: Sequence[RequestStep]) -> tuple[InFlight, float, list[Walk]]:
        try:
            return super()._compute(work)
        except DeviceMemoryError as error:
            self._tape.say(Kind.SHORT, Refusal(str(error)))
            raise

    def _see(self, walks: Sequence[Walk]) -> None:
        self._tape.say(Kind.ROUND, round_told(walks, self.decision))


class RecordedDrafters(Drafters):
    """Notes what drafters say and when they are listened to."""

    def __init__(self, tape: TapeWriter, hello: Hello, clock: Callable[[], float], log: Logger) -> None:
        super().__init__(hello, clock, log, self._listen)
        self._tape = tape

    @property
    def channels(self) -> list[Channel]:
        """See `Drafters.channels`: those that a caller waits on beside others are not recorded."""
        return [_inner(channel) for channel in super().channels]

    def connect(
        self, channel: Channel, synchronous: bool = False, stranger: bool = False, peer: str = ""
    ) -> None:
        """See `Drafters.connect`."""
        self._tape.note(Kind.CONNECT, synchronous + 2 * stranger + 4 * bool(peer))
        super().connect(RecordingChannel(channel, self._tape), synchronous, stranger, peer)

    def beat(self) -> None:
        """See `Drafters.beat`."""
        self._tape.note(Kind.BEAT)
        super().beat()

    def _listen(self, channels: Sequence[Channel], timeout_s: float) -> list[Channel]:
        heard = poll([_inner(channel) for channel in channels], timeout_s)
        self._tape.note(Kind.POLLED, bool(heard))
        return heard


class RecordingChannel:
    """A `Channel` whose every answer is noted."""

    def __init__(self, inner: Channel, tape: TapeWriter) -> None:
        self.inner = inner
        self._tape = tape

    @property
    def closed(self) -> bool:
        """See `Channel.closed`."""
        closed = self.inner.closed
        self._tape.note(Kind.CLOSED, closed)
        return closed

    @property
    def pending(self) -> int:
        """See `Channel.pending`."""
        pending = self.inner.pending
        self._tape.note(Kind.PENDING, pending)
        return pending

    def send(self, message: Message) -> bool:
        """See `Channel.send`."""
        taken = self.inner.send(message)
        self._tape.note(Kind.TAKEN, taken)
        return taken

    def post(self, message: Message) -> bool:
        """See `Channel.post`."""
        taken = self.inner.post(message)
        self._tape.note(Kind.TAKEN, taken)
        return taken

    def flush(self) -> bool:
        """See `Channel.flush`."""
        flushed = self.inner.flush()
        self._tape.note(Kind.FLUSHED, flushed)
        return flushed

    def receive(self) -> list[Message]:
        """See `Channel.receive`."""
        try:
            messages = self.inner.receive()
        except ProtocolError as error:
            self._tape.say(Kind.BROKEN, Refusal(str(error)))
            raise
        self._tape.hear(messages)
        return messages

    def wait(self, timeout_s: float) -> bool:
        """See `Channel.wait`."""
        return self.inner.wait(timeout_s)

    def fileno(self) -> int:
        """See `Channel.fileno`."""
        return self.inner.fileno()

    def close(self) -> None:
        """See `Channel.close`."""
        self.inner.close()


class RecordedModel(WrappedModel):
    """A model of whose forwards it is noted what their times are good for, and when they are over."""

    def __init__(self, model: Model, tape: TapeWriter) -> None:
        super().__init__(model)
        self._tape = tape

    def forward(self, batch: Batch) -> ForwardResult:
        """See `Model.forward`."""
        result = self._model.forward(batch)
        self._tape.note(Kind.CAPTURED, result.captured_now)
        return replace(result, completion=_RecordedEnd(result.completion, self._tape))


@dataclass(frozen=True, slots=True)
class _RecordedEnd:
    """A `ForwardEnd` whose answers are noted."""

    inner: ForwardEnd
    tape: TapeWriter

    def ready(self) -> bool:
        """See `ForwardEnd.ready`."""
        ready = self.inner.ready()
        self.tape.note(Kind.READY, ready)
        return ready

    def wait(self) -> float:
        """See `ForwardEnd.wait`."""
        ended = self.inner.wait()
        self.tape.note(Kind.ENDED, ended)
        return ended


def round_told(walks: Sequence[Walk], decision: Decision | None = None) -> RoundTrace:
    """What a round decided; call before it is committed."""
    parts = tuple([_part_told(walk) for walk in walks])
    return RoundTrace(parts, decision.told() if decision is not None else None)


def _part_told(walk: Walk) -> ChunkTrace:
    part, tree = walk.work.part, walk.work.tree
    request = part.request
    return ChunkTrace(
        request.number,
        len(request.tokens),
        len(part.slots),
        tuple(tree.tokens),
        tuple(tree.parents),
        len(walk.accepted),
        walk.tokens,
    )


def _inner(channel: Channel) -> Channel:
    return channel.inner if isinstance(channel, RecordingChannel) else channel
