"""`ssd bench ssd-table`: plain, synchronous and asynchronous servers of one pair, for one user, by ranks.

Every way is a launched server, one at a time, so that a large target fits; launches repeat in another order.
The same prompts go to all, and ratios are of the same prompt in the same launch. Knows what is started and
asked; how figures are shown is the report's.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ssd_serve.base.devices import Machine
from ssd_serve.base.engine_settings import Mode
from ssd_serve.base.errors import SsdError, UserError
from ssd_serve.base.settings import Settings
from ssd_serve.bench.load.client import Answer, Endpoint, LoadClient, LoadRequest
from ssd_serve.bench.load.groups import turn
from ssd_serve.bench.load.servers import served
from ssd_serve.bench.load.statistics import speculation_figures
from ssd_serve.bench.prompts import Prompt
from ssd_serve.bench.statistics import percentile, ratio_interval
from ssd_serve.cluster.placement import Placement, place
from ssd_serve.models.hub import find_model
from ssd_serve.models.sizes import model_sizes

MODES = (Mode.AR, Mode.SD, Mode.SSD)


@dataclass(frozen=True, slots=True)
class TablePlan:
    """What to run: numbers of ranks of the target, prompts, and how they are continued."""

    ranks: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    tokens: int
    temperature: float
    launches: int
    exact: bool
    """Answers have all their tokens, whatever the model wants to end with."""


@dataclass(frozen=True, slots=True)
class RankedWay:
    """One server: its mode, and the ranks of its target."""

    mode: Mode
    ranks: int

    @property
    def name(self) -> str:
        """For logs and messages."""
        return f"{self.mode.value}-tp{self.ranks}"


@dataclass(frozen=True, slots=True)
class Speeds:
    """What one prompt gave: tokens a second from the first chunk on, and of the whole request."""

    decode: float
    whole: float


@dataclass(slots=True)
class Measurements:
    """Samples by way, launch and prompt; all answers; and what could not be measured, with the reason."""

    samples: dict[RankedWay, dict[tuple[int, int], Speeds]] = field(
        default_factory=dict[RankedWay, dict[tuple[int, int], Speeds]]
    )
    answers: dict[RankedWay, list[Answer]] = field(default_factory=dict[RankedWay, list[Answer]])
    refused: dict[RankedWay, str] = field(default_factory=dict[RankedWay, str])


def ways_of(
    settings: Settings, ranks: Sequence[int], machine: Machine
) -> tuple[dict[RankedWay, Settings], dict[RankedWay, str]]:
    """Settings of each server, and the ways that this machine or the target cannot have with the reason."""
    target = find_model(settings.engine_config(), settings.target, "target")
    ways: dict[RankedWay, Settings] = {}
    refused: dict[RankedWay, str] = {}
    for way in (RankedWay(mode, number) for number in ranks for mode in MODES):
        own = settings.model_copy(
            update={
                "mode": way.mode,
                "tensor_parallel": way.ranks,
                "prefix_cache": False,
                "speculation_may_stop": False,
                "generation_config": "none",
            }
        )
        try:
            place(own, machine)
            model_sizes(target, device="cpu", dtype="auto", ranks=way.ranks, allow_pickle=own.allow_pickle)
        except UserError as error:
            refused[way] = str(error)
        else:
            ways[way] = own
    if not ways:
        raise UserError(f"nothing of the table can be measured: {next(iter(refused.values()))}")
    return ways, refused


def run_table(
    settings: Settings, plan: TablePlan, machine: Machine, folder: Path, say: Callable[[str], None]
) -> dict[str, object]:
    """The result file. Raises `UserError` where no way can be measured."""
    ways, refused = ways_of(settings, plan.ranks, machine)
    found = Measurements(refused=refused)
    for launch in range(plan.launches):
        for name in turn([way.name for way in ways], launch):
            (way,) = (way for way in ways if way.name == name)
            if way in found.refused:
                continue
            say(f"launch {launch + 1} of {plan.launches}: {name}")
            try:
                with served({name: ways[way]}, folder) as servers:
                    endpoint = Endpoint(
                        servers[name].url, plan.temperature, settings.api_key, exact=plan.exact
                    )
                    answers = asyncio.run(_ask(endpoint, plan))
            except SsdError as error:
                found.refused[way] = str(error).strip().splitlines()[-1]
                say(f"  {found.refused[way]}")
                continue
            record(found, way, launch, answers)
    if not found.samples:
        raise SsdError(f"no server could be measured: {next(iter(found.refused.values()))}")
    devices = {way: device_count(place(own, machine)) for way, own in ways.items()}
    return {"benchmark": "ssd-table", **table(found, devices), "plan": _told(plan)}


async def _ask(endpoint: Endpoint, plan: TablePlan) -> list[Answer]:
    """Every prompt alone, after a warm-up that is not counted."""
    wanted = [LoadRequest(prompt.tokens, plan.tokens, prompt.seed) for prompt in plan.prompts]
    async with LoadClient(endpoint) as client:
        await client.closed_loop(wanted[:2], 1)
        return await client.closed_loop(wanted, 1)


def record(found: Measurements, way: RankedWay, launch: int, answers: Sequence[Answer]) -> None:
    """Keep the answers of a launch. One that failed or that came in one chunk has no speed."""
    for number, answer in enumerate(answers):
        sample = _sample(answer)
        if sample is not None:
            found.samples.setdefault(way, {})[launch, number] = sample
    found.answers.setdefault(way, []).extend(answers)
    if way not in found.samples:
        errors = {answer.error for answer in answers if answer.error} or {"answers too short to be timed"}
        found.refused[way] = min(errors)


def _sample(answer: Answer) -> Speeds | None:
    if answer.error or len(answer.arrivals) < 2:
        return None
    (first_s, first), (last_s, _) = answer.arrivals[0], answer.arrivals[-1]
    return Speeds((answer.tokens - first) / (last_s - first_s), answer.tokens / (last_s - answer.sent_s))


def device_count(placement: Placement) -> int:
    """Cores or GPUs that compute models."""
    both = {(placement.target.kind, index) for index in placement.target.indices}
    if placement.draft is not None:
        both |= {(placement.draft.kind, index) for index in placement.draft.indices}
    return max(1, len(both))


def table(found: Measurements, devices: Mapping[RankedWay, int]) -> dict[str, object]:
    """Rows of ways, and SSD's ratios at the same ranks and at the same number of devices."""
    ways = list(found.samples)
    rows = [_row(way, found, devices[way]) for way in ways]
    ratios = [
        _ratio(found, ours, theirs, devices)
        for ours in ways
        for theirs in ways
        if ours.mode is Mode.SSD
        and theirs.mode is not Mode.SSD
        and (theirs.ranks == ours.ranks or devices[theirs] == devices[ours])
    ]
    refused = [{"way": way.name, "why": why} for way, why in found.refused.items()]
    return {"results": rows, "ratios": ratios, "refused": refused}


def _row(way: RankedWay, found: Measurements, devices: int) -> dict[str, object]:
    samples = list(found.samples[way].values())
    decode = percentile([sample.decode for sample in samples], 50)
    return {
        "mode": way.mode.value,
        "ranks": way.ranks,
        "devices": devices,
        "tokens_per_s": round(decode, 2),
        "tokens_per_s_a_device": round(decode / devices, 2),
        "whole_request_tokens_per_s": round(percentile([sample.whole for sample in samples], 50), 2),
        "tokens_per_round": speculation_figures(found.answers[way])["tokens_per_round"],
        "requests": len(samples),
        "failed": sum(bool(answer.error) for answer in found.answers[way]),
    }


def _ratio(
    found: Measurements, ours: RankedWay, theirs: RankedWay, devices: Mapping[RankedWay, int]
) -> dict[str, object]:
    own, other = found.samples[ours], found.samples[theirs]
    interval = ratio_interval([own[key].decode / other[key].decode for key in own if key in other])
    return {
        "ranks": ours.ranks,
        "against": theirs.mode.value,
        "against_ranks": theirs.ranks,
        "same_devices": devices[ours] == devices[theirs],
        "faster": msgspec.to_builtins(interval),
    }


def _told(plan: TablePlan) -> dict[str, object]:
    return {
        "prompts": len(plan.prompts),
        "tokens": plan.tokens,
        "temperature": plan.temperature,
        "launches": plan.launches,
        "exact": plan.exact,
    }
