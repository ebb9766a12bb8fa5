"""The command lines of `ssd doctor` and `ssd report`. Everything heavy is imported when it runs."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ssd_serve.app.cli.flags import Commands, add_settings_flags, given_config, given_flags
from ssd_serve.base.devices import check_device, parse_device, this_machine
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.settings_sources import resolve
from ssd_serve.cluster.process import worker_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ssd_serve.app.doctor.checks import Check

UNFIT = 1
"""Exit code where the server, as it is set, cannot serve on this machine."""


def add_doctor(commands: Commands) -> None:
    """Add the parser `doctor`; it sets `run`."""
    parser = commands.add_parser("doctor", help="check what the server can use of this machine")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    add_settings_flags(parser, others=True)
    parser.set_defaults(run=_run)


def add_report(commands: Commands) -> None:
    """Add the parser `report`; it sets `run`."""
    parser = commands.add_parser("report", help="checks and benchmarks in one archive, for a bug report")
    parser.add_argument("--out", type=Path, default=Path("ssd-report.tar.gz"), help="the archive")
    parser.add_argument("--device", default="", help="cpu or cuda:0 (the GPU where there is one)")
    parser.add_argument("--quick", action="store_true", help="without the table of modes")
    parser.set_defaults(run=_run_report)


def _run_report(args: argparse.Namespace) -> int:
    """0 when every step ended well."""
    from ssd_serve.app.doctor.bug_report import known_secrets, steps, write_report

    if args.out.is_dir():
        raise SettingsError(f"{args.out} is a folder; name a file with --out")
    settings = resolve({})
    machine = this_machine()
    device = args.device or ("cuda:0" if machine.gpus else "cpu")
    check_device(parse_device(device), machine, "--device")
    secrets = known_secrets([settings.api_key, settings.metrics_key, settings.cluster_key, settings.hf_token])
    codes = write_report(args.out, steps(device, quick=args.quick), secrets, _say)
    print(f"{args.out}: attach it to your report")
    return UNFIT if any(codes.values()) else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(args: argparse.Namespace) -> int:
    settings = resolve(given_flags(args), config=given_config(args))
    os.environ.update(worker_environment())  # torch is not imported yet
    from ssd_serve.app.doctor.checks import State, examine

    checks = examine(settings, lambda text: _say(f"{text}..."))
    print(as_json(checks) if args.json else as_table(checks))
    return UNFIT if any(check.state is State.PROBLEM for check in checks) else 0


def as_json(checks: "Sequence[Check]") -> str:
    """A list of objects."""
    rows = [
        {"check": each.name, "state": each.state.value, "found": each.found, "advice": each.advice}
        for each in checks
    ]
    return json.dumps(rows, indent=2)


def as_table(checks: "Sequence[Check]") -> str:
    """A line for each check, and what to do below those that need it."""
    width = max(len(each.name) for each in checks)
    lines: list[str] = []
    for each in checks:
        lines.append(f"{each.name:<{width}}  {each.state.value:<7}  {each.found}")
        if each.advice:
            lines.append(f"{'':<{width}}           {each.advice}")
    return "\n".join(lines)
