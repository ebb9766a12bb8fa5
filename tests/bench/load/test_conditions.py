"""What a launch finds: a busy core, and a cache without measurements."""

import os
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from ssd_serve.bench.load.conditions import busy, empty_cache


def test_a_core_is_busy_by_a_process_of_ours_and_only_meanwhile() -> None:
    core = min(os.sched_getaffinity(0))
    before = set(psutil.Process().children())
    with busy(core):
        (burner,) = set(psutil.Process().children()) - before
        assert burner.is_running()
    assert not burner.is_running()
    with busy(None):
        assert set(psutil.Process().children()) <= before


def test_an_empty_cache_keeps_what_was_compiled_and_nothing_that_was_measured(tmp_path: Path) -> None:
    known, cache = tmp_path / "known", tmp_path / "cache"
    known.mkdir()
    for name in ("native-1.so", "cost-1.json"):
        (known / name).write_text("")
    empty_cache(cache, known)
    assert [file.name for file in cache.iterdir()] == ["native-1.so"]
    for name in ("cost-2.json", "layouts-2.json"):
        (cache / name).write_text("")
    empty_cache(cache, known)
    assert [file.name for file in cache.iterdir()] == ["native-1.so"]
