"""Connection to restarted verifiers, and waiting for devices, without a cluster."""

from types import SimpleNamespace

import pytest

from ssd_serve.base.errors import EngineDeadError, SettingsError
from ssd_serve.base.logs import get_logger
from ssd_serve.cluster.ray import launcher as ray_launcher
from ssd_serve.cluster.ray.launcher import RayEngine, await_room


def test_connect_retries_after_another_process_took_the_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [EngineDeadError("no route"), SettingsError("another key"), "the channel"]

    def connect(*_: object, **__: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray_launcher, "connect", connect)
    monkeypatch.setattr(
        ray_launcher, "resolved_addresses", lambda *_: SimpleNamespace(server="tcp://127.0.0.1:1")
    )
    engine = RayEngine.__new__(RayEngine)
    parts = {
        "_actors": SimpleNamespace(addresses=object()),
        "_cluster": SimpleNamespace(ray=None),
        "supervisor": SimpleNamespace(over=False, failure=None),
        "_key": "a key of the tests",
    }
    for name, part in parts.items():
        setattr(engine, name, part)
    found: object = engine.connect(10.0)
    assert found == "the channel"
    assert not answers


class Group:
    """Has its devices when it has been waited for so many times."""

    def __init__(self, waits: int) -> None:
        self.waits = waits
        self.asked: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.asked.append(seconds)
        return len(self.asked) >= self.waits


def test_placement_waits_for_busy_devices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log, bundles = get_logger("replica", level="warning"), [{"GPU": 4.0}]
    patient = Group(3)
    await_room(patient, bundles, 86400.0, log)
    assert patient.asked == [60.0] * 3
    assert capsys.readouterr().err.count("waiting for devices that other jobs use") == 2
    with pytest.raises(SettingsError, match=r"has had no free \[\{'GPU': 4.0\}\] for 0 s"):
        await_room(Group(99), bundles, 0.0, log)
