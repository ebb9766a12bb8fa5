"""Servers that hostile tests share; tests with other settings start their own."""

from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

from ssd_serve.kernels.native.library import NativeError, build
from tests.hostile.guarded import PLANTED, Guarded, open_guarded
from tests.hostile.target_server import TargetServer, start_target_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[TargetServer]:
    with start_target_server(tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a world-writable cache folder with a planted kernel library, if there is a C compiler."""
    folder = tmp_path_factory.mktemp("shared") / "cache"
    folder.mkdir()
    with suppress(NativeError):
        (folder / build(folder.parent / "mine").name).write_text(PLANTED)
    (folder / "native.lock").symlink_to(folder / "precious")
    (folder / "precious").write_text("precious")
    folder.chmod(0o777)
    return folder


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Generator[Guarded]:
    with open_guarded(tmp_path_factory.mktemp("guarded"), shared) as found:
        yield found
