"""Tests of finding models: once at the start, with names by which workers find the same files."""

from pathlib import Path

import pytest

from ssd_serve.base.engine_config import Mode
from ssd_serve.base.names import HubId, hub_id, pinned, without_revision
from ssd_serve.base.settings import Settings
from ssd_serve.cluster import placement as finding
from ssd_serve.cluster.placement import PinnedModels

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def snapshot(name: str) -> Path:
    return Path("/hub") / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT


def resolved(name: str, _role: str, **_options: object) -> Path:
    """A hub on which every id has one commit."""
    found = hub_id(name)
    return snapshot(found.name) if found else Path(name)


def test_hub_ids_are_pinned_to_the_found_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "resolve_model", resolved)
    asked = Settings(target="a/b@main", draft="c/d, ./e/f", mode=Mode.SSD)
    found = finding.find_models(asked, lambda _line: None)
    assert found.target == snapshot("a/b")
    assert found.names == PinnedModels(f"a/b@{COMMIT}", (f"c/d@{COMMIT}", "./e/f"))


def test_folders_and_the_embedded_pair_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "resolve_model", resolved)
    for target, draft in (("embedded", None), ("/models/x", "/models/y"), ("./a/b", None)):
        asked = Settings(target=target, draft=draft)
        found = finding.find_models(asked, lambda _line: None)
        assert found.names == PinnedModels(target, asked.drafts)


def test_hub_ids_are_parsed() -> None:
    assert hub_id("a/b") == HubId("a/b")
    assert hub_id("a/b@refs/pr/1") == HubId("a/b", "refs/pr/1")
    assert hub_id("a/b") != hub_id("a/b@main")
    for other in ("a", "a/b/c", "/a/b", "./a/b", "~/a", "a/b@", "embedded"):
        assert hub_id(other) is None
        assert without_revision(other) == other
    assert HubId("a/b", COMMIT).commit == COMMIT
    assert HubId("a/b", "main").commit is None
    assert without_revision("a/b@main") == "a/b"
    assert pinned("a/b", Path("/somewhere/a/b")) == "a/b"  # a folder that hides it
