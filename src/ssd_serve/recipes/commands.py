"""The command line `ssd recipe`: heads of five families, distil, pard, ballast. Heavy modules are imported when a
command runs."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from ssd_serve.app.cli.flags import Commands
from ssd_serve.base.errors import UserError
from ssd_serve.base.settings import Settings

if TYPE_CHECKING:
    from ssd_serve.kernels.native.library import NativeLibrary


def add_commands(recipe: argparse.ArgumentParser) -> None:
    """Add the subcommands of `ssd recipe`; each sets `run`."""
    commands = recipe.add_subparsers(required=True, metavar="RECIPE")
    for family in _FAMILIES:
        _add_head(commands, family)
    _add_distil(commands)
    _add_pard(commands)
    _add_ballast(commands)


_LAYERS = "target layers whose outputs are read, from 0"
_FAMILIES: dict[str, tuple[str, str, int, int, str]] = {
    "eagle3": ("an EAGLE-3 head", "steps", 4, 0, "steps of the training-time test"),
    "dflash": ("a DFlash head", "block", 8, -1, "tokens of a block, the known one included"),
    "medusa": ("Medusa heads", "heads", 4, 0, "heads, of a token each"),
    "hydra": ("Hydra heads", "heads", 4, 0, "heads, of a token each"),
    "gumiho": ("a Gumiho head", "heads", 5, 2, "parallel heads, after two serial tokens"),
}
"""Families of heads: what is trained, and the option for how many tokens it guesses: its name, default, how many
more those are, and meaning."""
_BLOCKS = {
    "depth": (3, "layers of the head"),
    "anchors": (128, "blocks of a window"),
    "gap": (0, "most places before a block that features are hidden of, in a quarter of the blocks"),
    "given": (0, "most masks that the text's tokens replace, in a quarter of the blocks"),
}
"""Further options of DFlash."""


def _add_head(commands: Commands, family: str) -> None:
    what, guessed, usual, _, use = _FAMILIES[family]
    parser = commands.add_parser(family, help=f"train {what} for a target, or resume a training")
    parser.add_argument("target", help="a model that the server can load")
    parser.add_argument(
        "--work", type=Path, default=Path("training"), help="folder of corpus and checkpoints"
    )
    parser.add_argument(
        "--text", type=Path, nargs="+", help="files of text, or folders (default: Python's standard library)"
    )
    parser.add_argument(
        "--chats", type=Path, nargs="+", help="JSON lines with the target's own answers, instead of texts"
    )
    if family == "eagle3":
        parser.add_argument("--layers", type=int, nargs="+", required=True, help=_LAYERS)
    elif family == "dflash":
        parser.add_argument("--layers", type=int, nargs="+", help=f"{_LAYERS} (default: five, evenly spread)")
    for name, (default, meaning) in {guessed: (usual, use), **_more(family)}.items():
        least = positive if default else _from_zero
        parser.add_argument(f"--{name}", type=least, default=default, help=f"{meaning} ({default})")
    parser.add_argument(
        "--proposed", type=positive, default=2048, help="most frequent tokens that it can propose (2048)"
    )
    _add_sizes(parser, tokens=12_000_000, length=384, rows=16)
    parser.add_argument("--head", type=Path, default=Path("head"), help="where the head is exported")
    _add_training(parser)
    parser.set_defaults(run=run_head, family=family)


def _more(family: str) -> dict[str, tuple[int, str]]:
    return _BLOCKS if family == "dflash" else {}


def _add_distil(commands: Commands) -> None:
    parser = commands.add_parser(
        "distil", help="train a Llama draft of yours on your target's output for your texts, or resume"
    )
    parser.add_argument("target", type=Path, help="a model that the server can load")
    parser.add_argument("draft", type=Path, help="a Llama checkpoint with the same tokenizer; not changed")
    parser.add_argument(
        "texts", type=Path, nargs="+", metavar="TEXT", help="files of text, or folders of them"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("distilling"), help="folder of the texts' tokens and the checkpoint"
    )
    parser.add_argument("--out", type=Path, default=Path("distilled"), help="where the new draft is written")
    _add_sizes(parser, tokens=2_000_000, length=512, rows=8)
    _add_training(parser)
    parser.set_defaults(run=run_distil)


def _add_pard(commands: Commands) -> None:
    parser = commands.add_parser(
        "pard", help="adapt a Llama draft to guess several tokens at once on your target's answers, or resume"
    )
    parser.add_argument("target", help="a model that the server can load")
    draft = parser.add_mutually_exclusive_group(required=True)
    draft.add_argument("--draft", type=Path, help="a Llama checkpoint with the same tokenizer; not changed")
    draft.add_argument("--layers", type=int, nargs="+", help="target layers that the draft begins as, from 0")
    parser.add_argument(
        "--chats", type=Path, nargs="+", required=True, help="JSON lines with the target's own answers"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("adapting"), help="folder of the texts' tokens and the checkpoint"
    )
    parser.add_argument("--out", type=Path, default=Path("pard"), help="where the new draft is written")
    parser.add_argument("--positions", type=positive, default=8, help="tokens that a forward guesses (8)")
    parser.add_argument("--mask", type=int, help="token of the masks (default: the last that no answer has)")
    _add_sizes(parser, tokens=2_000_000, length=512, rows=8)
    _add_device(parser)
    parser.set_defaults(run=run_pard)


def _add_sizes(parser: argparse.ArgumentParser, tokens: int, length: int, rows: int) -> None:
    parser.add_argument("--tokens", type=positive, default=tokens, help=f"tokens to train on ({tokens:,})")
    parser.add_argument("--length", type=positive, default=length, help=f"tokens of a window ({length})")
    parser.add_argument("--rows", type=positive, default=rows, help=f"windows of a step ({rows})")
    parser.add_argument("--rate", type=_above_zero, default=1.0, help="factor on the learning rates (1)")


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="device of both models: cpu (default), cuda:0")
    parser.add_argument("--threads", type=positive, help="threads of torch (default: its own choice)")


def _add_training(parser: argparse.ArgumentParser) -> None:
    _add_device(parser)
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile a step first, which takes a minute or more (default: yes)",
    )


def _add_ballast(commands: Commands) -> None:
    parser = commands.add_parser("ballast", help="copy a checkpoint: the same function at a larger cost")
    parser.add_argument("source", type=Path, help="a Llama or Mistral checkpoint")
    parser.add_argument("destination", type=Path)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16, help="layers of the copy (16)")
    parser.add_argument("--heads", type=int, help="query heads (default: as many as fill the hidden size)")
    parser.add_argument("--intermediate", type=int, help="MLP size (default: 2.75 times the hidden size)")
    parser.set_defaults(run=run_ballast)


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def _from_zero(text: str) -> int:
    return positive(text) if int(text) else 0


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def run_head(args: argparse.Namespace) -> int:
    """Train and export a head."""
    from ssd_serve.models.architectures.registry import load_description
    from ssd_serve.models.hub import find_model
    from ssd_serve.models.text.tokenizer import Tokenizer
    from ssd_serve.recipes import data
    from ssd_serve.recipes.chats import prepare_chats, read_conversations
    from ssd_serve.recipes.dflash import BlockRecipe, spread_layers
    from ssd_serve.recipes.eagle3 import EagleRecipe
    from ssd_serve.recipes.gumiho import GumihoRecipe
    from ssd_serve.recipes.heads import HeadRecipe, export_head, train_head
    from ssd_serve.recipes.medusa import HydraRecipe, MedusaRecipe

    target = find_model(Settings().engine_config(), args.target, "target", _say)
    _refuse_to_replace(args.head, "--head", target)
    _, guessed, _, more, _ = _FAMILIES[args.family]
    sizes = {name: getattr(args, name) for name in _more(args.family)}
    if args.family in ("eagle3", "dflash"):
        named: list[int] | None = args.layers
        sizes["layers"] = tuple(named or spread_layers(load_description(target).config.layers))
    families: dict[str, type[HeadRecipe]] = {
        "eagle3": EagleRecipe,
        "dflash": BlockRecipe,
        "medusa": MedusaRecipe,
        "hydra": HydraRecipe,
        "gumiho": GumihoRecipe,
    }
    recipe = families[args.family](
        proposed=args.proposed,
        tokens=args.tokens,
        rows=args.rows,
        length=args.length,
        rate=args.rate,
        chats=bool(args.chats),
        compiled=args.compile,
        depths=getattr(args, guessed) + more,
        **sizes,
    )
    workspace = data.Workspace(args.work)
    if args.chats:
        conversations = read_conversations(args.chats, Tokenizer(target))
        prepare_chats(workspace, conversations, target, recipe.min_tokens)
    else:
        corpus = data.split_texts(data.read_texts(args.text)) if args.text else data.library_corpus()
        workspace.prepare(corpus, data.load_tokenizer(target), recipe.min_tokens)
    training = train_head(recipe, workspace, target, _say, args.device, _native(args.threads))
    export_head(training.model, args.head, training.history)
    print(f"exported {args.head}")
    return 0


def run_distil(args: argparse.Namespace) -> int:
    """Train and export a draft."""
    from ssd_serve.recipes import data
    from ssd_serve.recipes.distil import DistilRecipe, check_tokenizers, distil, export_distilled

    _refuse_to_replace(args.out, "--out", args.target, args.draft)
    recipe = DistilRecipe(
        tokens=args.tokens, rows=args.rows, length=args.length, rate=args.rate, compiled=args.compile
    )
    check_tokenizers(args.target, args.draft)
    workspace = data.Workspace(args.work)
    corpus = data.split_texts(data.read_texts(args.texts))
    workspace.prepare(corpus, data.load_tokenizer(args.draft), recipe.min_tokens)
    native = _native(args.threads)
    distilled = distil(recipe, workspace, args.target, args.draft, _say, args.device, native)
    export_distilled(distilled, args.draft, args.out)
    print(f"exported {args.out}")
    return 0


def run_pard(args: argparse.Namespace) -> int:
    """Adapt and export a draft."""
    from ssd_serve.models.hub import find_model
    from ssd_serve.models.text.tokenizer import Tokenizer
    from ssd_serve.recipes.chats import prepare_chats, read_conversations
    from ssd_serve.recipes.checkpoint import read_checkpoint
    from ssd_serve.recipes.data import Workspace
    from ssd_serve.recipes.distil import check_tokenizers
    from ssd_serve.recipes.pard import PardRecipe, adapt, export_pard, first_draft

    target = find_model(Settings().engine_config(), args.target, "target", _say)
    draft: Path = args.draft or target
    _refuse_to_replace(args.out, "--out", target, draft)
    check_tokenizers(target, draft)
    source = read_checkpoint(draft) if args.draft else first_draft(target, args.layers)
    shape = {"tokens": args.tokens, "rows": args.rows, "length": args.length, "rate": args.rate}
    recipe = PardRecipe(positions=args.positions, mask=args.mask, **shape)
    workspace = Workspace(args.work)
    conversations = read_conversations(args.chats, Tokenizer(target))
    prepare_chats(workspace, conversations, target, recipe.min_tokens)
    adapted = adapt(recipe, workspace, target, source, _say, args.device, _native(args.threads))
    export_pard(adapted, draft, args.out)
    print(f"exported {args.out}")
    return 0


def run_ballast(args: argparse.Namespace) -> int:
    """Write the enlarged copy."""
    from ssd_serve.recipes.ballast import add_ballast

    sizes = add_ballast(
        args.source, args.destination, args.hidden, args.layers, args.heads, args.intermediate
    )
    print(
        f"wrote {args.destination}: hidden {sizes.hidden}, {sizes.layers} layers, {sizes.heads} heads "
        f"({sizes.kv_heads} KV), MLP {sizes.intermediate}"
    )
    return 0


def _refuse_to_replace(written: Path, option: str, *read: Path) -> None:
    if written.resolve() in [each.resolve() for each in read]:
        raise UserError(f"{written} is an input: choose another folder for {option}.")


def _native(threads: int | None) -> "NativeLibrary | None":
    """Return the compiled kernels, after the number of torch's threads is set."""
    import torch

    from ssd_serve.kernels.native.library import native_library

    if threads:
        torch.set_num_threads(threads)
    return native_library(Settings().engine_config())


def _say(line: str) -> None:
    print(line, flush=True)
