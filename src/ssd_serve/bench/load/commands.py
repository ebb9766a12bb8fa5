"""The command line of `ssd bench load`. Parses arguments and writes files; what is heavy is imported late."""

import argparse
import signal
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ssd_serve.app.cli.flags import Commands, add_settings_flags, settings_from
from ssd_serve.base.devices import this_machine
from ssd_serve.base.engine_settings import Mode
from ssd_serve.base.errors import UserError
from ssd_serve.base.settings import KEY_SETTINGS
from ssd_serve.bench.document import say, write
from ssd_serve.bench.experiment import Report, Result, add_experiment, add_sittings, check_sittings
from ssd_serve.bench.extra import need
from ssd_serve.bench.numbers import count, count_or_zero, positive, positive_or_zero
from ssd_serve.bench.provenance import SERVER, code_here

SERVER_FLAGS = (
    *("mode", "host", "port", "run_dir", "prefix_cache", "served_model_name", "root_path", "cors_origins"),
    *("target_device_alone", "speculation_may_stop"),
    *("hf_token", "generation_config", "tls_certificate", "tls_key", *KEY_SETTINGS),
)
"""What the benchmark chooses by itself, what would hide the servers from it, and secrets."""
_LOAD = ("bench/load", *SERVER)


def add_load(commands: Commands) -> None:
    """Add the parser `load`."""
    parser = commands.add_parser(
        "load",
        help="servers under load: plain, synchronous, SSD and auto by concurrency and by rate of arrivals",
    )
    modes = [mode.value for mode in Mode]
    parser.add_argument("--modes", choices=modes, nargs="+", default=modes, help="which servers to compare")
    parser.add_argument("--ballast", action="store_true", help="the embedded pair at a larger cost")
    parser.add_argument(
        "--devices",
        choices=("same", "all", "both"),
        default="both",
        help="the same device for every target, or all devices for targets without a drafter",
    )
    parser.add_argument("--temperature", type=positive_or_zero, default=0.6)
    _add_requests(parser)
    _add_closed_loop(parser)
    _add_open_loop(parser)
    _add_trace(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the closed loop")
    add_settings_flags(parser, leave_out=SERVER_FLAGS)
    add_sittings(parser)
    add_experiment(parser, _run_load, _LOAD)


def _add_requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--prompt-tokens",
        type=count,
        nargs=2,
        default=[64, 1500],
        metavar=("FROM", "TO"),
        help="lengths of prompts, evenly on a logarithmic scale (64 1500)",
    )
    group.add_argument("--tokens", type=count, default=64, help="new tokens of each request (64)")
    group.add_argument(
        "--shared-prefixes",
        type=_share,
        default=0.25,
        metavar="SHARE",
        help="prompts that begin with one of four texts of 256 tokens (0.25); 0: no prefix cache either",
    )
    group.add_argument(
        "--ttft-limit-ms", type=positive, default=450.0, help="a good answer's time to the first token (450)"
    )
    group.add_argument(
        "--tpot-limit-ms", type=positive, default=40.0, help="a good answer's time per token after it (40)"
    )


def _add_open_loop(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("open loop: Poisson arrivals, whoever has been answered")
    group.add_argument(
        "--offered",
        type=positive,
        nargs="*",
        default=[0.5, 0.7, 0.9, 1.0, 1.2],
        metavar="SHARE",
        help="of the requests a second that the best server can do (0.5 to 1.2); none: no open loop",
    )
    group.add_argument("--open-requests", type=count, default=64, help="arrivals of a run (64)")
    group.add_argument("--open-runs", type=count, default=6, help="runs of each mode and rate (6)")


def _add_closed_loop(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("closed loop")
    group.add_argument(
        "--concurrency", type=count, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="requests at once"
    )
    group.add_argument("--pairs", type=count, default=12, help="bursts of each mode and concurrency")
    group.add_argument("--launches", type=count, default=2, help="how often the servers are started anew")
    group.add_argument(
        "--learning", type=count_or_zero, default=3, help="bursts more to warm up the modes that learn"
    )
    group.add_argument("--waves", type=count, default=2, help="requests of a burst, times concurrency")
    group.add_argument("--no-closed-loop", action="store_true", help="leave it out")
    group.add_argument(
        "--fresh",
        action="store_true",
        help="nothing is remembered from one launch to the next, and the first token counts: no warm-up",
    )
    group.add_argument(
        "--busy-core",
        type=int,
        metavar="N",
        help="keep this core busy by a process of the benchmark's own, from when the servers are up",
    )
    group.add_argument("--no-resume", action="store_true", help="leave out the check after a burst")


def _add_trace(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("replay, after the closed loop")
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.csv",
        help="arrivals: columns TIMESTAMP, ContextTokens, GeneratedTokens",
    )
    group.add_argument("--time-scale", type=positive, default=1.0, help="multiplies the times of arrival")
    group.add_argument(
        "--length-scale",
        type=positive,
        default=1.0,
        help="multiplies the lengths of prompts and answers, for models with a shorter context",
    )
    group.add_argument(
        "--trace-seconds", type=positive, default=120.0, help="arrivals after that are left out"
    )


def _run_load(args: argparse.Namespace) -> Report:
    need("ssd bench load", "httpx", "scipy", *(("matplotlib",) if args.plot else ()))
    from ssd_serve.bench.load.plan import LoadPlan
    from ssd_serve.bench.load.report import load_plot, load_tables
    from ssd_serve.bench.load.requests import Mix
    from ssd_serve.bench.load.run import run_load
    from ssd_serve.bench.load.statistics import GoodLimits
    from ssd_serve.bench.load.traffic import OpenLoop

    check_sittings(args)
    if args.no_closed_loop and not args.offered and args.trace is None:
        raise UserError("--no-closed-loop and no --offered leave nothing to do: give --trace")
    if args.busy_core is not None and args.busy_core not in this_machine().cores:
        raise UserError(f"--busy-core {args.busy_core}: this process may not use that core")
    plan = LoadPlan(
        modes=tuple(dict.fromkeys(args.modes)),
        concurrencies=() if args.no_closed_loop else tuple(sorted(set(args.concurrency))),
        pairs=args.pairs,
        launches=_launches(args),
        learning=0 if args.fresh else args.learning,
        fresh=args.fresh,
        busy_core=args.busy_core,
        waves=args.waves,
        mix=Mix(min(args.prompt_tokens), max(args.prompt_tokens), args.tokens, args.shared_prefixes),
        open_loop=OpenLoop(tuple(sorted(set(args.offered))), args.open_requests, args.open_runs),
        temperature=args.temperature,
        limits=GoodLimits(args.ttft_limit_ms, args.tpot_limit_ms),
        ballast=args.ballast,
        devices=args.devices,
        resume=not args.no_resume,
        trace=args.trace,
        time_scale=args.time_scale,
        length_scale=args.length_scale,
        trace_seconds=args.trace_seconds,
        work=args.work,
        minutes=args.minutes,
        code=code_here(_LOAD),
    )
    settings = settings_from(args)
    signal.signal(signal.SIGTERM, leave_tidily)

    def text(result: Result) -> str:
        if args.plot is not None:
            write(load_plot(result), args.plot)
        return load_tables(result)

    return Report(run_load(settings, plan, say), text)


def _launches(args: argparse.Namespace) -> int:
    """No more than there is something to do in: each launch has a part of the pairs and of the runs."""
    closed: int = 0 if args.no_closed_loop else args.pairs
    open_runs: int = args.open_runs if args.offered else 0
    wanted: int = args.launches
    return max(1, min(wanted, max(closed, open_runs)))


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("must be from 0 to 1")
    return value


def leave_tidily(_number: int, _frame: FrameType | None) -> NoReturn:
    """SIGTERM: leave through every `finally`, so that the servers go too."""
    raise SystemExit(128 + signal.SIGTERM)
