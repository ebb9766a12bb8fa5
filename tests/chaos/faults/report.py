"""What the fault benchmark found, and how it is printed. Knows its result file alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ssd_serve.bench.document import read_as
from ssd_serve.bench.tables import markdown_table


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """What one fault did. Times in seconds since it struck; None where there is nothing to notice."""

    fault: str
    lost: int
    """Tokens that clients never got."""
    wrong: int
    """Texts that differ from the undisturbed ones by more than a near-tie."""
    near_ties: int
    recovered_s: float | None
    """Until the last client got a token after its longest wait, 0 where none had to wait; None where a client
    was cut off and asked nobody for the rest."""
    stall_s: float
    """The longest time that a client got nothing."""
    errors: tuple[str, ...]
    noticed_s: float | None = None
    whole_s: float | None = None
    """Until every process was there again and as many drafters had joined; None where it does not apply."""
    speculates: bool | None = None
    """Whether drafts were found ready afterwards."""
    more: dict[str, float] = field(default_factory=dict[str, float])


class _Result(msgspec.Struct, frozen=True):
    outcomes: list[FaultOutcome]


_HEAD = (
    *("fault", "tokens lost", "texts wrong", "near-ties", "noticed after", "all clients go on after"),
    *("whole again after", "longest wait of a client", "errors", "speculates afterwards"),
)


def table(result: Mapping[str, object]) -> str:
    """One line a fault, in Markdown."""
    rows = (
        (
            *(one.fault, one.lost, one.wrong, one.near_ties),
            *(_seconds(one.noticed_s), _seconds(one.recovered_s), _seconds(one.whole_s)),
            *(_seconds(one.stall_s), "; ".join(one.errors) or "none"),
            "" if one.speculates is None else "yes" if one.speculates else "no",
        )
        for one in _read(result)
    )
    return markdown_table(_HEAD, rows)


def harmless(result: Mapping[str, object]) -> bool:
    """No token was wrong or lost, none of slow clients either; a server that lived on cut nobody off."""
    return all(
        not one.wrong
        and not one.lost
        and (one.whole_s is None or not one.errors)
        and one.more.get("whole_answers") in (None, one.more.get("clients"))
        for one in _read(result)
    )


def _read(result: Mapping[str, object]) -> list[FaultOutcome]:
    return read_as(_Result, result, "python -m tests.chaos.faults").outcomes


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"
