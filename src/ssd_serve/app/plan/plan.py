"""Plan of a pair of models on given devices: memory, step times, modes, expected speed, as text and as JSON.

Arithmetic only: figures of devices come from a data sheet or a short measurement, the acceptance is assumed.
The speeds are those of the closed form by which mode `auto` chooses before it has tried a mode.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from ssd_serve.app.plan.devices import Forward, ForwardParts, Platform, cost_table
from ssd_serve.app.plan.known_models import PlannedModel
from ssd_serve.base.cost import HostCost
from ssd_serve.base.errors import SettingsError
from ssd_serve.verifier.control.mode_controller import DecodingLoad, DraftStep, forecast
from ssd_serve.verifier.drafters.pool import SpeculationMode

DRAFT_HOST_S = 1e-3
"""Host time of a draft step. Steps stretched to 1.8 ms took 2.8 ms in the benchmark of emulated devices on two
shared cores. Alone on a core, the host's part of a step of 8 nodes took 0.4 ms."""
VERIFIER_HOST = HostCost(node_s=6e-6, request_s=59e-6, round_s=221e-6)
"""Host time of the verifier, measured on one core of an AMD EPYC. A round of one request with 8 nodes took 0.33 ms,
of 32 such requests 3.64 ms. The share of a node, 6 of a request's 107 us, is assumed."""
SHARED_CORES_HOST = HostCost(node_s=6e-6, request_s=1.06e-3, round_s=221e-6)
"""The same where HTTP server and client run on the target's cores. On a Xeon a token took 0.7 ms of them for a client
that only reads, 1.3 ms for `ssd bench serve`. Step times of served rounds hold this already."""
PAYS = 1.05
"""Least speedup over plain decoding for which a drafter is worth its device."""
_GIB = float(1 << 30)
_MODES = {SpeculationMode.PLAIN: "ar", SpeculationMode.SYNC: "sd", SpeculationMode.ASYNC: "ssd"}
_NAMES = {
    SpeculationMode.PLAIN: "plain",
    SpeculationMode.SYNC: "draft inline",
    SpeculationMode.ASYNC: "draft beside",
}


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

    weights: float
    kv: float
    reserve: float
    free: float
    """Memory of a device before models are loaded."""

    @property
    def need(self) -> float:
        """Sum of all parts."""
        return self.weights + self.kv + self.reserve

    def __str__(self) -> str:
        """Describe the memory of one device."""
        return (
            f"weights {_size(self.weights)} + KV {_size(self.kv)} + graphs and buffers {_size(self.reserve)} of "
            f"{_size(self.free)} each: {'fits' if self.need <= self.free else 'does NOT fit'}"
        )


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """A decoding mode with its devices, memory and speed."""

    mode: SpeculationMode
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

    def as_json(self) -> dict[str, object]:
        """Return sizes in bytes, times in seconds."""
        return {
            "mode": _MODES[self.mode],
            "target_devices": self.target,
            "draft_devices": self.draft,
            "fits": all(share.need <= share.free for share in self.shares),
            "need_bytes": [round(share.need) for share in self.shares],
            "target_step_s": self.parts.seconds,
            "target_step_parts": asdict(self.parts),
            "draft_step_s": self.draft_s,
            "tokens_per_s": self.speed or None,
        }


class Plan:
    """Plain decoding, the draft in turns with the target, and the draft on a device of its own, compared."""

    def __init__(
        self, platform: Platform, target: PlannedModel, draft: PlannedModel | None, options: PlanOptions
    ) -> None:
        self.platform, self.target, self.draft, self.options = platform, target, draft, options
        modes = [SpeculationMode.PLAIN]
        if draft is not None:
            modes.append(SpeculationMode.SYNC)
            modes += [SpeculationMode.ASYNC] * (platform.count > 1)
        self.layouts = [self._layout(mode) for mode in modes]
        self.plain = self.layouts[0]
        self.fastest = max(self.layouts[1:], key=lambda layout: layout.speed, default=None)

    @property
    def best(self) -> PlannedLayout | None:
        """Recommended layout: plain decoding unless a draft is clearly worth it; None: nothing fits."""
        fastest = self.fastest
        if fastest is not None and fastest.speed and fastest.speed >= PAYS * self.plain.speed:
            return fastest
        return self.plain if self.plain.speed else None

    @cached_property
    def pays_from(self) -> float | None:
        """Least acceptance, in steps of 0.05, at which the draft's best mode is worth it; None: none is."""
        if self.fastest is None or not self.fastest.speed:
            return None
        for percent in range(5, 100, 5):
            if self._speed(self.fastest.mode, percent / 100) >= PAYS * self.plain.speed:
                return percent / 100
        return None

    @property
    def devices_needed(self) -> int | None:
        """Least number of devices that hold the target; None if no number does."""
        shares = ((count, self._share(self.target, count)) for count in self.target.ranks)
        return next((count for count, share in shares if share.need <= share.free), None)

    def as_json(self) -> dict[str, object]:
        """Return the plan with every layout; sizes in bytes, times in seconds."""
        return {
            "target": self.target.name,
            "draft": self.draft.name if self.draft is not None else None,
            "devices": self.platform.count,
            "device": self.platform.unit,
            "device_figures": self.platform.origin,
            "assumed": self._assumed(),
            "acceptance": self.options.acceptance,
            "requests": self.options.requests,
            "context": self.options.context,
            "layouts": [layout.as_json() for layout in self.layouts],
            "take": _MODES[self.best.mode] if self.best is not None else None,
            "draft_pays_from_acceptance": self.pays_from,
            "devices_needed": self.devices_needed,
        }

    def lines(self) -> list[str]:
        """Describe the plan in at most nine lines."""
        draft = f" with {self.draft.name} ({_size(self.draft.resident_bytes)})" if self.draft else ""
        return [
            f"{self.target.name} ({_size(self.target.resident_bytes)}){draft} on {self.platform.count} x "
            f"{self.platform.unit}; {self.platform.origin}",
            self._assumed(),
            *self._memory(),
            self._steps(),
            *map(self._line, self.layouts),
            self._verdict(),
        ]

    def gain(self) -> str:
        """Describe the draft's gain in its best mode, to compare drafts."""
        if self.draft is None or self.fastest is None or self.best is None:
            return "does not fit"
        gain = f"{self.fastest.speed:.1f} tokens/s"
        if self.plain.speed:
            gain = f"{self.fastest.speed / self.plain.speed:.2f}x {_NAMES[self.fastest.mode]}"
        return f"{self.draft.name} at {self.options.acceptance:g} {gain}"

    def note(self) -> str:
        """Describe what the figures leave out; empty if there is nothing."""
        notes: list[str] = []
        models = (self.target,) if self.draft is None else (self.target, self.draft)
        if widened := [model.name for model in models if model.fp8 is False]:
            notes.append(f"fp8 weights are widened on this device: {', '.join(widened)}")
        if self.target.matrix_bytes < self.platform.cache_bytes:
            notes.append("the target fits the cache and is faster than this; `ssd bench modes` measures it")
        if self.draft is not None and self.draft.vocabulary != self.target.vocabulary:
            notes.append(
                f"vocabularies of {self.target.vocabulary} and {self.draft.vocabulary} tokens: a pair needs "
                "one tokenizer"
            )
        return f"note: {'; '.join(notes)}" if notes else ""

    def _layout(self, mode: SpeculationMode) -> PlannedLayout:
        platform, options = self.platform, self.options
        devices = self._target_devices(mode)
        shares = [self._share(self.target, devices, self.draft if mode is SpeculationMode.SYNC else None)]
        if self.draft is not None and mode is SpeculationMode.ASYNC:
            shares.append(self._share(self.draft, 1))
        fits = all(share.need <= share.free for share in shares)
        if platform.shares_memory:
            fits = sum(share.need for share in shares) <= shares[0].free
        tokens = options.context * options.requests
        return PlannedLayout(
            mode,
            devices,
            len(shares) - 1,
            tuple(shares),
            platform.parts(self.target, devices, Forward(options.requests, 0, tokens, tokens)),
            self._draft_s(mode, devices),
            self._speed(mode, options.acceptance) if fits else 0.0,
        )

    def _target_devices(self, mode: SpeculationMode) -> int:
        return self.platform.group(self.target, self.platform.count - int(mode is SpeculationMode.ASYNC))

    def _draft_s(self, mode: SpeculationMode, devices: int) -> float:
        """Seconds of a draft step of `options.width` nodes; 0 without a draft."""
        if self.draft is None or mode is SpeculationMode.PLAIN:
            return 0.0
        # A drafter in turns has the target's device; of cores, all of them.
        own = devices if mode is SpeculationMode.SYNC and self.platform.shares_memory else 1
        forward = Forward.of_one(self.options.width, self.options.context)
        return (self.platform.step_s(self.draft, own, forward) + DRAFT_HOST_S) * self._slowdown(mode, devices)

    def _slowdown(self, mode: SpeculationMode, devices: int) -> float:
        if self.draft is None or mode is not SpeculationMode.ASYNC:
            return 1.0
        return self.platform.disturbance(devices, self.draft)

    def _speed(self, mode: SpeculationMode, acceptance: float) -> float:
        """Expected tokens a second over all requests, by the closed form of mode `auto`."""
        requests, context = self.options.requests, self.options.context
        devices = self._target_devices(mode)
        table = cost_table(self.platform, self.target, devices, context, self._slowdown(mode, devices))
        step = DraftStep(self._draft_s(mode, devices), self.options.width)
        load = DecodingLoad(requests, context)
        shared = self.platform.shares_memory and self.platform.served(self.target, devices) is None
        host = SHARED_CORES_HOST if shared else VERIFIER_HOST
        return requests * forecast(load, {mode: table}, {mode: step}, host, acceptance)[mode]

    def _share(self, model: PlannedModel, devices: int, inline: PlannedModel | None = None) -> MemoryShare:
        """Memory of a model split over `devices`, with a draft on one of them where it is inline."""
        parts = 1 if self.platform.shares_memory else devices
        tokens = self.options.requests * min(self.options.context, model.context)
        weights, kv = model.resident_bytes / parts, tokens * model.kv_bytes_per_token * model.kv_share(parts)
        if inline is not None:
            weights += inline.resident_bytes
            kv += tokens * inline.kv_bytes_per_token
        return MemoryShare(weights, kv, self.platform.reserve_bytes, self.platform.memory_bytes)

    def _assumed(self) -> str:
        load = self.options
        draft = ""
        if self.draft is not None:
            draft = (
                f"acceptance {load.acceptance:g} (first guesses that are right), {1e3 * DRAFT_HOST_S:g} ms of "
                "host work a draft step, "
            )
        return (
            f"assumed: {load.requests} request(s) of {load.context} tokens, {draft}{self.platform.assumed}; "
            "speeds below are computed from this, not measured"
        )

    def _memory(self) -> list[str]:
        lines = [f"memory, target on {self._count(self.plain)}: {self.plain.shares[0]}"]
        if self.layouts[1:]:
            last = self.layouts[-1]
            if last.mode is SpeculationMode.SYNC:
                lines.append(f"memory, with the draft inline: {last.shares[0]}")
            else:
                target, draft = last.shares
                lines.append(
                    f"memory, draft beside: target on {self._count(last)}: {target}; draft on 1: {draft}"
                )
        return lines

    def _steps(self) -> str:
        parts = [
            f"expected steps: target {1e3 * self.plain.parts.seconds:.1f} ms on {self._count(self.plain)}"
        ]
        parts += [
            f"{_NAMES[layout.mode]}: target {1e3 * layout.parts.seconds:.1f} ms, "
            f"draft {1e3 * layout.draft_s:.1f} ms for {self.options.width} nodes "
            f"({layout.draft_s / layout.parts.seconds:.2f} of it)"
            for layout in self.layouts[1:]
        ]
        return "; ".join(parts)

    def _line(self, layout: PlannedLayout) -> str:
        idle = self.platform.count - layout.target - layout.draft
        where = f"target on {self._count(layout)}"
        where += f", draft on {layout.draft}" if layout.draft else ""
        where += f", {idle} idle" if idle else ""
        label = f"  {_NAMES[layout.mode]:<13} ({where})"
        if not layout.speed:
            return f"{label}: does not fit"
        faster = ""
        if self.plain.speed and layout is not self.plain:
            faster = f", {layout.speed / self.plain.speed:.2f}x plain"
        return f"{label}: {layout.speed:.1f} tokens/s{faster}"

    def _verdict(self) -> str:
        best, unit = self.best, self.platform.unit
        if best is None:
            needed = self.devices_needed
            if self.platform.shares_memory:
                return "take: nothing; the target does not fit into this memory"
            if needed is None:
                most = f"{self.target.ranks[-1]} x {unit}"
                return f"take: nothing; the target does not fit on {most}, the most that can share it"
            return f"take: nothing; the target alone fits from {needed} x {unit} on"
        split = best.target > 1 and not self.platform.shares_memory
        take = (
            f"take: {'plain decoding' if best is self.plain else _NAMES[best.mode]} (mode {_MODES[best.mode]}"
        )
        take += f", SSD_TENSOR_PARALLEL={best.target})" if split else ")"
        if best is not self.plain and self.plain.speed:
            take += f", {best.speed / self.plain.speed:.2f}x plain decoding on the same devices"
        if self.draft is None:
            return f"{take}; a DRAFT shows what speculation would give"
        if self.pays_from is None:
            return f"{take}; no acceptance makes it pay"
        return f"{take}; a draft of this size pays from an acceptance of {self.pays_from:.2f} on"

    def _count(self, layout: PlannedLayout) -> str:
        return f"{layout.target} core(s)" if self.platform.shares_memory else f"{layout.target}"


def best_draft(plans: Sequence[Plan]) -> Plan:
    """Return the plan with the fastest layout."""
    return max(plans, key=lambda plan: plan.best.speed if plan.best is not None else 0.0)


def page(plans: Sequence[Plan]) -> str:
    """Make the page: at most ten lines, and one for other drafts; the modes are those of the best draft."""
    plan = best_draft(plans)
    drafts = f"drafts: {'; '.join(each.gain() for each in plans)}" if len(plans) > 1 else ""
    return "\n".join(line for line in (*plan.lines(), drafts, plan.note()) if line)


def _size(size: float) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= 0.1 * _GIB else f"{size / (1 << 20):.0f} MiB"
