"""Peers' tables as a block of a document: failures that are alike are one line, where their file lists each.

Knows what a failure says, not why it failed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssd_serve.bench.blocks import block_text

Failure = Mapping[str, str]
_TUNING = "tuning"
_LAUNCH = "launch "


def peers(result: Mapping[str, Any], file: Path, folder: Path) -> str:
    """The tables of the result in `file`, for a document in `folder`."""
    return block_text({**result, "failures": folded(result["failures"])}, file, folder)


def folded(failures: Sequence[Failure]) -> list[Failure]:
    """Failures of tuning by what they say without its figures, then those of launches by way and reason, in
    the order in which they came; any others stay as they are, at the end."""
    tuning: dict[str, list[str]] = {}
    launches: dict[tuple[str, str], list[int]] = {}
    others: list[Failure] = []
    for each in failures:
        if each["when"] == _TUNING:
            tuning.setdefault(each["reason"].partition(" (")[0], []).append(each["way"])
        elif each["when"].startswith(_LAUNCH):
            number = int(each["when"].removeprefix(_LAUNCH))
            launches.setdefault((each["way"], each["reason"]), []).append(number)
        else:
            others.append(each)
    return [
        *(
            {
                "way": f"{_many(len(ways), 'answer')} of {_many(len(set(ways)), 'shape')}",
                "when": _TUNING,
                "reason": reason,
            }
            for reason, ways in tuning.items()
        ),
        *(
            {"way": way, "when": _named(numbers), "reason": reason}
            for (way, reason), numbers in launches.items()
        ),
        *others,
    ]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _named(numbers: Sequence[int]) -> str:
    """Launches in words; one that failed at two prompts alike is said twice."""
    if len(numbers) == 1:
        return f"{_LAUNCH}{numbers[0]}"
    first, last = numbers[0], numbers[-1]
    if list(numbers) == list(range(first, last + 1)):
        return f"launches {first} to {last}"
    return f"launches {', '.join(map(str, numbers))}"
