"""The command line of the benchmarks: `ssd bench modes | load | serve | ssd-table | peers | kernels |
conformance | lossless | quality | check | report`.

Parses arguments, prints tables and writes result files; everything heavy is imported when a command runs.
"""

import argparse
import os
from pathlib import Path

from ssd_serve.app.cli.flags import Commands, add_settings_flags
from ssd_serve.base.devices import this_machine
from ssd_serve.base.engine_settings import EMBEDDED
from ssd_serve.base.errors import SettingsError
from ssd_serve.bench.check.commands import add_check
from ssd_serve.bench.devices import add_device_flags, chosen_devices
from ssd_serve.bench.document import read_json, replace_block, say, write
from ssd_serve.bench.experiment import Report, add_experiment, add_sittings, check_sittings
from ssd_serve.bench.extra import need
from ssd_serve.bench.kernels.commands import add_kernels
from ssd_serve.bench.load.commands import add_load
from ssd_serve.bench.load.serve_commands import add_serve
from ssd_serve.bench.lossless.commands import add_lossless
from ssd_serve.bench.pair_flags import add_pair, add_prompts, pair_settings
from ssd_serve.bench.peers.commands import add_peers
from ssd_serve.bench.provenance import ENGINE, code_here
from ssd_serve.bench.quality.commands import add_quality
from ssd_serve.bench.ssd_table.commands import add_ssd_table
from ssd_serve.cluster.process import worker_environment

_SETTINGS = ("real", "emulated", "both")
_MODES_FILES = ("modes", "mode_settings", "stage", "kept_stage", "one_call", "rotation", "statistics")
_MODES = (*(f"bench/{name}.py" for name in _MODES_FILES), *ENGINE)
"""Paths of what `modes` measures."""
_DEVICES = ("target_device", "target_device_alone", "draft_device")


def add_commands(bench: argparse.ArgumentParser) -> None:
    """Add the subcommands of `ssd bench`; each sets `run`."""
    commands = bench.add_subparsers(required=True, metavar="BENCH")
    _add_modes(commands)
    add_load(commands)
    add_serve(commands)
    add_ssd_table(commands)
    add_peers(commands)
    add_kernels(commands)
    add_lossless(commands)
    add_quality(commands)
    add_check(commands)
    _add_report(commands)


def _add_modes(commands: Commands) -> None:
    parser = commands.add_parser(
        "modes", help="plain, n-gram lookup, synchronous chain and tree, and SSD, interleaved"
    )
    parser.add_argument(
        "--setting",
        choices=_SETTINGS,
        help="real devices, emulated ones, or both (real; of the embedded pair on cores both)",
    )
    add_pair(parser)
    add_prompts(parser)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--num-prompts", type=int, default=64, help="prompts of each way (64)")
    parser.add_argument("--table", default="mi300x-70b-1b", help="device table of the emulated setting")
    add_device_flags(parser)
    add_settings_flags(parser, leave_out=(*_DEVICES, "target", "draft"))
    add_sittings(parser)
    add_experiment(parser, _run_modes, _MODES)


def _run_modes(args: argparse.Namespace) -> Report:
    os.environ.update(worker_environment())  # this process plays the verifier; torch is not imported yet
    from ssd_serve.bench.mode_settings import ModesPlan, run_settings
    from ssd_serve.bench.own_pair import check_in_process
    from ssd_serve.bench.stage import CORES

    check_sittings(args)
    need("ssd bench modes", "scipy")
    settings = pair_settings(args)
    check_in_process(settings)
    devices = chosen_devices(args.device, args.draft_device, this_machine(), CORES)
    embedded = settings.target == EMBEDDED
    setting = args.setting or ("both" if embedded and not devices.on_gpu else "real")
    if devices.on_gpu and setting != "real":
        raise SettingsError(f"--setting {setting}: devices are emulated on CPUs; use --setting real on a GPU")
    plan = ModesPlan(
        settings=("real", "emulated") if setting == "both" else (setting,),
        temperatures=args.temperatures,
        prompts=args.num_prompts,
        table=args.table,
        devices=devices,
        file=args.prompts,
        chat=args.chat,
        work=args.work,
        minutes=args.minutes,
        code=code_here(_MODES),
    )
    result = run_settings(settings, plan, say)
    from ssd_serve.bench.modes_result import modes_tables

    return Report(result, modes_tables if args.json else None)


def _add_report(commands: Commands) -> None:
    parser = commands.add_parser("report", help="a result of modes, load or peers as Markdown tables")
    parser.add_argument("file", type=Path, help="the JSON that one of them wrote")
    parser.add_argument("--readme", type=Path, help="put the tables into this document, between its markers")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw load or peers")
    parser.set_defaults(run=_run_report)


def _run_report(args: argparse.Namespace) -> int:
    from ssd_serve.bench.blocks import block_name, block_text, chart

    result = read_json(args.file, "ssd bench")
    if args.plot is not None:
        need("--plot", "matplotlib")
        write(chart(result), args.plot)
    if args.readme is None:
        print(block_text(result, args.file, Path.cwd()))
    else:
        replace_block(args.readme, block_name(result), block_text(result, args.file, args.readme.parent))
    return 0
