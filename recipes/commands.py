"""The command line of the recipes: `ssd recipe train-pair | ballast | evaluate-pair`.

Parses arguments and prints; everything heavy is imported when a command runs.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import TypeAlias

from ssd_serve.errors import UserError

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # pyright: ignore[reportPrivateUsage]


def add_commands(recipe: argparse.ArgumentParser) -> None:
    """Add the subcommands of `ssd recipe`; each sets `run`."""
    commands = recipe.add_subparsers(required=True, metavar="RECIPE")
    add_train_pair(commands)
    add_ballast(commands)
    add_blur(commands)
    add_evaluate_pair(commands)


def add_train_pair(commands: Commands) -> None:
    """`ssd recipe train-pair`."""
    parser = commands.add_parser(
        "train-pair", help="train target and draft on the standard library's sources"
    )
    parser.add_argument("--work", type=Path, default=Path("training"), help="folder of corpus and checkpoint")
    parser.add_argument(
        "--library", type=Path, help="folder of Python sources (default: the standard library)"
    )
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--minutes", type=float, help="wall-clock time from now (default 120)")
    end.add_argument("--until", metavar="HH:MM", help="local time at which training ends")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the checkpoint, by default to its deadline"
    )
    parser.add_argument(
        "--export-only", action="store_true", help="export the checkpoint as it is; train nothing"
    )
    parser.add_argument(
        "--target", type=Path, default=Path("pair/target"), help="where the target is exported"
    )
    parser.add_argument("--draft", type=Path, default=Path("pair/draft"), help="where the draft is exported")
    parser.add_argument("--threads", type=int, help="threads of torch (default: its own choice)")
    parser.add_argument("--figures", type=Path, help="JSON of evaluate-pair, for the model cards")
    parser.set_defaults(run=run_train_pair)


def add_ballast(commands: Commands) -> None:
    """`ssd recipe ballast`."""
    parser = commands.add_parser("ballast", help="copy a checkpoint: the same function at a larger cost")
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, help="query heads (default: as many as fill the hidden size)")
    parser.add_argument("--intermediate", type=int, help="MLP size (default: 2.75 times the hidden size)")
    parser.set_defaults(run=run_ballast)


def add_blur(commands: Commands) -> None:
    """`ssd recipe blur`."""
    parser = commands.add_parser("blur", help="copy a checkpoint with noise: a draft as good as wanted")
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--noise", type=float, default=0.1, help="relative to each matrix's deviation")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run_blur)


def add_evaluate_pair(commands: Commands) -> None:
    """`ssd recipe evaluate-pair`."""
    parser = commands.add_parser(
        "evaluate-pair", help="held-out loss, agreement and sampled functions, as JSON"
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument(
        "--library", type=Path, help="folder of Python sources (default: the standard library)"
    )
    parser.add_argument("--samples", type=int, default=100, help="functions to sample; 0 samples none")
    parser.add_argument(
        "--sample-temperatures",
        type=sample_temperature,
        nargs="+",
        metavar="T",
        help="temperatures of sampling, all of them reported (default: 0.2 0.4 0.6 0.8 1)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the JSON to this file")
    parser.set_defaults(run=run_evaluate_pair)


def sample_temperature(text: str) -> float:
    """A finite temperature above 0: at 0 all samples would be the same."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"a temperature of sampling must be above 0, not {text}")
    return value


def run_train_pair(args: argparse.Namespace) -> int:
    """Train, or resume, and export."""
    import torch

    from ssd_serve.recipes.corpus import standard_library
    from ssd_serve.recipes.export import export_pair
    from ssd_serve.recipes.optimiser import Schedule
    from ssd_serve.recipes.training import Recipe, Training, run, stored_schedule
    from ssd_serve.recipes.workspace import Workspace

    workspace = Workspace(args.work)
    if (args.resume or args.export_only) and not workspace.checkpoint.is_file():
        raise UserError(f"There is no checkpoint in {args.work}; train first.")
    if not args.export_only:
        if args.threads:
            torch.set_num_threads(args.threads)
        recipe = Recipe()
        workspace.prepare(args.library or standard_library(), recipe.target.vocabulary, recipe.target.context)
        now = time.time()
        schedule = Schedule(now, deadline(now, args.minutes, args.until))
        if args.resume:
            stored = stored_schedule(workspace)
            chosen = args.minutes is not None or args.until is not None
            schedule = Schedule(stored.start, schedule.deadline) if chosen else stored
        training = Training(recipe, workspace, schedule)
        if args.resume:
            training.load()
        run(training, say=lambda line: print(line, flush=True))
    figures = json.loads(args.figures.read_text(encoding="utf-8")) if args.figures else None
    export_pair(workspace, args.target, args.draft, figures)
    print(f"exported {args.target} and {args.draft}")
    return 0


def deadline(now: float, minutes: float | None, until: str | None) -> float:
    """The end of a training in seconds since the epoch.

    `until` is a local time of day, the next after `now`.
    """
    if until is None:
        return now + 60.0 * (120.0 if minutes is None else minutes)
    try:
        clock = time.strptime(until, "%H:%M")
    except ValueError as error:
        raise UserError(f"--until must be a time as HH:MM, not {until!r}.") from error
    today = time.localtime(now)
    end = time.mktime((*today[:3], clock.tm_hour, clock.tm_min, 0, *today[6:]))
    return end if end > now else end + 86_400.0


def run_blur(args: argparse.Namespace) -> int:
    """Write the noisy copy."""
    from ssd_serve.recipes.blur import blur

    blur(args.source, args.destination, args.noise, args.seed)
    return 0


def run_ballast(args: argparse.Namespace) -> int:
    """Write the enlarged copy."""
    from ssd_serve.recipes.ballast import add_ballast as write_ballast

    sizes = write_ballast(
        args.source, args.destination, args.hidden, args.layers, args.heads, args.intermediate
    )
    print(
        f"wrote {args.destination}: hidden {sizes.hidden}, {sizes.layers} layers, {sizes.heads} heads "
        f"({sizes.kv_heads} KV), MLP {sizes.intermediate}"
    )
    return 0


def run_evaluate_pair(args: argparse.Namespace) -> int:
    """Measure and print."""
    from ssd_serve.recipes.corpus import standard_library
    from ssd_serve.recipes.evaluation import evaluate_pair
    from ssd_serve.recipes.functions import TEMPERATURES

    figures = evaluate_pair(
        args.target,
        args.draft,
        args.library or standard_library(),
        args.samples,
        args.seed,
        args.sample_temperatures or TEMPERATURES,
    )
    text = json.dumps(figures, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0
