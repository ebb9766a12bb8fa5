"""Where the next verifier is looked for, without a cluster."""

from types import SimpleNamespace

import pytest

from ssd_serve.cluster import ray_launcher
from ssd_serve.cluster.ray_launcher import RayEngine
from ssd_serve.errors import EngineDeadError, SettingsError


def test_a_stranger_at_the_port_of_a_verifier_that_died_is_not_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [EngineDeadError("no route"), SettingsError("another key"), "the channel"]

    def connect(*_: object, **__: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray_launcher, "connect", connect)
    monkeypatch.setattr(ray_launcher, "told", lambda *_: SimpleNamespace(server="tcp://127.0.0.1:1"))
    engine = RayEngine.__new__(RayEngine)
    parts = {
        "_crew": SimpleNamespace(addresses=object()),
        "_cluster": SimpleNamespace(ray=None),
        "_supervisor": SimpleNamespace(over=False, failure=None),
        "_orders": SimpleNamespace(cluster_key="a key of the tests"),
    }
    for name, part in parts.items():
        setattr(engine, name, part)
    found: object = engine.connect(10.0)
    assert found == "the channel"
    assert not answers
