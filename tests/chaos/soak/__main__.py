"""The command line of `python -m tests.chaos.soak`. Everything heavy is imported when it runs."""

import argparse
import signal
import sys
from collections.abc import Sequence

from ssd_serve.app.cli.flags import add_settings_flags, settings_from
from ssd_serve.base.errors import SettingsError
from ssd_serve.base.settings import KEY_SETTINGS
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.extra import need
from ssd_serve.bench.load.commands import leave_tidily
from ssd_serve.bench.provenance import SERVER
from tests.chaos.command import experiment_parser, run_experiment

_OWN_SETTINGS = ("host", "port", "run_dir", "root_path", "tls_certificate", "tls_key", *KEY_SETTINGS)

MEASURES = ("lab/soak", *SERVER)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser(
        "soak", "mixed traffic, aborts and kills for a long time: memory, texts, what is left in the end"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long the traffic lasts (30)")
    parser.add_argument("--clients", type=int, default=8, help="requests at once (8)")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is random here (1)")
    parser.add_argument(
        "--kill",
        choices=("drafter", "verifier"),
        nargs="*",
        default=["drafter", "verifier"],
        help="whose processes are killed in the first third; all are stalled now and then (both)",
    )
    add_settings_flags(parser, leave_out=_OWN_SETTINGS)
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    """0: nothing was off; 1: something was."""
    need("python -m tests.chaos.soak", "httpx", "scipy")
    if not 0 < args.minutes < float("inf") or args.clients < 1:
        raise SettingsError("--minutes must be greater than 0, --clients at least 1")
    from tests.chaos.soak.experiment import SoakPlan, run_soak
    from tests.chaos.soak.report import soak_table

    plan = SoakPlan(args.minutes, args.clients, args.seed, tuple(args.kill))
    signal.signal(signal.SIGTERM, leave_tidily)
    result = run_soak(settings_from(args), plan, say)
    return Report(result, soak_table, 1 if result["problems"] else 0)


if __name__ == "__main__":
    sys.exit(main())
