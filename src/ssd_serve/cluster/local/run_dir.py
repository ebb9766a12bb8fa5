"""The folder that holds a server's sockets: 0700, so that only this user can reach the workers."""

import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ssd_serve.base.errors import PermissionProblemError, SettingsError
from ssd_serve.base.owned import is_private, open_lock
from ssd_serve.transport.rank_sockets import RankFiles

_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class RunDir:
    """A private folder and the socket paths in it."""

    path: Path
    temporary: bool
    lock: int
    """Descriptor of a locked file; the kernel unlocks it when this process ends, however it ends."""

    @property
    def server_socket(self) -> str:
        """Where the verifier listens for the server."""
        return str(self.path / "server.sock")

    @property
    def drafter_socket(self) -> str:
        """Where the verifier listens for drafters."""
        return str(self.path / "drafter.sock")

    @property
    def ranks(self) -> RankFiles:
        """Where the target's ranks meet."""
        return RankFiles(self.path)

    def remove(self) -> None:
        """Remove what was made here, and the folder if it was made for this run."""
        self.ranks.remove()
        for name in (self.server_socket, self.drafter_socket, self.path / _LOCK):
            Path(name).unlink(missing_ok=True)
        os.close(self.lock)
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)


def make_run_dir(path: Path | None) -> RunDir:
    """Create the folder, or take the one that the user named if it is private and writable."""
    if path is None:
        try:
            path = Path(tempfile.mkdtemp(prefix="ssd-"))
        except OSError as error:
            raise PermissionProblemError(
                f"no temporary folder can be made: {error.strerror}; "
                "set SSD_RUN_DIR to a folder you can write to"
            ) from error
        return RunDir(path, temporary=True, lock=_lock(path))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = path.stat()
    except OSError as error:
        raise PermissionProblemError(
            f"SSD_RUN_DIR={path} cannot be used: {error.strerror}; name a folder you can write to"
        ) from error
    if not is_private(facts):
        raise PermissionProblemError(
            f"SSD_RUN_DIR={path} must belong to you alone: chmod 700 it, or name another folder"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionProblemError(f"SSD_RUN_DIR={path} is not writable; name another folder")
    return RunDir(path.absolute(), temporary=False, lock=_lock(path))


def _lock(folder: Path) -> int:
    """Two servers in one folder would replace each other's sockets."""
    descriptor = open_lock(folder / _LOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise SettingsError(f"another server uses SSD_RUN_DIR={folder}; name another folder") from error
    return descriptor
