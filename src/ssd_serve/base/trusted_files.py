"""Files and folders that only this user can change: compiled code is loaded only from these.

A user with write access to a file, or to a folder above it, controls its content. Root is trusted.
"""

import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

_READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOCKING = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def weakness(folder: Path) -> str:
    """Reason why other users can put files into a folder, or replace it; empty if they cannot. In a folder
    with the sticky bit, such as /tmp, other users cannot touch files of this user. Raises `OSError`."""
    real = Path(os.path.realpath(folder))
    for place in (real, *real.parents):
        facts = place.stat()
        if facts.st_uid not in (0, os.getuid()):
            return f"{place} belongs to another user"
        if _others_write(facts) and not (place != real and facts.st_mode & stat.S_ISVTX):
            return f"others may write to {place}"
    return ""


def is_private(facts: os.stat_result) -> bool:
    """True if something belongs to this user and no other user can read it."""
    return facts.st_uid == os.getuid() and not facts.st_mode & 0o077


def is_own(path: Path) -> bool:
    """True if something exists that only this user or root can have written."""
    try:
        return _is_own(path.lstat())
    except OSError:
        return False


def is_own_file(path: Path) -> bool:
    """Like `is_own`, for a regular file; symbolic links return False."""
    return is_own(path) and path.is_file() and not path.is_symlink()


def read_own(path: Path) -> bytes:
    """Read a file that only this user or root can have written. Raises `OSError` for any other file."""
    with os.fdopen(os.open(path, _READING), "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or not _is_own(facts):
            raise PermissionError(f"{path} is no file of this user's alone")
        return file.read()


def open_lock(path: Path) -> int:
    """Open or create a lock file and return its descriptor. Links are not followed. Raises `OSError`."""
    return os.open(path, _LOCKING, 0o600)


def make_folder(folder: Path) -> None:
    """Make a folder and missing folders above it, accessible to this user only. Raises `OSError`."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def cache_folder(
    folder: Path, warn: Callable[[str], None] = lambda _line: None, variable: str = "SSD_CACHE_DIR"
) -> Path:
    """Return the requested folder, or a private one if another user could put compiled code into it. `warn`
    receives the reason, with the `variable` to set. The folder may be missing, and impossible to create."""
    try:
        folder = Path(os.path.realpath(folder.expanduser()))
        make_folder(folder)
        why = weakness(folder)
    except RuntimeError:
        why = f"{folder} is nowhere, for this user has no home folder"
    except OSError:
        return folder  # writing there raises the error
    if not why:
        return folder
    other = _private_folder()
    warn(
        f"{why}: compiled kernels and measurements are kept in {other} instead; chmod go-w it, or set "
        f"{variable} to a folder that is yours alone"
    )
    return other


def _private_folder() -> Path:
    """Return a private temporary folder, if it is safe the same one for all processes of this user."""
    folder = Path(tempfile.gettempdir()) / f"ssd-serve-{os.getuid()}"
    try:
        make_folder(folder)
        if not folder.is_symlink() and not weakness(folder):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="ssd-serve-"))


def _is_own(facts: os.stat_result) -> bool:
    mine = facts.st_uid in (0, os.getuid())
    return mine and (stat.S_ISLNK(facts.st_mode) or not _others_write(facts))


def _others_write(facts: os.stat_result) -> bool:
    if facts.st_mode & stat.S_IWOTH:
        return True
    return bool(facts.st_mode & stat.S_IWGRP) and not _is_private_group(facts.st_gid)


def _is_private_group(number: int) -> bool:
    """True if a group has this user as its only member, as on systems with a umask of 002."""
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return user.pw_gid == number and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
