"""What a verifier hears from outside: clocks, measurements, the ends of forwards, and drafters.

Everything else that it does follows from its settings, its weights and its requests. So whoever listens here
can record a session, and whoever answers here can run it again. This one does neither: it is the world as it
is. Knows the parts that listen; assembles nothing.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from ssd_serve.logs import Logger
from ssd_serve.messages import Hello
from ssd_serve.models.interface import Model
from ssd_serve.verifier.build import EngineKind
from ssd_serve.verifier.drafts.drafters import Drafters
from ssd_serve.verifier.engine import Engine

T = TypeVar("T")


class Environment:
    """The world as it is."""

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds, from any moment."""
        return time.perf_counter

    @property
    def drafts_inline(self) -> bool:
        """Whether a draft model must be loaded where one drafts inline."""
        return True

    def found(self, name: str, kind: type[T], find: Callable[[], T]) -> T:
        """What `find` finds at the start on this machine at this moment; `name` tells it from the others."""
        del name, kind
        return find()

    def model(self, model: Model) -> Model:
        """The target as rounds see it."""
        return model

    def drafters(self, hello: Hello, log: Logger) -> Drafters:
        """The drafters, none of which has connected yet."""
        return Drafters(hello, log=log)

    @property
    def engine_kind(self) -> EngineKind:
        """What makes the engine of its collaborators."""
        return Engine
