"""The command line of the recipes that make drafts for a person's own target: `ssd recipe eagle3 | distil`.

Parses arguments and prints; everything heavy is imported when a command runs.
"""

import argparse
from pathlib import Path

from ssd_serve.app.cli.flags import Commands
from ssd_serve.base.errors import UserError
from ssd_serve.base.settings import Settings
from ssd_serve.recipes.arguments import above_zero, positive, read_figures

_CONTEXT = 2048


def add_eagle3(commands: Commands) -> None:
    """`ssd recipe eagle3`."""
    parser = commands.add_parser(
        "eagle3", help="train an EAGLE-3 head for a target, or go on with a training"
    )
    parser.add_argument("target", type=Path, help="a model that the server can load")
    parser.add_argument(
        "--work", type=Path, default=Path("training"), help="folder of corpus and checkpoints"
    )
    parser.add_argument(
        "--library", type=Path, help="folder of Python sources (default: the standard library)"
    )
    parser.add_argument(
        "--text", type=Path, nargs="+", help="files of any text, or folders of them, instead of a library"
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", required=True, help="of the target, whose outputs it reads, from 0"
    )
    parser.add_argument("--proposed", type=positive, default=2048, help="of the most frequent tokens (2048)")
    parser.add_argument("--steps", type=positive, default=4, help="in which it reads its own words (4)")
    parser.add_argument("--tokens", type=positive, default=12_000_000, help="that it sees in all")
    parser.add_argument("--length", type=positive, default=384, help="tokens of a text that it sees (384)")
    parser.add_argument("--rows", type=positive, default=16, help="texts in one step (16)")
    parser.add_argument("--head", type=Path, default=Path("head"), help="where the head is exported")
    parser.add_argument("--device", default="cpu", help="where target and head are: cpu (default), cuda:0")
    parser.add_argument("--figures", type=Path, help="JSON object of figures by name, for the model card")
    add_speed(parser)
    parser.set_defaults(run=run_eagle3)


def add_distil(commands: Commands) -> None:
    """`ssd recipe distil`."""
    parser = commands.add_parser(
        "distil", help="teach a Llama draft of yours what your target says of your texts, or go on with it"
    )
    parser.add_argument("target", type=Path, help="a model that the server can load")
    parser.add_argument("draft", type=Path, help="a Llama checkpoint with the same tokenizer; stays as it is")
    parser.add_argument(
        "texts", type=Path, nargs="+", metavar="TEXT", help="files of text, or folders of them"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("distilling"), help="folder of the texts' tokens and the checkpoint"
    )
    parser.add_argument("--out", type=Path, default=Path("distilled"), help="where the new draft is written")
    parser.add_argument("--tokens", type=positive, default=2_000_000, help="that it sees in all (2,000,000)")
    parser.add_argument("--length", type=positive, default=512, help="tokens of a text that it sees (512)")
    parser.add_argument("--rows", type=positive, default=8, help="texts in one step (8)")
    parser.add_argument("--rate", type=above_zero, default=1.0, help="times the usual learning rates (1)")
    parser.add_argument("--device", default="cpu", help="where both models are: cpu (default), cuda:0")
    add_speed(parser)
    parser.set_defaults(run=run_distil)


def add_speed(parser: argparse.ArgumentParser) -> None:
    """What changes how long a training takes, and nothing else."""
    parser.add_argument("--threads", type=int, help="threads of torch (default: its own choice)")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile a step first, which takes a minute or more (default: yes)",
    )


def run_eagle3(args: argparse.Namespace) -> int:
    """Train and export."""
    from ssd_serve.kernels.native.library import native_library
    from ssd_serve.models.config import model_name
    from ssd_serve.recipes.corpus import standard_library
    from ssd_serve.recipes.head_export import HeadStory, export_head
    from ssd_serve.recipes.head_training import HeadRecipe, train_head
    from ssd_serve.recipes.processes import joined_processes
    from ssd_serve.recipes.tokenizer import load_tokenizer
    from ssd_serve.recipes.workspace import Workspace

    _set_threads(args.threads)
    _refuse_to_replace(args.head, "--head", args.target)
    workspace, tokenizer = Workspace(args.work), load_tokenizer(args.target)
    recipe = HeadRecipe(
        layers=tuple(args.layers),
        proposed=args.proposed,
        steps=args.steps,
        tokens=args.tokens,
        rows=args.rows,
        length=args.length,
        compiled=args.compile,
    )
    with joined_processes(args.device) as (process, device):
        with process.first_of_all():
            if args.text:
                workspace.prepare_texts(args.text, tokenizer, recipe.least)
            else:
                entries = tokenizer.get_vocab_size()
                workspace.prepare(args.library or standard_library(), entries, _CONTEXT, (), tokenizer)
        training = train_head(
            recipe,
            workspace,
            args.target,
            say=_say if process.first else _say_nothing,
            device=device,
            native=native_library(Settings().engine_config()),
            process=process,
        )
    if not process.first:
        return 0
    story = HeadStory(
        target=model_name(args.target),
        summary=workspace.summary(),
        step=training.step,
        tokens=training.tokens,
        of_tokens=args.tokens,
        worked_seconds=training.worked,
        history=training.history,
        figures=read_figures(args.figures),
    )
    export_head(training.model, recipe, args.head, story)
    print(f"exported {args.head}")
    return 0


def run_distil(args: argparse.Namespace) -> int:
    """Train and export."""
    from ssd_serve.kernels.native.library import native_library
    from ssd_serve.models.config import model_name
    from ssd_serve.recipes.distil import DistilRecipe, check_tokenizers, distil, export_distilled
    from ssd_serve.recipes.processes import joined_processes
    from ssd_serve.recipes.tokenizer import load_tokenizer
    from ssd_serve.recipes.workspace import Workspace

    _set_threads(args.threads)
    _refuse_to_replace(args.out, "--out", args.target, args.draft)
    recipe = DistilRecipe(
        tokens=args.tokens, rows=args.rows, length=args.length, rate=args.rate, compiled=args.compile
    )
    check_tokenizers(args.target, args.draft)
    workspace = Workspace(args.work)
    with joined_processes(args.device) as (process, device):
        with process.first_of_all():
            workspace.prepare_texts(args.texts, load_tokenizer(args.draft), recipe.least)
        distilled = distil(
            recipe,
            workspace,
            args.target,
            args.draft,
            say=_say if process.first else _say_nothing,
            device=device,
            native=native_library(Settings().engine_config()),
            process=process,
        )
    if process.first:
        texts = [path.name for path in args.texts]
        export_distilled(distilled, model_name(args.target), args.draft, texts, args.out)
        print(f"exported {args.out}")
    return 0


def _refuse_to_replace(written: Path, option: str, *read: Path) -> None:
    if written.resolve() in [each.resolve() for each in read]:
        raise UserError(f"{written} is read: choose another folder for {option}.")


def _set_threads(count: int | None) -> None:
    import torch

    if count:
        torch.set_num_threads(count)


def _say(line: str) -> None:
    print(line, flush=True)


def _say_nothing(_line: str) -> None:
    """What the other processes of a training say."""
