"""State that all endpoints of a server share, and checks that it can take a request now."""

import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import PurePath

from ssd_serve.base.draft_messages import NOISE_SCHEME
from ssd_serve.base.engine_config import EMBEDDED
from ssd_serve.base.errors import EngineDeadError, OverloadedError
from ssd_serve.base.messages import Ready
from ssd_serve.base.names import hub_id
from ssd_serve.base.settings import Settings
from ssd_serve.base.version import __version__
from ssd_serve.server.access.tenants import Tenants
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.errors import ApiError, bad_request, unavailable
from ssd_serve.server.http.body import Bodies
from ssd_serve.server.http.worker_pool import WorkerPool
from ssd_serve.server.limits import Limits
from ssd_serve.server.observability.metrics import ServerMetrics
from ssd_serve.server.text import TextTokenizer, TokenTexts


@dataclass(slots=True)
class StopGate:
    """Closed when the server is stopped: running requests go on, new ones are refused."""

    closed: bool = False


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of one server that endpoints use."""

    settings: Settings
    limits: Limits
    engine: EngineClient
    loaded_tokenizer: Callable[[], TextTokenizer]
    texts: TokenTexts
    metrics: ServerMetrics
    bodies: Bodies
    worker_pool: WorkerPool
    template_pool: WorkerPool
    """Renders chat templates, which are code of the model's author and never run on the event loop."""
    tokenize_pool: WorkerPool
    """Runs /tokenize and the like, so that they do not delay requests that generate."""
    gate: StopGate
    tenants: Tenants
    metrics_page: Callable[[], Awaitable[bytes]] | None = None
    """Returns the joined page of all replicas, where this server is one of several."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        """The model's id in the API."""
        return model_name(self.settings)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer. Raises `EngineDeadError` before it is loaded."""
        return self.loaded_tokenizer()

    def problem(self) -> ApiError | None:
        """Return why no token can be generated now; None if tokens can be generated."""
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
                f"the engine has sent nothing for {engine.silent_s:.0f} s and seems to hang",
                "engine_silent",
                10,
            )
        return None

    def require_ready(self) -> Ready:
        """Return the engine's description, or raise the 503 with the reason.

        For `hold_s` seconds after an engine died, new requests wait for its replacement instead.
        """
        if self.engine.dead is not None:
            raise EngineDeadError(self.engine.dead)
        problem, lost_s = self.problem(), self.engine.lost_s
        too_long = lost_s is not None and lost_s > self.limits.hold_s
        if self.engine.ready is None or self.gate.closed or too_long:
            raise problem or unavailable("loading", "loading")
        return self.engine.ready

    def require_model(self, name: str | None) -> None:
        """Raise 404 unless `name` is the served model or None."""
        if name is not None and name != self.model:
            raise ApiError(
                404,
                f"the model {name[:256]!r} does not exist here; {self.model!r} does",
                param="model",
                code="model_not_found",
            )

    def require_room(self, sequences: int) -> None:
        """Raise 429 if the queue cannot take so many sequences now, 400 if it never could."""
        capacity = self.settings.max_running + self.settings.max_waiting
        limit = min(self.limits.max_sequences, capacity)
        if sequences > limit:
            raise bad_request(
                f"prompts x n is {sequences}; at most {limit} are allowed", "n", "invalid_value"
            )
        if self.engine.active + sequences > capacity:
            raise OverloadedError(
                f"{self.engine.active} of {capacity} requests are running or waiting; try again later",
                retry_after_s=1.0,
            )

    def fingerprint(self, ready: Ready) -> str:
        """Return a hash of everything that may change outputs: weights, version, noise, defaults."""
        settings, defaults = self.settings, str(sorted(ready.sampling.items()))
        model = [ready.target, settings.dtype, ready.target_device, str(settings.tensor_parallel)]
        text = "\n".join([__version__, NOISE_SCHEME, *model, defaults])
        return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]


def model_name(settings: Settings) -> str:
    """Return the id of the served model in the API: as set, or from the target's name."""
    if settings.served_model_name:
        return settings.served_model_name
    if settings.target == EMBEDDED:
        return "ssd-embedded"
    found = hub_id(settings.target)
    return found.name if found else PurePath(settings.target).name or settings.target
