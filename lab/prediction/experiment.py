"""`python -m lab.prediction`: what the table of devices says of figures that others have published.

Two readings of how good the published draft is. Each is held against every published figure of the pair; then
four MI300X and one say what this project's engine would give with such a draft. Computed and simulated:
nothing here has run on such a device. No constant is fitted to a figure of asynchronous drafting.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from lab.prediction.published import (
    CHAIN,
    CONTEXT,
    EXPECTED_ACCEPTANCE,
    FAN_OUT,
    INFERRED_TOKENS,
    POINTS,
    TABLE,
    Point,
    published,
)
from lab.prediction.speculation import (
    Predicted,
    SplitPair,
    acceptance_of,
    as_slow_as,
    chain,
    chain_tokens,
    plain,
    table,
)
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.errors import SsdError
from ssd_serve.plan.device_tables import DeviceSheet, device_sheet
from ssd_serve.plan.devices import Sheets, cost_table
from ssd_serve.plan.guesses import DraftQuality
from ssd_serve.plan.known_models import Computing, PlannedModel, known_model, sized
from ssd_serve.plan.plan import DRAFT_HOST_S
from ssd_serve.plan.simulation import Costs, Simulated, measured_host, simulate
from ssd_serve.verifier.planning.layout import Layout

_DEVICE, _DEVICES = "MI300X", 4
_ALONE_HOST_S = 0.4e-3
"""Host time of a draft step of 8 nodes, alone on a core (`python -m lab.host`)."""


@dataclass(frozen=True, slots=True)
class SimulationEffort:
    """How much to simulate. `widths`: nodes of a draft step to choose from."""

    widths: Sequence[int] = (8, 16, 32, 64)
    rounds: int = 240
    seeds: int = 2


@dataclass(frozen=True, slots=True)
class _Reading:
    """A draft as the published figures may be read. `slow`: its forwards have the host time that the chain on
    4 devices shows; else they take what the device takes."""

    name: str
    acceptance: float
    slow: bool
    sheets: tuple[DeviceSheet, ...] = (device_sheet("mi300x"), device_sheet("h100"))

    def pair(self, device: str) -> SplitPair:
        """Llama 3.1 70B on 4 such devices, and 3.2 1B on one."""
        sheet = next(each for each in self.sheets if each.name == device)
        platform = Sheets(sheet, _DEVICES)
        pair = SplitPair(platform, _shape("llama-3.1-70b"), _shape("llama-3.2-1b"), _DEVICES, CONTEXT)
        if not self.slow:
            return pair
        known = published(device, "chain", _DEVICES)
        return as_slow_as(pair, self.acceptance, CHAIN, known.tokens_per_s)

    def fitted(self, point: Point) -> bool:
        """Whether this figure was used, so that meeting it says nothing."""
        return point.mode == "plain" or (self.slow and (point.mode, point.devices) == ("chain", _DEVICES))


def readings() -> tuple[_Reading, _Reading]:
    """The draft of the notes, and that of the published acceptance."""
    return (
        _Reading("4.08 tokens a round", acceptance_of(INFERRED_TOKENS, CHAIN), slow=False),
        _Reading("65 % accepted", acceptance_of(1 + EXPECTED_ACCEPTANCE * TABLE, TABLE), slow=True),
    )


def predicted(reading: _Reading, point: Point) -> Predicted:
    """What the device gives for a published figure."""
    pair = replace(reading.pair(point.device), devices=point.devices)
    if point.mode == "plain":
        return plain(pair)
    if point.mode == "chain":
        return chain(pair, reading.acceptance, CHAIN)
    return table(pair, reading.acceptance, TABLE, FAN_OUT)


def run_prediction(effort: SimulationEffort, say: Callable[[str], None]) -> dict[str, object]:
    """Everything that the report tells."""
    found = [_read(reading) for reading in readings()]
    for entry, reading in zip(found, readings(), strict=True):
        say(f"simulating the engine with a draft of {reading.name}")
        entry["engine"] = [_lived(reading, host, effort) for host in _hosts(reading)]
    return {
        "benchmark": "prediction",
        "said": "computed from data sheets and published figures, and simulated; no such model has run on "
        "these devices",
        "devices": {"target": "4 x MI300X", "draft": "1 x MI300X"},
        "bound": _bound(),
        "readings": found,
        "if": _sensitivity(),
        "effort": asdict(effort),
    }


def _read(reading: _Reading) -> dict[str, object]:
    return {
        "name": reading.name,
        "acceptance": round(reading.acceptance, 4),
        "tokens_a_chain": {
            str(length): round(chain_tokens(reading.acceptance, length), 3) for length in (CHAIN, TABLE)
        },
        "draft_host_ms": {
            each.name: round(1e3 * reading.pair(each.name).draft_host_s, 3) for each in reading.sheets
        },
        "figures": [_compared(reading, point) for point in POINTS],
    }


def _compared(reading: _Reading, point: Point) -> dict[str, object]:
    found = predicted(reading, point)
    return {
        "device": point.device,
        "mode": point.mode,
        "devices": point.devices + (point.mode == "table"),
        "published": point.tokens_per_s,
        "computed": round(found.tokens_per_s, 2),
        "error": round(found.tokens_per_s / point.tokens_per_s - 1, 4),
        "fitted": reading.fitted(point),
        "tokens_per_round": round(found.tokens, 3),
        "target_ms": round(1e3 * found.target_s, 3),
        "draft_ms": round(1e3 * found.draft_s, 3),
        "hit_rate": round(found.hit_rate, 4),
    }


def _bound() -> dict[str, object]:
    """What AMD's figures on one device tell without any model: no round is shorter than a plain step."""
    least = published(_DEVICE, "table", 1).tokens_per_s / published(_DEVICE, "plain", 1).tokens_per_s
    acceptance = acceptance_of(least, TABLE)
    return {
        "tokens_a_table_round_at_least": round(least, 3),
        "acceptance_at_least": round(acceptance, 4),
        "tokens_a_chain_round_at_least": round(chain_tokens(acceptance, CHAIN), 3),
    }


def _sensitivity() -> list[dict[str, object]]:
    """Assumed constants moved, with plain decoding kept where it is."""
    first, second = readings()
    rowless = replace(_sheet(first), row_s=0.0)
    moved = [
        ("as it is", first, second),
        *(
            (f"launch {1e3 * each:g} ms", _launching(first, each), _launching(second, each))
            for each in (0.1e-3, 0.5e-3)
        ),
        ("rows free", _on(first, rowless), _on(second, rowless)),
        *(
            (
                f"{each:.0%} accepted",
                first,
                replace(second, acceptance=acceptance_of(1 + each * TABLE, TABLE)),
            )
            for each in (0.60, 0.70)
        ),
    ]
    chain_point, table_point = (published(_DEVICE, mode, _DEVICES) for mode in ("chain", "table"))
    return [
        {
            "if": name,
            "chain at 4.08": round(predicted(one, chain_point).tokens_per_s, 1),
            "table at 4.08": round(predicted(one, table_point).tokens_per_s, 1),
            "draft host, ms, at 65 %": round(1e3 * two.pair(_DEVICE).draft_host_s, 2),
            "table at 65 %": round(predicted(two, table_point).tokens_per_s, 1),
        }
        for name, one, two in moved
    ]


def _sheet(reading: _Reading) -> DeviceSheet:
    return reading.pair(_DEVICE).platform.sheet


def _launching(reading: _Reading, launch_s: float) -> _Reading:
    """The device with another time to start a forward; layers take the rest, as they were fitted to."""
    sheet, layers = _sheet(reading), reading.pair(_DEVICE).target.layers
    layer_s = sheet.layer_s + (sheet.launch_s - launch_s) / layers
    return _on(reading, replace(sheet, launch_s=launch_s, layer_s=layer_s))


def _on(reading: _Reading, sheet: DeviceSheet) -> _Reading:
    return replace(reading, sheets=(sheet,))


def _hosts(reading: _Reading) -> list[tuple[str, float]]:
    """What the host may add to a draft step, here and there."""
    found = [("ours, on shared cores", DRAFT_HOST_S), ("ours, alone on a core", _ALONE_HOST_S)]
    if reading.slow:
        found.append(("as AMD's chain shows", reading.pair(_DEVICE).draft_host_s))
    return found


def _lived(reading: _Reading, host: tuple[str, float], effort: SimulationEffort) -> dict[str, object]:
    """This project's engine, and the table of outcomes, with the same host time a draft step."""
    name, host_s = host
    pair = replace(reading.pair(_DEVICE), draft_host_s=host_s)
    rival = table(pair, reading.acceptance, TABLE, FAN_OUT)
    rows = [
        _row("table of outcomes (computed)", _DEVICES + 1, rival.tokens_per_s, rival.tokens),
    ]
    for layout, label, devices in (
        (Layout.OFF, "plain", _DEVICES),
        (Layout.SYNC, "best-first tree, in turns", _DEVICES),
        (Layout.ASYNC, "live tree, beside", _DEVICES + 1),
    ):
        widths = effort.widths[:1] if layout is Layout.OFF else effort.widths
        tried = {width: _simulated(pair, reading.acceptance, layout, width, effort) for width in widths}
        best = max(tried, key=lambda width: _mean(tried[width], "tokens_per_s"))
        runs = tried[best]
        row = _row(label, devices, _mean(runs, "tokens_per_s"), _mean(runs, "tokens_per_round"))
        if layout is not Layout.OFF:
            row |= {
                "width": best,
                "by_width": {str(w): round(_mean(each, "tokens_per_s"), 1) for w, each in tried.items()},
                "nodes_per_round": round(_mean(runs, "nodes_per_round"), 1),
            }
        row["round"] = {
            key.removesuffix("_s"): round(1e3 * value if key.endswith("_s") else value, 3)
            for key, value in asdict(runs[0].split).items()
        }
        rows.append(row)
    return {"host": name, "draft_host_ms": round(1e3 * host_s, 3), "ways": rows}


def _row(way: str, devices: int, tokens_per_s: float, tokens_per_round: float) -> dict[str, object]:
    return {
        "way": way,
        "devices": devices,
        "tokens_per_s": round(tokens_per_s, 1),
        "tokens_per_s_a_device": round(tokens_per_s / devices, 1),
        "tokens_per_round": round(tokens_per_round, 2),
    }


def _simulated(
    pair: SplitPair, acceptance: float, layout: Layout, width: int, effort: SimulationEffort
) -> list[Simulated]:
    limits = GrowthLimits(width=width, fan_out=8, depth=16, nodes=4096)
    costs = Costs(
        target=cost_table(pair.platform, pair.target, pair.devices, pair.context),
        host=measured_host(),
        draft_s=pair.draft_s(width),
        limits=limits,
        context=pair.context,
        draft_host_s=pair.draft_host_s,
    )
    return [
        simulate(layout, DraftQuality(acceptance), costs, 1, effort.rounds, seed)
        for seed in range(1, effort.seeds + 1)
    ]


def _mean(runs: Sequence[Simulated], name: str) -> float:
    return statistics.mean([float(getattr(run, name)) for run in runs])


def _shape(name: str) -> PlannedModel:
    description = known_model(name)
    if description is None:
        raise SsdError(f"no shape of {name} is known")
    return sized(name, description, Computing("cuda:0", torch.bfloat16))
