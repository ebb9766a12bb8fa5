"""`ssd report`: one archive with the data for a bug report about speed or wrong results.

Runs the project's own checks and benchmarks one after the other, each in a process of its own, and packs what
they wrote. A step that fails or takes too long is part of the report. No secrets, no prompts: values of
secret settings and variables, and the home folder's name, are blotted out wherever they stand. Does not know
what the steps' results mean.
"""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO
from urllib.parse import unquote

from ssd_serve.base.errors import SettingsError

TIMED_OUT = 124
"""Exit code of the shell's `timeout`."""
INTERRUPTED = 130
_BLOT = "<left out>"
_HOME = "<home>"
_STEP_S = 30 * 60.0
_GRACE_S = 10.0
_SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|KEY|APIKEY|SECRET|(PG)?PASSWORD|PASSWD|PASSPHRASE|PASS|AUTH)$", re.IGNORECASE
)
_PROXY_NAME = re.compile(r"(^|_)PROXY$", re.IGNORECASE)
_MIN_SECRET = 4
_MIN_LIKELY_SECRET = 8
"""Characters below which a value is more likely a word that the results need."""


@dataclass(frozen=True, slots=True)
class Step:
    """A command of `ssd`. `{file}` in its arguments is the file of its result; without it, its output is
    kept."""

    name: str
    arguments: tuple[str, ...]
    device: str | None = None
    """Device that it measures, by torch's name; None: it measures nothing."""


def steps(device: str, *, quick: bool) -> list[Step]:
    """Commands of a report on `device` (torch's name). `quick` leaves out the table of modes, which takes
    minutes."""
    where = ("--device", device, "--json", "{file}")
    found = [
        Step("settings", ("settings", "--json")),
        Step("doctor", ("doctor", "--json")),
        Step("conformance", ("bench", "kernels", "--conformance", *where), device),
        Step("kernels", ("bench", "kernels", *where), device),
        Step("divergence", ("bench", "lossless", "--quick", *where), device),
    ]
    if not quick:
        modes = ("bench", "modes", "--setting", "real", "--num-prompts", "4", *where)
        found.append(Step("modes", modes, device))
    return found


def write_report(
    out: Path,
    todo: Sequence[Step],
    secrets: Sequence[str],
    say: Callable[[str], None],
    program: Sequence[str] = (sys.executable, "-m", "ssd_serve"),
    step_s: float = _STEP_S,
) -> dict[str, int]:
    """Run the steps, each for at most `step_s` seconds, and write the archive `out` (.tar.gz).

    Returns each step's exit code. What is there is packed also when it is interrupted. Raises `SettingsError`
    where `out` cannot be written, before the first step if that shows then.
    """
    codes: dict[str, int] = {}
    with _opened(out) as archive, TemporaryDirectory(prefix="ssd-report-") as folder:
        place = Path(folder)
        try:
            for step in todo:
                say(f"running: ssd {' '.join(step.arguments[:2])}")
                started = time.monotonic()
                codes[step.name] = INTERRUPTED  # until it has ended
                codes[step.name] = _run(step, place, program, step_s)
                say(f"  exit code {codes[step.name]} after {time.monotonic() - started:.0f} s")
        finally:
            summary = {"exit_codes": codes, "devices": {step.name: step.device for step in todo}}
            (place / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
            say(f"packing {out}")
            try:
                _pack(archive, place, secrets)
            except OSError as error:
                raise _unwritable(out, error) from error
    return codes


def _opened(out: Path) -> IO[bytes]:
    """Open the archive for appending: an older one is kept until the new one is written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return out.open("ab")
    except OSError as error:
        raise _unwritable(out, error) from error


def _unwritable(out: Path, error: OSError) -> SettingsError:
    return SettingsError(f"{out} cannot be written ({error.strerror or error}); name another file with --out")


def _run(step: Step, place: Path, program: Sequence[str], step_s: float) -> int:
    """Run one command; its output goes to files, which are kept even if it fails."""
    result, printed, log = (place / f"{step.name}.{kind}" for kind in ("json", "printed", "log"))
    arguments = [str(result) if each == "{file}" else each for each in step.arguments]
    with printed.open("wb") as output, log.open("wb") as errors:
        # With its own session, the step can be ended together with its child processes.
        process = subprocess.Popen(
            [*program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            return process.wait(step_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return TIMED_OUT
        except BaseException:
            _end(process)
            raise
        finally:
            if result.exists():
                log.write_bytes(printed.read_bytes() + log.read_bytes())
                printed.unlink()
            else:
                printed.rename(result)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group: SIGTERM first, so that shared memory is freed, then SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _pack(out: IO[bytes], place: Path, secrets: Sequence[str]) -> None:
    blots = {form: _BLOT for secret in secrets for form in _forms(secret)}
    with contextlib.suppress(RuntimeError):  # neither HOME nor an entry of this user in the passwd file
        blots |= dict.fromkeys(_forms(str(Path.home())), _HOME)
    out.truncate(0)
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for path in sorted(place.iterdir()):
            data = blotted(path.read_text(encoding="utf-8", errors="replace"), blots).encode()
            entry = tarfile.TarInfo(f"ssd-report/{path.name}")
            entry.size, entry.mtime = len(data), int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    out.flush()


def _forms(word: str) -> set[str]:
    """Return the secret and its escaped forms inside JSON."""
    return {word, json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1]}


def blotted(text: str, blots: Mapping[str, str]) -> str:
    """Replace secrets in the text, the longest first, since one may contain another."""
    for word in sorted(blots, key=len, reverse=True):
        if len(word) > 1:
            text = text.replace(word, blots[word])
    return text


def known_secrets(values: Sequence[str | None]) -> list[str]:
    """Return values of secret settings, of variables with names of secrets, and credentials in proxies' URLs.

    Short values and numbers are left out, since masking them would damage the results.
    """
    found = [value for value in values if value and len(value) >= _MIN_SECRET]
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _MIN_LIKELY_SECRET and not _is_number(value):
            found.append(value)
        if _PROXY_NAME.search(name):
            found += _credentials(value)
    return found


def _credentials(url: str) -> list[str]:
    """Return the credentials before the last @ of a URL, and the password alone."""
    credentials, at, _ = url.split("://", 1)[-1].rpartition("@")
    if not at:
        return []
    password = credentials.partition(":")[2]
    alone = {password, unquote(password)}
    return [
        credentials + at,
        *(each for each in alone if len(each) >= _MIN_SECRET and not _is_number(each)),
    ]


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
