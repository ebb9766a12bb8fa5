"""The command line `ssd`: its commands, and exit codes of errors.

A command's code is in the package of its subject; slow modules are imported when a command runs.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from ssd_serve.app.cli.draft import add_draft
from ssd_serve.app.cli.flags import Commands, Parser, add_settings_flags, given_config, given_flags
from ssd_serve.app.cli.output import SHELLS, completion
from ssd_serve.app.doctor.command import add_doctor, add_report
from ssd_serve.app.plan.command import add_plan
from ssd_serve.base.errors import (
    CheckpointError,
    DeviceHangError,
    EngineDeadError,
    HubError,
    MemoryShortError,
    NoGpuError,
    PairMismatchError,
    PermissionProblemError,
    PortInUseError,
    ProtocolError,
    SettingsError,
    SsdError,
)
from ssd_serve.base.names import suggestion
from ssd_serve.base.settings import Settings
from ssd_serve.base.settings_sources import Origin, flag_name, origins, resolve
from ssd_serve.base.version import __version__

if TYPE_CHECKING:
    from ssd_serve.app.cli.generate import GenerateOptions

INTERRUPTED = 130
HUNG_UP = 129
TERMINATED = 143
EXIT_CODES: tuple[tuple[int, str], ...] = (
    (0, "success; for a server: stopped by a signal, even if SSD_DRAIN_SECONDS ended requests"),
    (SsdError.exit_code, "an error that has no code of its own"),
    (SettingsError.exit_code, "a setting, flag, variable or argument is wrong"),
    (PortInUseError.exit_code, "the HTTP port is taken by another process"),
    (PermissionProblemError.exit_code, "a folder, file or port may not be used by this user"),
    (MemoryShortError.exit_code, "weights and caches would not fit into memory"),
    (CheckpointError.exit_code, "a model is missing, damaged, half downloaded or of an unknown kind"),
    (
        HubError.exit_code,
        "a download from the model hub, or of a package with a model, was refused or failed",
    ),
    (PairMismatchError.exit_code, "draft and target cannot work together"),
    (NoGpuError.exit_code, "the machine has a GPU that torch cannot use"),
    (EngineDeadError.exit_code, "the verifier process died"),
    (ProtocolError.exit_code, "a process received a message that does not fit the protocol"),
    (DeviceHangError.exit_code, "a GPU did not end a forward in time"),
    (HUNG_UP, "ended by SIGHUP, a closed terminal, while models were loaded"),
    (INTERRUPTED, "interrupted with Ctrl-C"),
    (TERMINATED, "ended by SIGTERM while models were loaded"),
)
SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0: always the best token (the model's, or 1.0)"),
    "top_k": (int, "sample from the k most probable tokens only"),
    "top_p": (float, "sample from this much probability only"),
    "min_p": (float, "drop tokens below this share of the best"),
    "seed": (int, "the same seed gives the same text (a random one)"),
    "max_tokens": (int, "most new tokens (the model's, or 128)"),
}
"""Flags of `ssd generate` and `ssd chat`, with their types and help texts."""
_LAZY_COMMANDS = {
    "bench": ("ssd_serve.bench.commands", "measure: modes, kernels, losslessness"),
    "recipe": ("ssd_serve.recipes.commands", "make drafts: train EAGLE-3 heads, distil models, add ballast"),
}
"""Commands of packages that no server needs: a module, imported on use, and its help text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def run() -> int:
        args = build_parser().parse_args(arguments)
        code: int = args.run(args)
        return code

    return exit_code(run, "ssd")


def exit_code(run: Callable[[], int], name: str) -> int:
    """Run a command and return its exit code. An error's message goes to stderr, and its code is returned."""
    try:
        code = run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has exited (`ssd settings | head`); Python would raise again at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except SsdError as error:
        if not getattr(error, "explained", False):
            print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    return code


def build_parser() -> Parser:
    """Parser of all commands of `ssd`."""
    parser = _Root(
        prog="ssd",
        description="An inference server for large language models with asynchronous speculative decoding.",
        epilog="exit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ssd {__version__}")
    commands = cast(Commands, parser.add_subparsers(metavar="COMMAND", dest="command", parser_class=Parser))
    parser.set_defaults(run=lambda _args: _no_command(parser))
    _add_serve(commands)
    _add_run(commands)
    _add_chat(commands)
    _add_generate(commands)
    _add_pull(commands)
    add_draft(commands)
    _add_settings(commands)
    add_plan(commands)
    add_doctor(commands)
    add_report(commands)
    _add_version(commands)
    _add_completion(commands)
    for name, (module, text) in _LAZY_COMMANDS.items():
        commands.add_parser(name, help=text, fill=partial(_fill, module))
    parser.command_names = list(commands.choices)
    return parser


class _Root(Parser):
    """Parser of the command's name: argparse's own error would list hidden commands."""

    command_names: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Suggest the nearest command if the first word is unknown."""
        first: str = args[0] if args else "-"
        if not first.startswith("-") and first not in self.command_names:
            hint = suggestion(first, self.command_names) or f"; there are {', '.join(self.command_names)}"
            raise SettingsError(f"the command '{first}' is unknown{hint}")
        return super().parse_known_args(args, namespace)


def _fill(module: str, parser: argparse.ArgumentParser) -> None:
    """Add the commands of this module to its command's parser."""
    import_module(module).add_commands(parser)


def _no_command(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return SettingsError.exit_code


def _add_serve(commands: Commands) -> None:
    parser = commands.add_parser("serve", help="serve a model over HTTP, OpenAI-compatible")
    _add_models(parser)
    add_settings_flags(parser, others=True)
    parser.set_defaults(run=_run_serve)


def _add_generate(commands: Commands) -> None:
    parser = commands.add_parser("generate", help="continue one text in the terminal")
    parser.add_argument("text", help="the text to continue; - reads it from stdin")
    _add_choice(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, nothing else")
    add_settings_flags(parser, others=True)
    parser.set_defaults(run=_run_generate)


def _add_chat(commands: Commands) -> None:
    parser = commands.add_parser("chat", help="chat with a model in the terminal")
    _add_models(parser)
    _add_choice(parser)
    add_settings_flags(parser, others=True)
    parser.add_argument(
        "--url", help="talk to a running server, e.g. http://127.0.0.1:8000, with --api-key KEY"
    )
    parser.set_defaults(run=_run_chat)


def _add_run(commands: Commands) -> None:
    parser = commands.add_parser("run", help="serve a model and chat with it, until the chat ends")
    _add_models(parser)
    _add_choice(parser)
    add_settings_flags(parser, others=True)
    parser.set_defaults(run=_run_run)


def _add_pull(commands: Commands) -> None:
    parser = commands.add_parser("pull", help="download a model, so that a server finds it here")
    parser.add_argument("model", metavar="MODEL", help="a hub id, or a state of it as owner/name@revision")
    add_settings_flags(parser, others=True)
    parser.set_defaults(run=_run_pull)


def _add_version(commands: Commands) -> None:
    parser = commands.add_parser("version", help="print the version, and with --full the environment")
    parser.add_argument("--full", action="store_true", help="also packages, cores and GPUs, as JSON")
    parser.set_defaults(run=_run_version)


def _add_completion(commands: Commands) -> None:
    parser = commands.add_parser("completion", help="print a shell completion script")
    parser.add_argument("shell", choices=SHELLS, help='for bash: eval "$(ssd completion bash)"')

    def run(args: argparse.Namespace) -> int:
        parsers = {name: commands.choices[name] for name in commands.choices}
        print(
            completion(args.shell, {name: cast(Parser, each).words for name, each in parsers.items()}), end=""
        )
        return 0

    parser.set_defaults(run=run)


def _add_models(parser: argparse.ArgumentParser) -> None:
    """Add the models as positional arguments; see `_settings_of_models`."""
    parser.add_argument("model", nargs="?", metavar="TARGET", help="the same as --target")
    parser.add_argument("draft", nargs="?", metavar="DRAFT", help="the same as --draft")


def _add_choice(parser: argparse.ArgumentParser) -> None:
    for name, (kind, text) in SAMPLING_FLAGS.items():
        parser.add_argument(flag_name(name), type=kind, help=text)


def _add_settings(commands: Commands) -> None:
    parser = commands.add_parser("settings", help="print all settings with their origins")
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--json", action="store_true", help="as JSON")
    style.add_argument("--markdown", action="store_true", help="the values as a Markdown table")
    style.add_argument("--env", action="store_true", help="as a .env file, for containers")
    add_settings_flags(parser, others=True)
    parser.set_defaults(run=_run_settings)


def _run_serve(args: argparse.Namespace) -> int:
    from ssd_serve.app.cli.serve import run_serve

    return run_serve(_settings_of_models(args))


def _settings_of_models(args: argparse.Namespace) -> Settings:
    """Return the settings of a command that takes target and draft as positional arguments."""
    flags = given_flags(args)
    for name, word in (("target", args.model), ("draft", args.draft)):
        if word is not None:
            if flags.get(name, word) != word:
                raise SettingsError(f"the {name} is given twice: {word} and {flag_name(name)}")
            flags[name] = word
    return resolve(flags, config=given_config(args))


def _run_chat(args: argparse.Namespace) -> int:
    from ssd_serve.app.cli.chat import run_chat, run_chat_with

    settings, wish = _settings_of_models(args), _choice(args, "")
    if args.url is None:
        return run_chat(settings, wish)
    if args.model is not None:
        raise SettingsError("the server at --url has its model: name none here")
    return run_chat_with(args.url, settings, wish)


def _run_run(args: argparse.Namespace) -> int:
    from ssd_serve.app.cli.chat import run_run

    return run_run(_settings_of_models(args), _choice(args, ""))


def _run_pull(args: argparse.Namespace) -> int:
    from ssd_serve.base.logs import ProgressLine
    from ssd_serve.models.hub import find_model

    line = ProgressLine()
    settings = resolve(given_flags(args), config=given_config(args))
    folder = find_model(settings.engine_config(), args.model, "target", report=line.show)
    line.clear()
    print(folder)
    return 0


def _run_version(args: argparse.Namespace) -> int:
    if not args.full:
        print(f"ssd {__version__}")
        return 0
    from ssd_serve.app.cli.output import full_version

    print(json.dumps(full_version(), indent=2))
    return 0


def _run_generate(args: argparse.Namespace) -> int:
    from ssd_serve.app.cli.generate import run_generate

    wish = _choice(args, sys.stdin.read() if args.text == "-" else args.text)
    return run_generate(resolve(given_flags(args), config=given_config(args)), wish, as_json=args.json)


def _choice(args: argparse.Namespace, text: str) -> "GenerateOptions":
    from ssd_serve.app.cli.generate import GenerateOptions

    sampling = {name: getattr(args, name) for name in SAMPLING_FLAGS if getattr(args, name) is not None}
    return GenerateOptions(text, sampling)


def _run_settings(args: argparse.Namespace) -> int:
    from ssd_serve.app.cli.output import as_env, as_json, as_markdown, as_table

    flags, config = given_flags(args), given_config(args)
    rows: list[Origin] = origins(resolve(flags, config=config), flags, config)
    chosen = ((args.json, as_json), (args.markdown, as_markdown), (args.env, as_env), (True, as_table))
    print(next(style for wanted, style in chosen if wanted)(rows))
    return 0
