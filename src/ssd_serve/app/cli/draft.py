"""The command `ssd draft`: a drafter by itself, for verifiers on other machines.

It is started by hand or as a service of its own, and ended by a signal.
"""

import argparse
import os
import secrets
import signal
import socket
from pathlib import Path

import setproctitle

from ssd_serve.app.cli.flags import Commands, add_settings_flags, given_flags
from ssd_serve.base.devices import Device, check_device, parse_device, pin, this_machine
from ssd_serve.base.engine_config import EngineConfig, Mode
from ssd_serve.base.errors import DeviceHangError, NoGpuError, SettingsError
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import resolve
from ssd_serve.cluster.worker import leave_worker
from ssd_serve.models.short_names import ShortNames
from ssd_serve.transport.listener import check_address


def add_draft(commands: Commands) -> None:
    """Add the parser `draft`; it sets `run`."""
    parser = commands.add_parser("draft", help="run a drafter by itself, for one server or several")
    parser.add_argument(
        "--connect",
        action="append",
        required=True,
        metavar="ADDRESS",
        help="SSD_DRAFTER_ADDRESS of a server, e.g. tcp://10.0.0.5:4711; may be given again",
    )
    parser.add_argument("--name", default="", help="unique name in logs and metrics (host and process)")
    parser.add_argument(
        "--alive-file",
        type=Path,
        metavar="FILE",
        help="file touched twice a second while a server accepts drafts, for health checks by its age",
    )
    add_settings_flags(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    config = _drafting(resolve(given_flags(args)))
    for address in args.connect:
        check_address(address, config.cluster_key or "")
    if args.alive_file is not None:
        _check_alive_file(args.alive_file)
    # In a container this is process 1, which a signal without a handler does not end.
    signal.signal(signal.SIGTERM, _leave)
    pin(parse_device(config.draft_device or "cpu"))
    from ssd_serve.drafter.process import run

    # Containers share process numbers, and with the host's network its name too.
    name = args.name or f"drafter-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    setproctitle.setproctitle(f"ssd: {name}")  # flags may hold keys
    # While servers are updated one after the other, those of another version refuse it.
    try:
        return run(config, name, args.connect, patient=True, alive_file=args.alive_file)
    except DeviceHangError as error:
        return leave_worker(name, error)


def _check_alive_file(path: Path) -> None:
    """Remove the file that an earlier drafter left. Raises `SettingsError` if it cannot be written."""
    try:
        path.touch()
        if path.stat().st_size:
            raise SettingsError(f"--alive-file: {path} holds something; name a file of its own")
        path.unlink()
    except OSError as error:
        raise SettingsError(f"--alive-file: {path} cannot be written ({error.strerror})") from None


def _drafting(settings: Settings) -> EngineConfig:
    """Configuration of this drafter: its draft models and its device."""
    if settings.drafters not in (None, 0, 1):
        raise SettingsError("`ssd draft` is one process: start it as often as there are to be drafters")
    machine = this_machine()
    if machine.trouble and settings.draft_device is None and not settings.allow_cpu:
        raise NoGpuError(f"{machine.trouble}; or let cores compute with SSD_ALLOW_CPU=1")
    device = Device("cuda", (0,)) if machine.gpus else Device("cpu", machine.cores)
    if settings.draft_device is not None:
        device = parse_device(settings.draft_device)
        check_device(device, machine, "SSD_DRAFT_DEVICE")
    names = ShortNames(settings.models_file, settings.cache_dir)
    config = settings.engine_config(
        mode=Mode.SSD,
        target=names.expand(settings.target) if "target" in settings.model_fields_set else settings.target,
        drafts=tuple(map(names.expand, settings.drafts)),
        draft_device=str(device),
        drafters=1,
    )
    return config.for_drafter(0)


def _leave(_number: int, _frame: object) -> None:
    os._exit(0)  # nothing here needs tidying up
