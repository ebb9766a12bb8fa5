"""`ssd completion`: what a shell needs to complete commands and flags, made of the parsers themselves.

Knows parsers and shells, not what any flag does.
"""

import argparse
from collections.abc import Mapping, Sequence

SHELLS = ("bash", "zsh", "fish")
_BASH = """_ssd() {{
  local command="${{COMP_WORDS[1]}}" words="{commands}"
  if [ "$COMP_CWORD" -gt 1 ]; then
    case "$command" in
{cases}
      *) words="" ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
  [ "${{#COMPREPLY[@]}}" -gt 0 ] || compopt -o default
}}
complete -F _ssd ssd
"""


def completion(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """The script for one of the `SHELLS`, which its user's start-up file evaluates."""
    flags = {name: _flags(parser) for name, parser in parsers.items()}
    if shell == "fish":
        return _fish(flags)
    cases = "\n".join(f'      {name}) words="{" ".join(each)}" ;;' for name, each in flags.items())
    script = _BASH.format(commands=" ".join(flags), cases=cases)
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    """Long flags, and the words that may follow."""
    found: list[str] = []
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
        found += [each for each in action.option_strings if each.startswith("--")]
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            found += list(action.choices)
    return found


def _fish(flags: Mapping[str, Sequence[str]]) -> str:
    lines = [f"complete -c ssd -n __fish_use_subcommand -f -a '{' '.join(flags)}'"]
    for name, each in flags.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c ssd {seen} -l {flag[2:]}" for flag in each if flag.startswith("--")]
        words = [word for word in each if not word.startswith("--")]
        lines += [f"complete -c ssd {seen} -f -a '{' '.join(words)}'"] if words else []
    return "\n".join(lines) + "\n"
