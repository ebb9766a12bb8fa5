"""`ssd bench report`: a result of `ssd bench modes` as Markdown.

Knows the shape of the result file, and nothing of how it was measured.
"""

from collections.abc import Mapping

import msgspec

from ssd_serve.bench.document import read_as
from ssd_serve.bench.tables import markdown_table

_ALL_CORES = "-both-cores"

_MEANING = {
    "real": "**Real devices**: the embedded pair with ballast (the same function at a larger cost), target "
    "and drafter on one core each.",
    "real-both-cores": "**Real, equal devices**: the same baselines when the target has both cores, as many "
    "as SSD has. The factor compares the medians above.",
    "emulated": "**Emulated devices**: the embedded pair; engine, processes and messages are real, but each "
    "forward is stretched by sleeping to the step time of a device table (70B/1B on MI300X). Not a "
    "measurement of those devices.",
}
_ON_GPU = (
    "**Real devices**: the embedded pair with ballast (the same function at a larger cost), target on "
    "{target}, drafter on {draft}."
)
_MODES = {"ar": "plain (ar)", "sd-chain": "chain (sd)", "sd-tree": "tree (sd)", "ssd": "SSD (ssd)"}
_HEAD = (
    *(
        "mode",
        "T",
        "tokens/s (quartiles)",
        "SSD is faster by",
        "tokens a round",
        "accepted nodes",
        "hit rate",
    ),
    "forward / wait / host",
)
_NOTES = {
    "target_overrun_share": "share of target forwards that took longer than the table says",
    "drafter_overrun_share": "the same of the drafter's forwards",
    "inline_draft_overrun_share": "the same of the synchronous drafts' forwards",
    "target_step_with_and_without_drafter_ms": "target step in ms, alone and beside a drafter, by rows",
}


class _Row(msgspec.Struct, frozen=True):
    """One mode at one temperature in one setting."""

    setting: str
    mode: str
    shape: str
    temperature: float
    tokens_per_s: float
    tokens_per_s_quartiles: list[float]
    tokens_per_round: float
    acceptance: float | None
    hit_rate: float | None
    forward_share: float
    wait_share: float
    host_share: float
    requests: int


class _Ratio(msgspec.Struct, frozen=True):
    """SSD against another mode, prompt by prompt."""

    setting: str
    temperature: float
    ratio: str
    median: float


class _Result(msgspec.Struct, frozen=True):
    """What is read of a result file; whatever else it holds is left alone."""

    results: list[_Row]
    ratios: list[_Ratio]
    notes: dict[str, dict[str, object]]
    hardware: dict[str, object]
    versions: dict[str, str]
    devices: dict[str, str] = {}
    """Of target and drafter; older results have none."""


def modes_tables(result: Mapping[str, object]) -> str:
    """Tables of all settings, and below them where they were measured."""
    found = read_as(_Result, result, "ssd bench modes")
    parts: list[str] = []
    for setting in dict.fromkeys(row.setting for row in found.results):
        rows = [row for row in found.results if row.setting == setting]
        parts.append(_meaning(setting, found.devices))
        parts.append(markdown_table(_HEAD, (_cells(row, _factor(found, row)) for row in rows)))
        parts.append(_notes(found.notes.get(setting, {})))
    return "\n\n".join(part for part in [*parts, _where(found)] if part)


def _meaning(setting: str, devices: Mapping[str, str]) -> str:
    if setting == "real" and any(name.startswith("cuda") for name in devices.values()):
        return _ON_GPU.format(**devices)
    return _MEANING.get(setting, setting)


def _factor(found: _Result, row: _Row) -> float | None:
    """How much faster SSD is: the measured ratio, or where the mode had all devices, that of the medians."""
    for each in found.ratios:
        if (each.setting, each.temperature, each.ratio) == (row.setting, row.temperature, f"ssd/{row.mode}"):
            return each.median
    for other in found.results:
        if (f"{other.setting}{_ALL_CORES}", other.temperature, other.mode) == (
            row.setting,
            row.temperature,
            "ssd",
        ):
            return other.tokens_per_s / row.tokens_per_s
    return None


def _cells(row: _Row, ratio: float | None) -> tuple[str, ...]:
    low, high = row.tokens_per_s_quartiles[0], row.tokens_per_s_quartiles[-1]
    name = _MODES.get(row.mode, row.mode)
    shape = row.shape.removeprefix(row.mode).strip()
    return (
        f"{name} {shape}".strip(),
        f"{row.temperature:g}",
        f"{row.tokens_per_s:.1f} ({low:.1f} to {high:.1f})",
        "" if ratio is None else f"{ratio:.2f}x",
        f"{row.tokens_per_round:.2f}",
        _share(row.acceptance),
        _share(row.hit_rate),
        f"{row.forward_share:.2f} / {row.wait_share:.2f} / {row.host_share:.2f}",
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _notes(notes: Mapping[str, object]) -> str:
    """What was seen besides: only what a reader needs to judge the table."""
    told = [f"{text}: {_plain(notes[name])}" for name, text in _NOTES.items() if name in notes]
    replaced = [
        f"T {name.rpartition('_t')[2]}: {_plain(value)}"
        for name, value in notes.items()
        if name.startswith("replaced_prompts_share")
    ]
    if replaced:
        told.append(f"share of prompts replaced because their continuation is a loop: {', '.join(replaced)}")
    return "\n".join(f"- {text}" for text in told)


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_plain(each)}" for name, each in value.items())
    if isinstance(value, list):
        return " and ".join(_plain(each) for each in value)
    return str(value)


def _where(found: _Result) -> str:
    hardware, versions = found.hardware, found.versions
    requests = sorted({row.requests for row in found.results})
    gpus = hardware.get("gpus")
    cards = "".join(f", {name}" for name in gpus) if isinstance(gpus, list) else ""
    return (
        f"Measured on {hardware.get('cpu')}, {hardware.get('cores')} cores, "
        f"{hardware.get('memory_gib')} GiB{cards}; Python {versions.get('python')}, "
        f"torch {versions.get('torch')}. "
        f"Each line is the median over {' or '.join(map(str, requests))} prompts, all modes interleaved "
        "prompt by prompt; the factor is the median of the ratios for each prompt."
    )
