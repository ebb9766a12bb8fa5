"""Health of a replica as Ray Serve sees it. No Ray runs."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from ssd_serve.app.replicas import ServerReplica
from ssd_serve.base.errors import EngineDeadError
from ssd_serve.server.limits import Limits

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Engine:
    dead: str | None = None
    silent_s: float = 0.0
    lost_s: float | None = None
    failure: EngineDeadError | None = None
    limits: Limits = field(default_factory=Limits)

    @property
    def supervisor(self) -> "Engine":
        return self

    def replica(self) -> Any:
        replica: Any = ServerReplica.__new__(ServerReplica)
        replica._client, replica._engine, replica._limits = self, self, self.limits
        return replica


async def test_replica_is_healthy_while_its_engine_runs_or_restarts() -> None:
    await Engine().replica().check_health()
    await Engine(silent_s=1e3, lost_s=20.0).replica().check_health()


async def test_silent_engine_makes_the_replica_unhealthy() -> None:
    silent_s = Limits().engine_silence_s + 1
    with pytest.raises(EngineDeadError, match=f"has sent nothing for {silent_s:.0f} s: it seems to hang"):
        await Engine(silent_s=silent_s).replica().check_health()


async def test_dead_engine_is_reported_with_its_reason() -> None:
    with pytest.raises(EngineDeadError, match="the channel closed"):
        await Engine(dead="the channel closed").replica().check_health()
    failure = EngineDeadError("the verifier process was killed by SIGKILL")
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        await Engine(dead="the channel closed", failure=failure).replica().check_health()
