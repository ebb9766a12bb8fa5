"""What all endpoints share: the parts of one running server, and whether it can take requests now.

Built once by the app. Knows no protocol fields.
"""

import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import PurePath

from ssd_serve.base.version import __version__
from ssd_serve.base.draft_messages import NOISE_SCHEME
from ssd_serve.base.engine_settings import EMBEDDED
from ssd_serve.base.errors import EngineDeadError, OverloadedError
from ssd_serve.base.hub_id import hub_id
from ssd_serve.base.messages import Ready
from ssd_serve.server.access.tenants import Tenants
from ssd_serve.server.bodies.body import Bodies
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.errors import ApiError, bad_request, unavailable
from ssd_serve.server.http.off_loop import OffLoop
from ssd_serve.server.limits import Limits
from ssd_serve.server.observability.metrics import ServerMetrics
from ssd_serve.server.text.tokenizer import TextTokenizer, TokenTexts
from ssd_serve.base.settings import Settings


@dataclass(slots=True)
class StopGate:
    """Closed once the server is told to stop: what runs goes on, new requests are refused."""

    closed: bool = False


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of one server."""

    settings: Settings
    limits: Limits
    engine: EngineClient
    tokenizer: TextTokenizer
    texts: TokenTexts
    metrics: ServerMetrics
    bodies: Bodies
    off_loop: OffLoop
    rendering: OffLoop
    """Of chat templates: whatever a model's author wrote, it never runs on the event loop."""
    aside: OffLoop
    """What generates nothing (`/tokenize`), and must not keep waiting what does, templates included."""
    gate: StopGate
    tenants: Tenants
    metrics_page: Callable[[], Awaitable[bytes]] | None = None
    """Returns the joined page of all replicas, where this server is one of several."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        """The model's id in the API."""
        return model_name(self.settings)

    def trouble(self) -> ApiError | None:
        """Why no token can be generated now; None when one can."""
        engine = self.engine
        if engine.dead is not None:
            return unavailable(engine.dead, "engine_dead", 10)
        if self.gate.closed:
            return unavailable("the server is shutting down", "shutting_down", 10)
        if engine.lost_s is not None:
            return unavailable(f"restarting: {engine.progress or 'the engine has died'}", "restarting", 5)
        if engine.ready is None:
            return unavailable(f"loading: {engine.progress or 'the engine is starting'}", "loading", 2)
        if engine.silent_s > self.limits.engine_silence_s:
            return unavailable(
                f"the engine has said nothing for {engine.silent_s:.0f} s: it seems to hang",
                "engine_silent",
                10,
            )
        return None

    def require_ready(self) -> Ready:
        """The engine's description, or the 503 that says why there is none. For a while after an engine was
        lost, the next one is expected: requests wait for it."""
        if self.engine.dead is not None:
            raise EngineDeadError(self.engine.dead)
        trouble, lost_s = self.trouble(), self.engine.lost_s
        too_long = lost_s is not None and lost_s > self.limits.hold_s
        if self.engine.ready is None or self.gate.closed or too_long:
            raise trouble or unavailable("loading", "loading")
        return self.engine.ready

    def require_model(self, name: str | None) -> None:
        """404 unless `name` is the served model or empty."""
        if name is not None and name != self.model:
            raise ApiError(
                404,
                f"the model {name[:256]!r} does not exist here; {self.model!r} does",
                param="model",
                code="model_not_found",
            )

    def require_room(self, sequences: int) -> None:
        """429 when the queue cannot take so many sequences, 400 when it never could."""
        capacity = self.settings.max_running + self.settings.max_waiting
        most = min(self.limits.max_sequences, capacity)
        if sequences > most:
            raise bad_request(f"prompts x n is {sequences}; at most {most} are allowed", "n", "invalid_value")
        if self.engine.active + sequences > capacity:
            raise OverloadedError(
                f"{self.engine.active} of {capacity} requests are running or waiting; try again later",
                retry_after_s=1.0,
            )

    def fingerprint(self, ready: Ready) -> str:
        """Changes when something changes that may change outputs: weights, version, noise, defaults."""
        settings, defaults = self.settings, str(sorted(ready.sampling.items()))
        model = [ready.target, settings.dtype, ready.target_device, str(settings.tensor_parallel)]
        told = "\n".join([__version__, NOISE_SCHEME, *model, defaults])
        return "fp_" + hashlib.sha256(told.encode()).hexdigest()[:12]


def model_name(settings: Settings) -> str:
    """The id of the served model: as set, or from the target's name."""
    if settings.served_model_name:
        return settings.served_model_name
    if settings.target == EMBEDDED:
        return "ssd-embedded"
    found = hub_id(settings.target)
    return found.name if found else PurePath(settings.target).name or settings.target
