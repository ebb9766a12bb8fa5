"""What a launch of the load benchmark finds: a core that another process uses, and a cache that remembers
nothing.

Knows processes and files, not servers.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

from ssd_serve.base.owned import is_own_file

_BURN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
while os.getppid() == int(sys.argv[2]):
    pass
"""
_MEASURED = ("cost-*.json", "layouts-*.json")
_COMPILED = "native-*.so"


@contextlib.contextmanager
def busy(core: int | None) -> Generator[None]:
    """Keep a core busy by a process of our own, which ends with us; None: none."""
    if core is None:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-c", _BURN, str(core), str(os.getpid())], stdin=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def empty_cache(cache: Path, known: Path) -> None:
    """A cache folder in which nothing measured is left; what servers compiled is taken from a `known` one."""
    cache.mkdir(mode=0o700, exist_ok=True)
    for pattern in _MEASURED:
        for file in cache.glob(pattern):
            file.unlink()
    for file in known.expanduser().glob(_COMPILED):
        if is_own_file(file) and not (cache / file.name).exists():
            shutil.copy(file, cache)
