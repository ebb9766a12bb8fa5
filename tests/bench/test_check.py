"""The regression gate: turns, ratios and verdict with fake codes; the base commit; the worktree's end."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from ssd_serve.base.errors import SsdError, UserError
from ssd_serve.bench.check import checkouts, comparison
from ssd_serve.bench.statistics import Verdict, ratio_interval
from tests.fakes import FakeClock


class FakeCode:
    """Decodes at given speeds; the machine is slower in every third turn."""

    def __init__(self, name: str, clock: FakeClock, log: list[str], ar: float, ssd: float) -> None:
        self._name, self._clock, self._log = name, clock, log
        self._speeds = {"ar": ar, "ssd": ssd}

    def measure(self, turn: int) -> Mapping[str, float]:
        self._log.append(f"{self._name}{turn}")
        self._clock.now += 5.0
        machine = (0.5 if turn % 3 == 0 else 1.0) * (1.01 if turn % 2 else 0.99)
        wobble = 1.02 if (turn // 2 + (self._name == "new")) % 2 else 0.98
        return {mode: speed * machine * wobble for mode, speed in self._speeds.items()}


def run(
    new: tuple[float, float], old: tuple[float, float], seconds: float = 100.0
) -> tuple[comparison.Passes, list[str]]:
    clock = FakeClock()
    log: list[str] = []
    found = comparison.compare(
        FakeCode("new", clock, log, *new),
        FakeCode("old", clock, log, *old),
        seconds=seconds,
        least=3,
        say=lambda text: None,
        clock=clock,
    )
    return found, log


def test_passes_take_turns_and_the_first_is_not_counted() -> None:
    found, log = run((60, 140), (60, 140), seconds=38.0)
    assert log == ["new0", "old0", "new1", "old1", "old2", "new2", "new3", "old3", "old4", "new4"]
    assert len(found.new["ar"]) == len(found.old["ssd"]) == 4


def test_there_are_enough_pairs_however_short_the_time() -> None:
    assert len(run((60, 140), (60, 140), seconds=0.0)[0].new["ar"]) == 3


def test_a_machine_that_slows_down_does_not_matter() -> None:
    found, _ = run((60, 140), (60, 140))
    assert min(found.new["ar"]) < 0.6 * max(found.new["ar"])
    for ratio in found.ratios.values():
        assert 0.95 < ratio.low < 1.0 < ratio.high < 1.05
    assert found.failing == {}
    assert "no mode is slower" in comparison.table(found, "v1")


@pytest.mark.parametrize(
    ("new", "slower"),
    [
        ((50, 140), ("ar",)),
        ((60, 110), ("ssd",)),
        ((50, 110), ("ar", "ssd")),
        ((70, 150), ()),
    ],
)
def test_what_is_slower_is_named(new: tuple[float, float], slower: tuple[str, ...]) -> None:
    found, _ = run(new, (60, 140))
    assert found.failing == dict.fromkeys(slower, Verdict.WORSE)
    for mode in slower:
        assert f"{mode}: worse" in comparison.table(found, "v1").splitlines()[-1]
    result = found.as_json("v1")
    assert result["base"] == "v1"
    rows = result["results"]
    assert isinstance(rows, list)
    assert [row["mode"] for row in rows if row["new"]["high"] < 1] == list(slower)


def test_a_wide_interval_does_not_pass() -> None:
    ratios = ratio_interval([0.5, 0.9, 1.3])
    assert ratios is not None
    found = comparison.Passes({"ar": [1.0]}, {"ar": [1.0]}, {"ar": ratios})
    assert found.failing == {"ar": Verdict.NOT_SHOWN}


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of three commits."""
    root = tmp_path / "root"
    root.mkdir()
    git(root, "init", "-q")
    for text in "abc":
        (root / "file").write_text(text)
        git(root, "add", "file")
        git(root, "commit", "-q", "-m", text)
    return root


def test_the_base_is_what_was_named_or_the_last_release_or_the_parent(root: Path) -> None:
    first, second = git(root, "rev-parse", "HEAD~2"), git(root, "rev-parse", "HEAD~1")
    parent = checkouts.find_base(root, None)
    assert parent.commit == second
    assert "no release yet" in parent.name
    git(root, "tag", "other", "HEAD~1")
    git(root, "tag", "v0.1.0", "HEAD~2")
    release = checkouts.find_base(root, None)
    assert release.commit == first
    assert release.name == "v0.1.0, the last release"
    assert checkouts.find_base(root, "other") == checkouts.Base(second, "other")
    with pytest.raises(UserError, match="git rev-parse"):
        checkouts.find_base(root, "nothing")


def test_the_worktree_goes_away_whatever_happens(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "old"

    def interrupted() -> None:
        with checkouts.worktree(root, "HEAD~2", path):
            assert (path / "file").read_text() == "a"
            (path / "left").write_text("something")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not path.exists()
    assert len(git(root, "worktree", "list").splitlines()) == 1


PACKAGE = "src/ssd_serve"
ECHO = """
import json, sys, ssd_serve
print("noise")
print(json.dumps({"source": ssd_serve.__file__}), flush=True)
for line in sys.stdin:
    print(json.dumps({"ar": ssd_serve.SPEED * int(line), "ssd": 7}), flush=True)
"""


def tree(path: Path, speed: int) -> Path:
    (path / PACKAGE).mkdir(parents=True)
    (path / PACKAGE / "__init__.py").write_text(f"SPEED = {speed}\n")
    return path


def test_each_code_runs_its_own_sources(tmp_path: Path) -> None:
    probe = tmp_path / "probe" / "probe.py"
    probe.parent.mkdir()
    probe.write_text(ECHO)
    new, old = tree(tmp_path / "new", 3), tree(tmp_path / "old", 2)
    with checkouts.started(new, probe, probe) as first, checkouts.started(old, probe, probe) as second:
        assert first.measure(5) == {"ar": 15.0, "ssd": 7.0}
        assert second.measure(4) == {"ar": 8.0, "ssd": 7.0}
    # Without sources of its own, Python would import those of this checkout: never take them for another's.
    (tmp_path / "empty").mkdir()
    with (
        pytest.raises(SsdError, match="was to be measured"),
        checkouts.started(tmp_path / "empty", probe, probe),
    ):
        pytest.fail("it started")


@pytest.mark.parametrize("place", ["bench/check/probe.py", "bench/check_probe.py"])
def test_each_code_is_measured_by_the_probe_that_it_brings(tmp_path: Path, place: str) -> None:
    probe = tmp_path / place
    probe.parent.mkdir(parents=True)
    probe.touch()
    assert checkouts.find_probe(tmp_path) == probe


def test_code_without_a_probe_is_too_old(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="older than this check"):
        checkouts.find_probe(tmp_path)


def test_code_that_cannot_run_the_probe_is_one_sentence(tmp_path: Path) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text("raise SystemExit('this commit has no such benchmark')")
    with (
        pytest.raises(SsdError, match="BASE=COMMIT"),
        checkouts.started(tree(tmp_path / "old", 1), probe, probe),
    ):
        pytest.fail("it started")
