"""`ssd completion`: what a shell needs to complete words. Knows shells, not what any flag does."""

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


def completion(shell: str, words: Mapping[str, Sequence[str]]) -> str:
    """The script for one of the `SHELLS`, which its user's start-up file evaluates. `words`: by command, its
    flags and what may follow it."""
    if shell == "fish":
        return _fish(words)
    cases = "\n".join(f'      {name}) words="{" ".join(each)}" ;;' for name, each in words.items())
    script = _BASH.format(commands=" ".join(words), cases=cases)
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def _fish(words: Mapping[str, Sequence[str]]) -> str:
    lines = [f"complete -c ssd -n __fish_use_subcommand -f -a '{' '.join(words)}'"]
    for name, each in words.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c ssd {seen} -l {flag[2:]}" for flag in each if flag.startswith("--")]
        others = [word for word in each if not word.startswith("--")]
        lines += [f"complete -c ssd {seen} -f -a '{' '.join(others)}'"] if others else []
    return "\n".join(lines) + "\n"
