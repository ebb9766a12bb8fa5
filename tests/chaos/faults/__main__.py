"""The command line of `python -m tests.chaos.faults`. Heavy imports come when it runs."""

import argparse
import sys
from collections.abc import Sequence

from ssd_serve.app.cli.flags import add_settings_flags, settings_from
from ssd_serve.base.settings import KEY_SETTINGS
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report
from ssd_serve.bench.extra import need
from ssd_serve.bench.provenance import SERVER
from tests.chaos.command import experiment_parser, run_experiment

_OWN_SETTINGS = (
    *(
        "mode",
        "speculation_may_stop",
        "host",
        "port",
        "run_dir",
        "drain_seconds",
        "tensor_parallel",
        "launcher",
        "ray_address",
    ),
    *("served_model_name", "root_path", "cors_origins", "hf_token", "tls_certificate", "tls_key"),
    *KEY_SETTINGS,
)

MEASURES = ("lab/faults", *SERVER)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser(
        "faults", "processes that die or hang, lost messages, stuck clients: what clients see of it"
    )
    parser.add_argument("--requests", type=int, default=8, help="streams that run when a fault strikes (8)")
    parser.add_argument("--tokens", type=int, default=1280, help="tokens of each (1280)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="faults whose names hold it")
    parser.add_argument("--ray", action="store_true", help="also lose a node of a simulated Ray cluster")
    add_settings_flags(parser, leave_out=_OWN_SETTINGS)
    return run_experiment(parser, _run, MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    """0: no token was lost or wrong; 1: some were."""
    need("python -m tests.chaos.faults", "httpx")
    from tests.chaos.faults.experiment import FaultsPlan, run_faults
    from tests.chaos.faults.report import harmless, table

    plan = FaultsPlan(args.requests, args.tokens, tuple(args.only), args.ray)
    result = run_faults(settings_from(args), plan, say)
    return Report(result, table, 0 if harmless(result) else 1)


if __name__ == "__main__":
    sys.exit(main())
