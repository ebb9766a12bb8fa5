"""Failures of a result of `ssd bench peers` as its tables show them: those that are alike are one line, where
the file lists each.

Knows what a failure says, not why it failed.
"""

from collections.abc import Mapping, Sequence

import msgspec

from ssd_serve.bench.peers.result import Failure, read

_TUNING = "tuning"
_LAUNCH = "launch "


def with_folded_failures(result: Mapping[str, object]) -> dict[str, object]:
    """The result with the lines that are shown for its failures."""
    return {**result, "failures": msgspec.to_builtins(folded(read(result).failures))}


def folded(failures: Sequence[Failure]) -> list[Failure]:
    """Failures of tuning by what they say without its figures, then those of launches by way and reason, in
    the order in which they came; any others stay as they are, at the end."""
    tuning: dict[str, list[str]] = {}
    launches: dict[tuple[str, str], list[int]] = {}
    others: list[Failure] = []
    for each in failures:
        number = each.when.removeprefix(_LAUNCH)
        if each.when == _TUNING:
            tuning.setdefault(each.reason.partition(" (")[0], []).append(each.way)
        elif number != each.when and number.isdecimal():
            launches.setdefault((each.way, each.reason), []).append(int(number))
        else:
            others.append(each)
    return [
        *(
            Failure(_many(len(set(ways)), "shape"), f"{_TUNING}, {_many(len(ways), 'time')}", reason)
            for reason, ways in tuning.items()
        ),
        *(Failure(way, _named(numbers), reason) for (way, reason), numbers in launches.items()),
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
