"""Plan of a pair of models on given devices: memory, step times, modes, expected speed.

Arithmetic only: figures of devices come from a data sheet or a short measurement, the acceptance is assumed.
The speeds are those of the closed form by which mode `auto` chooses before it has tried a mode.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ssd_serve.app.plan.devices import Forward, ForwardParts, Platform, cost_table
from ssd_serve.app.plan.known_models import PlannedModel
from ssd_serve.base.cost import HostCost
from ssd_serve.base.errors import SettingsError
from ssd_serve.verifier.control.forecast import DecodingLoad, DraftStep, forecast
from ssd_serve.verifier.drafters.pool import SpeculationMode

DRAFT_HOST_S = 1e-3
"""Host time of a draft step. Steps stretched to 1.8 ms took 2.8 ms in the benchmark of emulated devices on two
shared cores. Alone on a core, the host's part of a step of 8 nodes took 0.4 ms."""
PAYS = 1.05
"""Least speedup over plain decoding for which a drafter is worth its device."""
_SEARCH = [each / 100 for each in range(5, 100, 5)]


def measured_host() -> HostCost:
    """Host time of the verifier, measured on one core of an AMD EPYC. A round of one request with 8 nodes took 0.33 ms,
    of 32 such requests 3.64 ms. The share of a node, 6 of a request's 107 us, is assumed."""
    return HostCost(node_s=6e-6, request_s=59e-6, round_s=221e-6)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The load that a plan is made for."""

    acceptance: float = 0.75
    requests: int = 1
    context: int = 4096
    width: int = 16

    def check(self) -> None:
        """Raise `SettingsError` for a value out of range."""
        if not 0 <= self.acceptance < 1:
            raise SettingsError(
                "--acceptance must be from 0 to below 1: the share of first guesses that are right"
            )
        if not 1 <= self.requests <= 1024:
            raise SettingsError("--requests must be from 1 to 1024")
        if self.context < 1:
            raise SettingsError("--context must be at least 1 token")


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """Memory that one model needs on each of its devices, in bytes."""

    devices: int
    weights: float
    kv: float
    reserve: float
    free: float
    """Memory of a device before models are loaded."""

    @property
    def need(self) -> float:
        """Sum of all parts."""
        return self.weights + self.kv + self.reserve

    @property
    def fits(self) -> bool:
        """True if a device holds it."""
        return self.need <= self.free


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """A decoding mode with its devices, memory and speed."""

    drafting: SpeculationMode
    target: int
    draft: int
    """Number of devices of the drafter's own."""
    shares: tuple[MemoryShare, ...]
    """Memory of the target, and of the draft where it has a device of its own."""
    parts: ForwardParts
    """A target forward of one row for each request."""
    draft_s: float
    speed: float
    """Expected tokens a second over all requests; 0 where it does not fit."""

    @property
    def step_s(self) -> float:
        """Seconds of a target forward of one row for each request."""
        return self.parts.seconds


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """Figures that `ssd plan` prints for one pair."""

    platform: Platform
    options: PlanOptions
    target: PlannedModel
    draft: PlannedModel | None
    layouts: tuple[PlannedLayout, ...]
    pays_from: float | None
    """Least acceptance at which the draft's best mode is worth it; None if there is none."""

    @property
    def best(self) -> PlannedLayout | None:
        """Recommended layout: plain decoding unless a draft is clearly worth it; None: nothing fits."""
        plain = self.layouts[0]
        fastest = max(self.layouts, key=lambda layout: layout.speed)
        if not fastest.speed:
            return None
        return fastest if fastest.speed >= PAYS * plain.speed else plain

    @property
    def devices_needed(self) -> int | None:
        """Least number of devices that hold the target; None if no number does."""
        shares = (_share(self.platform, self.target, count, self.options) for count in self.target.ranks)
        return next((share.devices for share in shares if share.fits), None)


def make_plan(
    platform: Platform, target: PlannedModel, draft: PlannedModel | None, options: PlanOptions
) -> PlanEstimate:
    """Compare plain decoding, the draft in turns with the target, and the draft on a device of its own."""
    layouts = [_layout(SpeculationMode.PLAIN, platform, target, None, options)]
    if draft is not None:
        layouts.append(_layout(SpeculationMode.SYNC, platform, target, draft, options))
        if platform.count > 1:
            layouts.append(_layout(SpeculationMode.ASYNC, platform, target, draft, options))
    fastest = max(layouts[1:], key=lambda layout: layout.speed, default=None)
    pays_from = None
    if draft is not None and fastest is not None and fastest.speed:
        pays_from = _pays_from(platform, target, draft, options, fastest.drafting, layouts[0].speed)
    return PlanEstimate(platform, options, target, draft, tuple(layouts), pays_from)


def best_draft(plans: Sequence[PlanEstimate]) -> PlanEstimate:
    """Return the plan with the fastest layout."""
    return max(plans, key=lambda plan: plan.best.speed if plan.best is not None else 0.0)


def _layout(
    drafting: SpeculationMode,
    platform: Platform,
    target: PlannedModel,
    draft: PlannedModel | None,
    options: PlanOptions,
) -> PlannedLayout:
    own = int(drafting is SpeculationMode.ASYNC)
    devices = platform.group(target, platform.count - own)
    target_share = _share(
        platform, target, devices, options, draft if drafting is SpeculationMode.SYNC else None
    )
    shares = [target_share]
    if draft is not None and drafting is SpeculationMode.ASYNC:
        shares.append(_share(platform, draft, 1, options))
    fits = all(share.fits for share in shares)
    if platform.shares_memory:
        fits = sum(share.need for share in shares) <= target_share.free
    draft_s = _draft_s(drafting, platform, devices, draft, options)
    speed = _speed(drafting, platform, target, devices, draft, options, options.acceptance) if fits else 0.0
    tokens = options.context * options.requests
    parts = platform.parts(target, devices, Forward(options.requests, 0, tokens, tokens))
    return PlannedLayout(drafting, devices, own, tuple(shares), parts, draft_s, speed)


def _draft_s(
    drafting: SpeculationMode,
    platform: Platform,
    devices: int,
    draft: PlannedModel | None,
    options: PlanOptions,
) -> float:
    """Seconds of a draft step of `options.width` nodes; 0 without a draft."""
    if draft is None:
        return 0.0
    # A drafter in turns has the target's device; of cores, all of them.
    own = devices if drafting is SpeculationMode.SYNC and platform.shares_memory else 1
    seconds = platform.step_s(draft, own, Forward.of_one(options.width, options.context)) + DRAFT_HOST_S
    return seconds * (platform.disturbance(devices, draft) if drafting is SpeculationMode.ASYNC else 1.0)


def _speed(
    drafting: SpeculationMode,
    platform: Platform,
    target: PlannedModel,
    devices: int,
    draft: PlannedModel | None,
    options: PlanOptions,
    acceptance: float,
) -> float:
    """Expected tokens a second over all requests, by the closed form of mode `auto`."""
    beside = draft is not None and drafting is SpeculationMode.ASYNC
    factor = platform.disturbance(devices, draft) if draft is not None and beside else 1.0
    table = cost_table(platform, target, devices, options.context, factor)
    step = DraftStep(_draft_s(drafting, platform, devices, draft, options), options.width)
    load = DecodingLoad(options.requests, options.context)
    gains = forecast(load, 1.0, {drafting: table}, {drafting: step}, measured_host(), acceptance)
    return options.requests * gains[drafting]


def _share(
    platform: Platform,
    model: PlannedModel,
    devices: int,
    options: PlanOptions,
    inline: PlannedModel | None = None,
) -> MemoryShare:
    """Memory of a model split over `devices`, with a draft on one of them where it is inline."""
    parts = 1 if platform.shares_memory else devices
    tokens = options.requests * min(options.context, model.context)
    weights, kv = model.resident_bytes / parts, tokens * model.kv_bytes_per_token * model.kv_share(parts)
    if inline is not None:
        weights += inline.resident_bytes
        kv += tokens * inline.kv_bytes_per_token
    return MemoryShare(devices, weights, kv, platform.reserve_bytes, platform.memory_bytes)


def _pays_from(
    platform: Platform,
    target: PlannedModel,
    draft: PlannedModel,
    options: PlanOptions,
    drafting: SpeculationMode,
    plain: float,
) -> float | None:
    """Least acceptance, in steps of 0.05, at which `drafting` gives `PAYS` times the plain speed."""
    devices = platform.group(target, platform.count - int(drafting is SpeculationMode.ASYNC))
    for acceptance in _SEARCH:
        if _speed(drafting, platform, target, devices, draft, options, acceptance) >= PAYS * plain:
            return acceptance
    return None
