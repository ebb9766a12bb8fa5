"""The seams of a verifier with a tape at each, which hears every answer from outside.

One that records notes it and gives it back; one that replays gives back what was answered then. Knows the
seams and that there is a tape; not which of the two it is.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ssd_serve.transport.channel import Channel
from ssd_serve.transport.channel import poll
from ssd_serve.base.draft_messages import Message
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.kernels.device import ForwardEnd
from ssd_serve.models.wrapped import WrappedModel
from ssd_serve.verifier.environment import Environment
from ssd_serve.verifier.observer import Observer
from ssd_serve.verifier.replay.tape import Answer, Connection, Kind


class Tape(Protocol):
    """Hears the answers of the world, and says what they shall be."""

    def answer(self, kind: Kind, value: Answer) -> Answer:
        """Something that was asked, and the world's answer."""
        ...

    def messages(self, receive: Callable[[], list[Message]]) -> list[Message]:
        """What a channel gives, or the `ProtocolError` that it raises."""
        ...

    def connected(self, connection: Connection) -> None:
        """A drafter has connected."""
        ...


def taped(tape: Tape, observer: Observer) -> Environment:
    """The world behind a tape."""

    def poll_taped(channels: Sequence[Channel], timeout_s: float) -> Sequence[Channel]:
        heard = tape.answer(Kind.POLLED, bool(poll(channels, timeout_s)))
        return channels if heard else ()

    def tap(channel: Channel, synchronous: bool, stranger: bool, peer: str) -> Channel:
        tape.connected(Connection(synchronous, stranger, elsewhere=bool(peer)))
        return TapedChannel(channel, tape)

    return Environment(
        clock=lambda: tape.answer(Kind.CLOCK, time.perf_counter()),
        poll=poll_taped,
        tap=tap,
        model=lambda model: TapedModel(model, tape),
        observer=observer,
    )


class TapedChannel:
    """A drafter's channel. What only polls ask of it is not the tape's."""

    def __init__(self, inner: Channel, tape: Tape) -> None:
        self._inner = inner
        self._tape = tape

    @property
    def closed(self) -> bool:
        return self._tape.answer(Kind.CLOSED, self._inner.closed)

    @property
    def pending(self) -> int:
        return self._inner.pending

    def send(self, message: Message) -> bool:
        return self._tape.answer(Kind.TAKEN, self._inner.send(message))

    def post(self, message: Message) -> bool:
        return self._tape.answer(Kind.TAKEN, self._inner.post(message))

    def flush(self) -> bool:
        return self._tape.answer(Kind.FLUSHED, self._inner.flush())

    def receive(self) -> list[Message]:
        return self._tape.messages(self._inner.receive)

    def wait(self, timeout_s: float) -> bool:
        return self._inner.wait(timeout_s)

    def fileno(self) -> int:
        return self._inner.fileno()

    def close(self) -> None:
        self._inner.close()


class TapedModel(WrappedModel):
    """The target: forwards are computed, their ends and what their times are good for are the tape's."""

    def __init__(self, model: Model, tape: Tape) -> None:
        super().__init__(model)
        self._tape = tape

    def forward(self, batch: Batch) -> ForwardResult:
        result = self._model.forward(batch)
        return replace(
            result,
            completion=_TapedEnd(result.completion, self._tape),
            includes_capture=self._tape.answer(Kind.CAPTURED, result.includes_capture),
        )


@dataclass(frozen=True, slots=True)
class _TapedEnd:
    """The end of a forward."""

    inner: ForwardEnd
    tape: Tape

    def ready(self) -> bool:
        return self.tape.answer(Kind.READY, self.inner.ready())

    def wait(self) -> float:
        return self.tape.answer(Kind.ENDED, self.inner.wait())
