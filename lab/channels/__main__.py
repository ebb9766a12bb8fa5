"""The command line of `python -m lab.channels`. Everything heavy is imported when it runs."""

import argparse
import sys
from collections.abc import Sequence

from lab.command import experiment_parser, run_experiment
from ssd_serve.bench.document import say
from ssd_serve.bench.experiment import Report
from ssd_serve.cli.flags import add_settings_flags, settings_from

MEASURES = ("lab/channels", "cluster", "src/ssd_serve/messages.py", "src/ssd_serve/draft_messages.py")
OF_FEATURES = (*MEASURES, "verifier/features.py", "verifier/drafts", "drafter/verifier_connection.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    parser = experiment_parser(
        "channels", "a message there and back over sockets and through Ray; starts of both launchers"
    )
    parser.add_argument("--messages", type=int, default=2000, help="of each kind (2000)")
    parser.add_argument("--starts", type=int, default=3, help="of each launcher (3)")
    parser.add_argument(
        "--features",
        action="store_true",
        help="what the target's features cost on their way to a drafter, only",
    )
    add_settings_flags(parser)
    words = sys.argv[1:] if argv is None else argv
    return run_experiment(parser, _run, OF_FEATURES if "--features" in words else MEASURES, argv)


def _run(args: argparse.Namespace) -> Report:
    if args.features:
        from lab.channels.feature_report import feature_table
        from lab.channels.features import FeaturePlan, measured_features

        return Report(measured_features(FeaturePlan()), feature_table)
    from lab.channels.experiment import ChannelsPlan, run_channels, table

    plan = ChannelsPlan(max(1, args.messages), max(1, args.starts))
    result = run_channels(settings_from(args), plan, say)
    return Report(result, table)


if __name__ == "__main__":
    sys.exit(main())
