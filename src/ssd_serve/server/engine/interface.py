"""What the front end asks of an engine, whether it talks to the verifier or to a process that does."""

from collections.abc import Sequence
from typing import Protocol

from ssd_serve.base.messages import Ready, RequestOptions, Status
from ssd_serve.server.engine.submitted import Wanted


class EngineView(Protocol):
    """What metrics read of the server's end of the engine."""

    @property
    def ready(self) -> Ready | None:
        """What the engine said last about itself."""
        ...

    @property
    def status(self) -> Status | None:
        """What the engine said last about its work."""
        ...

    @property
    def restarts(self) -> int:
        """Engines that came after another one."""
        ...

    @property
    def resumed(self) -> int:
        """Requests that went on in another engine."""
        ...


class ServedEngine(EngineView, Protocol):
    """Lives on one event loop. None of it blocks."""

    @property
    def target(self) -> str | None:
        """The model as the engine was told it, with its commit, where somebody knows."""
        ...

    @property
    def progress(self) -> str:
        """What it does while it starts."""
        ...

    @property
    def dead(self) -> str | None:
        """Why nothing will be generated any more."""
        ...

    @property
    def active(self) -> int:
        """Requests that have not ended."""
        ...

    @property
    def silent_s(self) -> float:
        """Seconds since the engine last said anything."""
        ...

    @property
    def lost_s(self) -> float | None:
        """Seconds since the engine was lost whose successor is not ready yet; None where there is one."""
        ...

    def start(self) -> None:
        """Begin to listen on the running event loop. A second call changes nothing."""
        ...

    def stop(self) -> None:
        """Abort what runs, and tell every submitter."""
        ...

    def submit_all(
        self, wanted: Sequence[Wanted], options: RequestOptions = RequestOptions()
    ) -> list[int]:
        """Send requests, all or none of them, and return their numbers. Raises `EngineDeadError`,
        `OverloadedError`, or `RequestError` for what no message may hold."""
        ...

    def abort(self, request: int) -> None:
        """The client is gone: free the request. Does nothing when it has already ended."""
        ...

    def finish(self, request: int) -> None:
        """A stop string was found: end the request; its `Finished` follows, or an error."""
        ...
