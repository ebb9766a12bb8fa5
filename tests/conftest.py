"""What every test shares: a fixed hypothesis profile, and one torch thread a test process."""

import gc
import os
import re
import shutil
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import WHOLE

if TYPE_CHECKING:
    from ssd_serve.kernels.native.library import NativeLibrary

settings.register_profile(
    "local", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if WHOLE else "local")

# Two test processes with two threads each on two cores would only disturb one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Triton reads it when it is imported: kernels for GPUs run in its interpreter.
os.environ["TRITON_INTERPRET"] = "1"


pytest_plugins = ["tests.skips"]
HERE = Path(__file__).parent
SLOW_ROOMS = (HERE / "end_to_end", HERE / "hostile")
"""Every test there needs a whole server."""
UNSTEADY_ROOMS = (*SLOW_ROOMS, HERE / "cluster", HERE / "deploy", HERE / "chaos")
"""Tests there judge what processes do in time, on a machine that others may share: one that fails is run once
more, and the summary names it. Tests of one process, and of what a text must be, have one try."""
RANKS = HERE / "end_to_end" / "test_tensor_parallel.py"
"""Ranks that share a core wake one another so often that others on it wait for seconds."""
WHOLLY_SLOW = "\npytestmark = pytest.mark.slow\n"


# Whoever starts the tests with nohup starts no server with it, nor behind a shell that goes on without them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of slow tests only are not even read where none of them is wanted."""
    if config.getoption("markexpr") != "not slow" or collection_path.suffix != ".py":
        return None
    wholly = any(collection_path.is_relative_to(room) for room in SLOW_ROOMS)
    return wholly or WHOLLY_SLOW in collection_path.read_text(encoding="utf-8") or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected lives until the end: searching it for garbage only takes time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow ones first, so that no process is left alone with one of them at the end; of these the ranks,
    so that they are gone when attacks begin."""
    for item in items:
        if any(item.path.is_relative_to(room) for room in SLOW_ROOMS):
            item.add_marker(pytest.mark.slow)
        if any(item.path.is_relative_to(room) for room in UNSTEADY_ROOMS):
            item.add_marker(pytest.mark.flaky(reruns=1))
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, item.path != RANKS))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What passed only when it ran again, and what attackers did to others: the longest time that another
    client got nothing."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.write_line(f"failed at first: {report.nodeid}\n{report.longreprtext}")
    told: list[tuple[float, str]] = []
    for report in terminalreporter.stats.get("passed", []):
        gaps = re.findall(r"^longest gap ([0-9.]+) s", report.capstdout, re.MULTILINE)
        told += [(float(gap), report.nodeid) for gap in gaps]
    if told:
        gap, name = max(told)
        terminalreporter.write_line(
            f"{len(told)} attacks; longest gap of another client: {gap:.3f} s, {name}"
        )


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests must not depend on variables of whoever runs them."""
    for name in list(os.environ):
        if name.startswith("SSD_") or name in ("HF_TOKEN", "RAY_ADDRESS"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """`OMP_NUM_THREADS` comes too late for a torch that a plugin has imported already."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def served_kernels(tmp_path_factory: pytest.TempPathFactory) -> "NativeLibrary | None":
    """What a server computes with here: the compiled kernels, or None where there is no C compiler."""
    from ssd_serve.kernels.native.library import COMPILERS, NativeLibrary, build

    if not any(shutil.which(name) for name in COMPILERS):
        return None
    # One folder for all test processes: the first compiles, the others wait for it.
    folder = Path(tmp_path_factory.getbasetemp())
    return NativeLibrary(build((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "native"))


@pytest.fixture(scope="session")
def native(served_kernels: "NativeLibrary | None") -> "NativeLibrary":
    """The compiled kernels, for tests of themselves."""
    if served_kernels is None:
        pytest.skip("there is no C compiler: this machine would be served by torch's kernels")
    return served_kernels
