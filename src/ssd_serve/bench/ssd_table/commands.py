"""The command line of `ssd bench ssd-table`. What is heavy is imported late."""

import argparse
import signal
import tempfile
from pathlib import Path

from ssd_serve.app.cli.flags import Commands, add_settings_flags
from ssd_serve.base.devices import this_machine
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report, add_experiment
from ssd_serve.bench.extra import need
from ssd_serve.bench.load.commands import SERVER_FLAGS, leave_tidily
from ssd_serve.bench.numbers import count, positive_or_zero
from ssd_serve.bench.pair_flags import add_pair, add_prompts, pair_settings
from ssd_serve.bench.provenance import SERVER

_MEASURES = ("bench/ssd_table", "bench/load/client.py", "bench/load/servers.py", *SERVER)


def add_ssd_table(commands: Commands) -> None:
    """Add the parser `ssd-table`."""
    parser = commands.add_parser(
        "ssd-table", help="plain, synchronous and SSD servers of a pair by ranks, beside what was published"
    )
    add_pair(parser)
    parser.add_argument(
        "--ranks", type=count, nargs="+", default=[1, 2, 4], help="ranks of the target (1 2 4)"
    )
    add_prompts(parser)
    parser.add_argument("--num-prompts", type=count, default=16, help="prompts (16)")
    parser.add_argument("--tokens", type=count, default=512, help="new tokens of each at most (512)")
    parser.add_argument("--ignore-eos", action="store_true", help="never fewer either")
    parser.add_argument("--temperature", type=positive_or_zero, default=0.0, help="(0, as published)")
    parser.add_argument("--launches", type=count, default=2, help="starts of every server (2)")
    add_settings_flags(parser, leave_out=(*SERVER_FLAGS, "tensor_parallel", "target", "draft"))
    add_experiment(parser, _run, _MEASURES)


def _run(args: argparse.Namespace) -> Report:
    need("ssd bench ssd-table", "httpx", "scipy")
    from ssd_serve.bench.own_pair import prompts_of
    from ssd_serve.bench.ssd_table.measurement import TablePlan, run_table
    from ssd_serve.bench.ssd_table.report import ssd_tables

    settings = pair_settings(args)
    prompts = prompts_of(settings, args.prompts, args.num_prompts, args.tokens, args.chat)
    plan = TablePlan(
        ranks=tuple(sorted(set(args.ranks))),
        prompts=tuple(prompts),
        tokens=args.tokens,
        temperature=args.temperature,
        launches=args.launches,
        exact=args.ignore_eos,
    )
    signal.signal(signal.SIGTERM, leave_tidily)
    with tempfile.TemporaryDirectory(prefix="ssd-table-") as folder:
        return Report(run_table(settings, plan, this_machine(), Path(folder), say), ssd_tables)
