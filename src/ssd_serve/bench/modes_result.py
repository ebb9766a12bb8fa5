"""The result of `ssd bench modes`: what is written is what is read, and `ssd bench report` prints it.

Knows figures and Markdown, and nothing of how they were measured.
"""

from collections.abc import Mapping, Sequence

import msgspec

from ssd_serve.bench.document import read_as
from ssd_serve.bench.statistics import Interval
from ssd_serve.bench.tables import markdown_table

_MEANING = {
    "real": "**Real devices**: {pair}.",
    "emulated": "**Emulated devices**: {pair}; engine, processes and messages are real, but each forward is "
    "stretched by sleeping to the step time of a device table (70B/1B on MI300X). Not a measurement of those "
    "devices.",
}
_MODES = {
    "ar": "plain (ar)",
    "ngram": "n-gram lookup",
    "sd-chain": "chain (sd)",
    "sd-tree": "tree (sd)",
    "ssd": "SSD (ssd)",
}
_HEAD = (
    *("mode", "T", "devices", "tokens/s (quartiles)", "tokens/s a device", "{ours} is faster by", "that is"),
    *("by device", "that is", "tokens a round", "accepted nodes", "hit rate", "forward / wait / host"),
)
_NOTES = {
    "left_out": "share of prompts left out because their continuation loops, by temperature",
    "target_overrun_share": "share of target forwards that took longer than the table says",
    "drafter_overrun_share": "the same of the drafter's forwards",
    "inline_draft_overrun_share": "the same of the synchronous drafts' forwards",
    "earlier_share": "share of the runs that were measured in earlier sittings",
}


class ModesRow(msgspec.Struct, frozen=True, kw_only=True):
    """One way on one share of the devices at one temperature.

    `ssd` has the tokens/s of the last row of this temperature over this row's, prompt by prompt; `tuned` the
    tokens/s of the shapes that were tried on other prompts, as they were last measured.
    """

    setting: str
    mode: str
    shape: str
    temperature: float
    target: str
    draft: str
    devices: int
    requests: int
    tokens_per_s: float
    tokens_per_s_quartiles: list[float]
    ssd: Interval | None
    tokens_per_round: float
    acceptance: float | None
    nodes_per_round: float
    hit_rate: float | None
    forward_share: float
    wait_share: float
    host_share: float
    tuned: dict[str, float] = {}

    @property
    def name(self) -> str:
        """For people."""
        return f"{_MODES.get(self.mode, self.mode)} {self.shape.removeprefix(self.mode).strip()}".strip()


class ModesResult(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a result file; whatever else it holds is left alone. `pairs` says by setting what
    was measured, as `notes` are by setting."""

    results: list[ModesRow]
    pairs: dict[str, str]
    prompts: str
    notes: dict[str, dict[str, object]]
    hardware: dict[str, object]
    versions: dict[str, str]


def devices_named(target: str, draft: str) -> str:
    """For people; `draft` empty: the target's own."""
    return f"{target} and {draft}" if draft else target


def modes_tables(result: Mapping[str, object]) -> str:
    """Tables of all settings, below each what they say of equal hardware, and where they were measured."""
    found = read_as(ModesResult, result, "ssd bench modes")
    parts: list[str] = []
    for setting in dict.fromkeys(row.setting for row in found.results):
        rows = [row for row in found.results if row.setting == setting]
        ours = {row.temperature: row for row in rows if row.mode == "ssd"}
        parts.append(_MEANING.get(setting, setting).format(pair=found.pairs.get(setting, "")))
        head = tuple(cell.format(ours=rows[-1].name) for cell in _HEAD)
        parts.append(markdown_table(head, (_cells(row, ours[row.temperature]) for row in rows)))
        told = [_equal_hardware(row, rows) for row in ours.values()]
        notes = found.notes.get(setting, {})
        told += [f"{text}: {_plain(notes[name])}" for name, text in _NOTES.items() if name in notes]
        parts.append("\n".join(f"- {text}" for text in told))
    return "\n\n".join([*parts, _where(found)])


def _by_device(row: ModesRow, ours: ModesRow) -> Interval | None:
    """The tokens/s a device of `ours` over this row's."""
    return None if row.ssd is None else row.ssd.scaled(row.devices / ours.devices)


def _cells(row: ModesRow, ours: ModesRow) -> tuple[str, ...]:
    low, high = row.tokens_per_s_quartiles[0], row.tokens_per_s_quartiles[-1]
    return (
        row.name,
        f"{row.temperature:g}",
        f"{row.devices}: {devices_named(row.target, row.draft)}",
        f"{row.tokens_per_s:.1f} ({low:.1f} to {high:.1f})",
        f"{row.tokens_per_s / row.devices:.1f}",
        *_judged(row.ssd),
        *_judged(_by_device(row, ours)),
        f"{row.tokens_per_round:.2f}",
        _share(row.acceptance),
        _share(row.hit_rate),
        f"{row.forward_share:.2f} / {row.wait_share:.2f} / {row.host_share:.2f}",
    )


def _judged(interval: Interval | None) -> tuple[str, str]:
    return ("", "") if interval is None else (str(interval), interval.verdict.value)


def _equal_hardware(ours: ModesRow, rows: Sequence[ModesRow]) -> str:
    """SSD against whoever else is the fastest with as many devices or fewer, for they may leave some idle;
    where nobody was measured with so many, by device."""
    others = [row for row in rows if row.temperature == ours.temperature and row.mode != ours.mode]
    equal = any(row.devices == ours.devices for row in others)
    if equal:
        others = [row for row in others if row.devices <= ours.devices]
    judged = [(row.ssd if equal else _by_device(row, ours), row) for row in others]
    interval, best = min(judged, key=lambda item: item[0].mean if item[0] else 0.0)
    way = f"with {ours.devices} devices each" if equal else "by device"
    if interval is None:
        return f"temperature {ours.temperature:g}, {way}: one prompt shows nothing"
    fewer = f" on {best.target}" if equal and best.devices < ours.devices else ""
    return (
        f"**temperature {ours.temperature:g}, {way}**: {ours.name} gives {interval} of {best.name}{fewer}, "
        f"the best of the others: {interval.verdict}"
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_plain(each)}" for name, each in value.items())
    return str(value)


def _where(found: ModesResult) -> str:
    hardware, versions = found.hardware, found.versions
    requests = sorted({row.requests for row in found.results})
    gpus = hardware.get("gpus")
    cards = "".join(f", {name}" for name in gpus) if isinstance(gpus, list) else ""
    return (
        f"Measured on {hardware.get('cpu')}, {hardware.get('cores')} cores, "
        f"{hardware.get('memory_gib')} GiB{cards}; Python {versions.get('python')}, "
        f"torch {versions.get('torch')}. {' or '.join(map(str, requests))} prompts a line "
        f"({found.prompts}), all lines interleaved prompt by prompt. Factors are geometric means over the "
        "prompts with their 95 % interval. SSD is better where all of it lies above 1, as good above 0.97, "
        "worse below 1; else that is not shown. By device: tokens/s divided by the number of devices."
    )
