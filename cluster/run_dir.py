"""The folder that holds a server's sockets: 0700, so that only this user can reach the workers."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ssd_serve.errors import PermissionProblemError


@dataclass(frozen=True, slots=True)
class RunDir:
    """A private folder and the socket paths in it."""

    path: Path
    temporary: bool

    @property
    def server_socket(self) -> str:
        """Where the verifier listens for the server."""
        return str(self.path / "server.sock")

    @property
    def drafter_socket(self) -> str:
        """Where the verifier listens for drafters."""
        return str(self.path / "drafter.sock")

    def remove(self) -> None:
        """Remove the sockets, and the folder if it was made for this run."""
        for socket_path in (self.server_socket, self.drafter_socket):
            Path(socket_path).unlink(missing_ok=True)
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)


def make_run_dir(path: Path | None) -> RunDir:
    """Create the folder, or take the one that the user named if it is private and writable."""
    if path is None:
        try:
            return RunDir(Path(tempfile.mkdtemp(prefix="ssd-")), temporary=True)
        except OSError as error:
            raise PermissionProblemError(
                f"no temporary folder can be made: {error.strerror}; "
                "set SSD_RUN_DIR to a folder you can write to"
            ) from error
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = path.stat()
    except OSError as error:
        raise PermissionProblemError(
            f"SSD_RUN_DIR={path} cannot be used: {error.strerror}; name a folder you can write to"
        ) from error
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise PermissionProblemError(
            f"SSD_RUN_DIR={path} must belong to you alone: chmod 700 it, or name another folder"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionProblemError(f"SSD_RUN_DIR={path} is not writable; name another folder")
    return RunDir(path.absolute(), temporary=False)
