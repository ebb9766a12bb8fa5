"""Shared test setup: a fixed hypothesis profile, one torch thread per process, and slow folders."""

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

# Two test processes with two threads each would only slow each other down on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Servers of other tests use the cores too.
os.environ.setdefault("GOMP_SPINCOUNT", "500")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without it servers would fetch the default model.
os.environ["SSD_TARGET"] = "embedded"
# Triton reads it when it is imported: kernels for GPUs run in its interpreter.
os.environ["TRITON_INTERPRET"] = "1"


pytest_plugins = ["tests.skips"]
HERE = Path(__file__).parent
SLOW_FOLDERS = (HERE / "end_to_end", HERE / "hostile")
"""Every test in these folders starts a whole server."""
RANKS = HERE / "end_to_end" / "test_tensor_parallel.py"
"""Ranks that share a core starve other processes on it for seconds."""
WHOLLY_SLOW = "\npytestmark = pytest.mark.slow\n"


# nohup and background shells ignore these signals; servers that tests start must not inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip reading files that have only slow tests when slow tests are deselected."""
    if config.getoption("markexpr") != "not slow" or collection_path.suffix != ".py":
        return None
    wholly = any(collection_path.is_relative_to(folder) for folder in SLOW_FOLDERS)
    return wholly or WHOLLY_SLOW in collection_path.read_text(encoding="utf-8") or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep imported and collected objects out of garbage collection: they live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow folders, and run slow tests first; the ranks before all, to end before hostile tests."""
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in SLOW_FOLDERS):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, item.path != RANKS))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the longest time that another client received nothing while a hostile test ran."""
    gaps: list[tuple[float, str]] = []
    for report in terminalreporter.stats.get("passed", []):
        found = re.findall(r"^longest gap ([0-9.]+) s", report.capstdout, re.MULTILINE)
        gaps += [(float(gap), report.nodeid) for gap in found]
    if gaps:
        gap, name = max(gaps)
        summary = f"{len(gaps)} attacks; longest gap of another client: {gap:.3f} s, {name}"
        terminalreporter.write_line(summary)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if (name.startswith("SSD_") and name != "SSD_TARGET") or name in ("HF_TOKEN", "RAY_ADDRESS"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """`OMP_NUM_THREADS` has no effect on a torch that a plugin imported before."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def served_kernels(pytestconfig: pytest.Config) -> "NativeLibrary | None":
    """Return the compiled kernels that a server would use here; None without a C compiler."""
    from ssd_serve.kernels.native.library import COMPILERS, NativeLibrary, build

    if not any(shutil.which(name) for name in COMPILERS):
        return None
    # One folder for all test processes and runs: the first compiles, the others wait for it.
    return NativeLibrary(build(pytestconfig.rootpath / ".pytest_cache" / "native"))


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory, served_kernels: "NativeLibrary | None") -> Path:
    """A cache folder that has the compiled kernels, and keeps step times for the tests of this process."""
    folder = tmp_path_factory.mktemp("cache")
    if served_kernels is not None:
        shutil.copy(served_kernels.path, folder)
    return folder


@pytest.fixture(scope="session")
def native(served_kernels: "NativeLibrary | None") -> "NativeLibrary":
    """The compiled kernels; skips the test without a C compiler."""
    if served_kernels is None:
        pytest.skip("there is no C compiler: this machine would be served by torch's kernels")
    return served_kernels
