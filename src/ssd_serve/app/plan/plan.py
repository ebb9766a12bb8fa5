"""What a machine can give a pair of models: memory, step times, layouts, expected speed-up.

Arithmetic and simulated time, no run: figures of devices are a data sheet's or measured in a moment, the
acceptance is assumed. Knows shapes and devices; loads no weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ssd_serve.app.plan.devices import Platform, cost_table
from ssd_serve.app.plan.forwards import Forward, ForwardParts
from ssd_serve.app.plan.guesses import DraftQuality
from ssd_serve.app.plan.known_models import PlannedModel
from ssd_serve.app.plan.simulation import Costs, Simulated, measured_host, simulate
from ssd_serve.base.errors import SettingsError
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.verifier.control.decision import SpeculationMode

DRAFT_HOST_S = 1e-3
"""What the host adds to a draft step. Steps that were stretched to 1.8 ms took 2.8 ms in the project's
benchmark of emulated devices, on two cores that other processes shared; alone on a core the host's part of a
step of 8 nodes took 0.4 ms (`python -m lab.host`)."""
PAYS = 1.05
"""Speculation that gives less than this over plain decoding is not worth a drafter."""
_ROUNDS, _MIN_ROUNDS = 200, 30
_SEARCH_ROUNDS, _SEARCH_STEPS = 60, 4
_FAN_OUT = 8
"""Candidates of a node: the engine's further ones are seldom right, and cost simulated time."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What is asked of the machine."""

    acceptance: float = 0.75
    requests: int = 1
    context: int = 4096
    width: int = 16

    def check(self) -> None:
        """A clear error for a value that cannot be meant."""
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
    """What one model needs on each of its devices, in bytes."""

    devices: int
    weights: float
    kv: float
    reserve: float
    free: float
    """Of a device, before anything is loaded."""

    @property
    def need(self) -> float:
        """All of it."""
        return self.weights + self.kv + self.reserve

    @property
    def fits(self) -> bool:
        """Whether a device holds it."""
        return self.need <= self.free


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """One way to use the devices. `expected` is None where it does not fit, or needs devices that are not
    there."""

    drafting: SpeculationMode
    target: int
    draft: int
    """Devices of the drafter's own."""
    shares: tuple[MemoryShare, ...]
    """Of the target, and of the draft where it is elsewhere."""
    parts: ForwardParts
    """Of a target forward of one row for each request."""
    draft_s: float
    expected: Simulated | None

    @property
    def step_s(self) -> float:
        """Seconds of that forward."""
        return self.parts.seconds

    @property
    def speed(self) -> float:
        """Expected tokens a second; 0 where it cannot run."""
        return self.expected.tokens_per_s if self.expected is not None else 0.0


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """Everything that the page tells."""

    platform: Platform
    wish: PlanOptions
    target: PlannedModel
    draft: PlannedModel | None
    layouts: tuple[PlannedLayout, ...]
    pays_from: float | None
    """The least acceptance with which the best layout of the draft is worth it; None: with none."""

    @property
    def best(self) -> PlannedLayout | None:
        """The layout to take: plain decoding unless a draft is clearly worth it; None: nothing fits."""
        plain = self.layouts[0]
        fastest = max(self.layouts, key=lambda layout: layout.speed)
        if not fastest.speed:
            return None
        return fastest if fastest.speed >= PAYS * plain.speed else plain

    @property
    def devices_needed(self) -> int | None:
        """The fewest devices that hold the target; None where no number of them does."""
        shares = (_share(self.platform, self.target, count, self.wish) for count in self.target.ranks)
        return next((share.devices for share in shares if share.fits), None)


def make_plan(
    platform: Platform, target: PlannedModel, draft: PlannedModel | None, wish: PlanOptions
) -> PlanEstimate:
    """Compare plain decoding, the draft in turns with the target, and the draft on a device of its own.

    Expected tokens come from the engine itself in virtual time, which agrees within some per cent with
    section 5 of the design: 2.9 and 3.5 tokens a target step for synchronous and live trees at an acceptance
    of 0.725 and draft steps of 0.094.
    """
    layouts = [_layout(SpeculationMode.PLAIN, platform, target, None, wish)]
    if draft is not None:
        layouts.append(_layout(SpeculationMode.SYNC, platform, target, draft, wish))
        if platform.count > 1:
            layouts.append(_layout(SpeculationMode.ASYNC, platform, target, draft, wish))
    fastest = max(layouts[1:], key=lambda layout: layout.speed, default=None)
    pays_from = None
    if draft is not None and fastest is not None and fastest.expected is not None:
        pays_from = _pays_from(platform, target, draft, wish, fastest.drafting, layouts[0].speed)
    return PlanEstimate(platform, wish, target, draft, tuple(layouts), pays_from)


def best_draft(plans: Sequence[PlanEstimate]) -> PlanEstimate:
    """The plan whose layout is the fastest."""
    return max(plans, key=lambda plan: plan.best.speed if plan.best is not None else 0.0)


def _layout(
    drafting: SpeculationMode,
    platform: Platform,
    target: PlannedModel,
    draft: PlannedModel | None,
    wish: PlanOptions,
) -> PlannedLayout:
    own = int(drafting is SpeculationMode.ASYNC)
    devices = platform.group(target, platform.count - own)
    target_share = _share(
        platform, target, devices, wish, draft if drafting is SpeculationMode.SYNC else None
    )
    shares = [target_share]
    if draft is not None and drafting is SpeculationMode.ASYNC:
        shares.append(_share(platform, draft, 1, wish))
    fits = all(share.fits for share in shares)
    if platform.shares_memory:
        fits = sum(share.need for share in shares) <= target_share.free
    costs = _costs(drafting, platform, target, devices, draft, wish)
    expected = _expected(drafting, costs, wish, wish.acceptance) if fits else None
    tokens = wish.context * wish.requests
    parts = platform.parts(target, devices, Forward(wish.requests, 0, tokens, tokens))
    return PlannedLayout(drafting, devices, own, tuple(shares), parts, costs.draft_s, expected)


def _costs(
    drafting: SpeculationMode,
    platform: Platform,
    target: PlannedModel,
    devices: int,
    draft: PlannedModel | None,
    wish: PlanOptions,
) -> Costs:
    draft_s, factor = 0.0, 1.0
    if draft is not None:
        # A drafter in turns has the target's device; of cores, all of them.
        own = devices if drafting is SpeculationMode.SYNC and platform.shares_memory else 1
        forward_s = platform.step_s(draft, own, Forward.of_one(wish.width, wish.context))
        draft_s = forward_s + DRAFT_HOST_S
        factor = platform.disturbance(devices, draft) if drafting is SpeculationMode.ASYNC else 1.0
    limits = GrowthLimits(width=wish.width, fan_out=_FAN_OUT, depth=16, nodes=4096)
    table = cost_table(platform, target, devices, wish.context, factor)
    return Costs(table, measured_host(), factor * draft_s, limits, wish.context, DRAFT_HOST_S)


def _expected(
    drafting: SpeculationMode, costs: Costs, wish: PlanOptions, acceptance: float, rounds: int = _ROUNDS
) -> Simulated:
    return simulate(
        drafting, DraftQuality(acceptance), costs, wish.requests, max(_MIN_ROUNDS, rounds // wish.requests)
    )


def _share(
    platform: Platform,
    model: PlannedModel,
    devices: int,
    wish: PlanOptions,
    inline: PlannedModel | None = None,
) -> MemoryShare:
    """Memory of a model split over `devices`, with a draft on one of them where it is inline."""
    parts = 1 if platform.shares_memory else devices
    tokens = wish.requests * min(wish.context, model.context)
    weights, kv = model.resident_bytes / parts, tokens * model.kv_bytes_per_token * model.kv_share(parts)
    if inline is not None:
        weights += inline.resident_bytes
        kv += tokens * inline.kv_bytes_per_token
    return MemoryShare(devices, weights, kv, platform.reserve_bytes, platform.memory_bytes)


def _pays_from(
    platform: Platform,
    target: PlannedModel,
    draft: PlannedModel,
    wish: PlanOptions,
    drafting: SpeculationMode,
    plain: float,
) -> float | None:
    """By halving: the least acceptance at which `drafting` gives `PAYS` times the plain speed."""
    devices = platform.group(target, platform.count - int(drafting is SpeculationMode.ASYNC))
    costs = _costs(drafting, platform, target, devices, draft, wish)
    low, high = 0.05, 0.95
    if _expected(drafting, costs, wish, high, _SEARCH_ROUNDS).tokens_per_s < PAYS * plain:
        return None
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        if _expected(drafting, costs, wish, middle, _SEARCH_ROUNDS).tokens_per_s < PAYS * plain:
            low = middle
        else:
            high = middle
    return high
