"""The command line of the recipes: `ssd recipe train-pair | ballast | blur | evaluate-pair`, and those that
make drafts.

Parses arguments and prints; everything heavy is imported when a command runs.
"""

import argparse
import json
from pathlib import Path

from ssd_serve.app.cli.flags import Commands
from ssd_serve.base.errors import UserError
from ssd_serve.recipes.arguments import above_zero, positive, read_figures
from ssd_serve.recipes.draft_commands import add_distil, add_eagle3


def add_commands(recipe: argparse.ArgumentParser) -> None:
    """Add the subcommands of `ssd recipe`; each sets `run`."""
    commands = recipe.add_subparsers(required=True, metavar="RECIPE")
    add_train_pair(commands)
    add_eagle3(commands)
    add_distil(commands)
    add_ballast(commands)
    add_blur(commands)
    add_evaluate_pair(commands)


def add_train_pair(commands: Commands) -> None:
    """`ssd recipe train-pair`."""
    parser = commands.add_parser(
        "train-pair",
        help="train target and draft on Python sources, or go on with a training that was stopped",
    )
    parser.add_argument(
        "--work", type=Path, default=Path("training"), help="folder of corpus and checkpoints"
    )
    parser.add_argument(
        "--library", type=Path, help="folder of Python sources (default: the standard library)"
    )
    parser.add_argument(
        "--packages",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also the installed packages under permissive licences (default: yes)",
    )
    parser.add_argument("--tokens", type=positive, help="that the target sees in all")
    parser.add_argument("--draft-tokens", type=positive, help="that the draft sees in all, after the target")
    parser.add_argument(
        "--start",
        type=Path,
        nargs=2,
        metavar=("TARGET", "DRAFT"),
        help="begin with the weights and the tokenizer of this pair",
    )
    parser.add_argument("--export-only", action="store_true", help="export the checkpoints; train nothing")
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
    parser.add_argument("source", type=Path, help="a Llama checkpoint, or an EAGLE head of one")
    parser.add_argument("destination", type=Path)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, help="of the copy (16); an EAGLE head has one")
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
        type=above_zero,
        nargs="+",
        metavar="T",
        help="temperatures of sampling, all of them reported (default: 0.2 0.4 0.6 0.8 1)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the JSON to this file")
    parser.set_defaults(run=run_evaluate_pair)


def run_train_pair(args: argparse.Namespace) -> int:
    """Train and export."""
    import torch

    from ssd_serve.recipes.corpus import standard_library
    from ssd_serve.recipes.export import export_pair
    from ssd_serve.recipes.packages import permissive_packages
    from ssd_serve.recipes.pair import PairRecipe, train_pair
    from ssd_serve.recipes.tokenizer import load_tokenizer
    from ssd_serve.recipes.workspace import Workspace

    workspace = Workspace(args.work)
    if args.export_only and not workspace.checkpoint("draft").is_file():
        raise UserError(f"There is no trained pair in {args.work}: run it without --export-only first.")
    if not args.export_only:
        if args.threads:
            torch.set_num_threads(args.threads)
        start = None if args.start is None else (args.start[0], args.start[1])
        recipe = PairRecipe(start=start)
        recipe = recipe.of_tokens(
            args.tokens or recipe.target.tokens, args.draft_tokens or recipe.draft.tokens
        )
        shape = recipe.target.shape
        workspace.prepare(
            args.library or standard_library(),
            shape.vocabulary,
            shape.context,
            permissive_packages() if args.packages else (),
            None if start is None else load_tokenizer(start[0]),
        )
        train_pair(recipe, workspace, say=lambda line: print(line, flush=True))
    export_pair(workspace, args.target, args.draft, read_figures(args.figures) or None)
    print(f"exported {args.target} and {args.draft}")
    return 0


def run_blur(args: argparse.Namespace) -> int:
    """Write the noisy copy."""
    from ssd_serve.recipes.blur import blur

    blur(args.source, args.destination, args.noise, args.seed)
    return 0


def run_ballast(args: argparse.Namespace) -> int:
    """Write the enlarged copy."""
    from ssd_serve.recipes.ballast import add_ballast as write_ballast
    from ssd_serve.recipes.head_ballast import add_head_ballast, is_head

    if is_head(args.source):
        if args.layers not in (None, 1):
            raise UserError("An EAGLE head has one layer: leave --layers out.")
        sizes = add_head_ballast(args.source, args.destination, args.hidden, args.heads, args.intermediate)
    else:
        sizes = write_ballast(
            args.source, args.destination, args.hidden, args.layers or 16, args.heads, args.intermediate
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
