"""API keys, the names of their holders, and the file that lists them.

A line of the file is `name key`, optionally with `requests_per_minute=N` and `tokens_per_minute=N`; `#` begins
a comment. A name may have several lines, so that a key can be replaced without a gap. The file is read again
when it changes; if the new file is invalid, the old keys stay in force.
"""

import hmac
import logging
import re
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from ssd_serve.base.errors import PermissionProblemError, SettingsError, SsdError

logger = logging.getLogger(__name__)

MIN_KEY_CHARACTERS = 16
"""Shorter keys cause a warning."""
MAX_KEYS = 1000
"""Every request is compared with all keys."""
OPERATOR = "default"
"""Name of the holder of SSD_API_KEY, reserved for it."""
_LARGEST_FILE = 1024 * 1024
_NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
_LIMITS = ("requests_per_minute", "tokens_per_minute")
_CHECK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a key, with its own limits if it has any."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key and its holder; the key is not shown in logs."""

    key: str = field(repr=False)
    holder: Holder


class Keyring:
    """Finds the holder of a key in constant time."""

    def __init__(self, entries: Sequence[KnownKey]) -> None:
        self._secret = secrets.token_bytes(32)
        self._holders = [(self._digest(entry.key.encode()), entry.holder) for entry in entries]

    def holder(self, given: bytes) -> Holder | None:
        """Return the holder of a key. Compares with all keys, even after a match."""
        digest, found = self._digest(given.strip()), None
        for known, holder in self._holders:
            if hmac.compare_digest(known, digest):
                found = holder
        return found

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, "sha256")


def parse_keys(text: str, known: Sequence[KnownKey] = ()) -> list[KnownKey]:
    """Return the `known` entries and those of a file. Raises `SettingsError` with the line, never a key."""
    entries = list(known)
    for number, line in enumerate(text.splitlines(), start=1):
        words = list(takewhile(lambda word: not word.startswith("#"), line.split()))
        if not words:
            continue
        try:
            entry = _parse_line(words)
            _check_against(entry, entries)
        except ValueError as error:
            raise SettingsError(f"line {number}: {error}") from None
        entries.append(entry)
        if len(entries) > MAX_KEYS:
            raise SettingsError(f"line {number}: more than {MAX_KEYS} keys")
    if len(entries) == len(known):
        raise SettingsError("there is no key in it; a line is: name key")
    return entries


def _parse_line(words: list[str]) -> KnownKey:
    if len(words) < 2:
        raise ValueError("a line is: name key, and if wanted requests_per_minute=N tokens_per_minute=N")
    name, key, *rest = words
    if not re.fullmatch(_NAME, name):
        raise ValueError("a name has at most 64 letters, digits, '.', '_', '@' and '-'")
    if name == OPERATOR:
        raise ValueError(f"the name '{OPERATOR}' is that of SSD_API_KEY; choose another one")
    if not (key.isascii() and key.isprintable()):
        raise ValueError("a key has printable ASCII characters only")
    limits: dict[str, int] = {}
    for word in rest:
        limit, _, value = word.partition("=")
        if limit not in _LIMITS or not re.fullmatch(r"[1-9][0-9]{0,11}", value):
            # The word itself may be a key in the wrong place.
            raise ValueError("behind the key stand only requests_per_minute=N and tokens_per_minute=N")
        limits[limit] = int(value)
    return KnownKey(key, Holder(name, *(limits.get(limit) for limit in _LIMITS)))


def _check_against(entry: KnownKey, others: Sequence[KnownKey]) -> None:
    for other in others:
        if other.key == entry.key:
            raise ValueError(f"this key is that of {other.holder.name} already")
        if other.holder.name == entry.holder.name and other.holder != entry.holder:
            raise ValueError(f"{entry.holder.name} has other limits above; lines of one name have the same")


def read_keys(path: Path, known: Sequence[KnownKey] = ()) -> list[KnownKey]:
    """Return the `known` entries and those of a file. Raises `SettingsError`, `PermissionProblemError`."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_FILE:
            raise SettingsError(f"{path} is no file of keys (SSD_API_KEYS_FILE): not a file, or above 1 MiB")
        return parse_keys(path.read_text(encoding="utf-8"), known)
    except PermissionError as error:
        raise PermissionProblemError(f"this user may not read {path} (SSD_API_KEYS_FILE)") from error
    except OSError as error:
        raise SettingsError(f"cannot read {path} (SSD_API_KEYS_FILE): {error.strerror}") from error
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is no text in UTF-8 (SSD_API_KEYS_FILE)") from None
    except SettingsError as error:
        raise SettingsError(f"{path} (SSD_API_KEYS_FILE): {error}") from None


def warn_of_weak(entries: Sequence[KnownKey], path: Path | None) -> None:
    """Log warnings about short keys and file permissions; never a key."""
    for name in dict.fromkeys(each.holder.name for each in entries if len(each.key) < MIN_KEY_CHARACTERS):
        logger.warning(
            "the key of %s is shorter than %d characters and can be guessed; openssl rand -hex 32 makes one",
            name,
            MIN_KEY_CHARACTERS,
        )
    if path is not None and path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        logger.warning("every user of this machine may read or write %s; chmod 600 it", path)


class KeysFile:
    """The current keys of a file, which is checked for changes at most once a second."""

    def __init__(
        self,
        path: Path,
        known: Sequence[KnownKey] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`known` keys come before those of the file. Raises the file's errors, but only here."""
        self._path = path
        self._known = known
        self._clock = clock
        self._signature = self._stat()
        self._checked_at = clock()
        self.entries = read_keys(path, known)
        warn_of_weak(self.entries, path)

    def changed(self) -> bool:
        """Read the file again if it has changed; return True if `entries` are new."""
        now = self._clock()
        if now - self._checked_at < _CHECK_EVERY_S:
            return False
        self._checked_at = now
        signature = self._stat()
        if signature == self._signature:
            return False
        self._signature = signature
        try:
            entries = read_keys(self._path, self._known)
            warn_of_weak(entries, self._path)
        except (SsdError, OSError) as error:
            logger.error("%s; the old keys stay in force", error)
            return False
        logger.info("reloaded %s: %d keys", self._path, len(entries))
        self.entries = entries
        return True

    def _stat(self) -> tuple[int, int, int] | None:
        """Return a value that changes with the file."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size
