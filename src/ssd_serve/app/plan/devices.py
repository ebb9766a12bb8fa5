"""What a step of a model takes on devices: from a data sheet, or from roofs measured on this machine.

Knows sizes and seconds; runs no model and measures nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ssd_serve.app.plan.device_tables import DeviceSheet
from ssd_serve.app.plan.forwards import Forward, ForwardParts, forward_parts
from ssd_serve.app.plan.known_models import PlannedModel
from ssd_serve.app.plan.roof import Roof
from ssd_serve.base.cost import CostTable, Timing

_GIB = float(1 << 30)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXT_ROWS = (1, 8, 32)


class Platform(Protocol):
    """Some equal devices, of which a model takes one or several."""

    @property
    def unit(self) -> str:
        """What one device is called."""
        ...

    @property
    def origin(self) -> str:
        """Where its figures come from, with the figures."""
        ...

    @property
    def assumed(self) -> str:
        """What is assumed of it beside."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def memory_bytes(self) -> float:
        """Memory of one device; of all together where they share it."""
        ...

    @property
    def shares_memory(self) -> bool:
        """Whether all devices have one memory, as cores have."""
        ...

    @property
    def reserve_bytes(self) -> float:
        """Kept for captured graphs, activations and the process, on each device."""
        ...

    @property
    def cache_bytes(self) -> int:
        """What the devices' common cache holds; 0: nothing worth counting on."""
        ...

    def group(self, model: PlannedModel, most: int) -> int:
        """How many of `most` devices this model can be split over."""
        ...

    def parts(self, model: PlannedModel, devices: int, forward: Forward) -> ForwardParts:
        """Where the seconds of a forward go."""
        ...

    def step_s(self, model: PlannedModel, devices: int, forward: Forward) -> float:
        """Seconds of a forward."""
        ...

    def disturbance(self, target: int, draft: PlannedModel) -> float:
        """The factor by which a drafter at work on one more device slows `target` devices."""
        ...


@dataclass(frozen=True, slots=True)
class Sheets:
    """Separate devices as a data sheet describes them."""

    sheet: DeviceSheet
    count: int
    shares_memory: bool = False
    reserve_bytes: float = 2 * _GIB
    cache_bytes: int = 0

    @property
    def unit(self) -> str:
        """The device's name."""
        return self.sheet.name

    @property
    def origin(self) -> str:
        """The data sheet's figures."""
        s = self.sheet
        return (
            f"data sheet: {s.memory_gb:g} GB, {s.bandwidth_gb_s / 1000:g} TB/s, {s.bf16_tflops:g} TFLOPS "
            "in bf16 each"
        )

    @property
    def assumed(self) -> str:
        """The shares of them that a step is taken to attain."""
        s = self.sheet
        return (
            f"{s.bandwidth_share:.0%} of that bandwidth, {s.throughput_share:.0%} of those TFLOPS, "
            f"{1e6 * s.layer_s:.0f} us more a layer and {1e6 * s.row_s:.1f} us for each of its rows, "
            f"{1e6 * s.exchange_s:.0f} us an all-reduce, {1e3 * s.launch_s:.1f} ms a forward"
        )

    @property
    def memory_bytes(self) -> float:
        """Of one device."""
        return self.sheet.memory_gb * 1e9

    def group(self, model: PlannedModel, most: int) -> int:
        """As many as the engine's ranks can be."""
        return _shared_by(model, most)

    def parts(self, model: PlannedModel, devices: int, forward: Forward) -> ForwardParts:
        return forward_parts(self.sheet, model, devices, forward)

    def step_s(self, model: PlannedModel, devices: int, forward: Forward) -> float:
        return self.parts(model, devices, forward).seconds

    def disturbance(self, target: int, draft: PlannedModel) -> float:
        """Separate devices do not disturb each other."""
        del target, draft
        return 1.0


@dataclass(frozen=True, slots=True)
class MeasuredRoofs:
    """This machine: `roofs` by the number of cores, or that of one GPU at 1."""

    unit: str
    count: int
    roofs: Mapping[int, Roof]
    memory_bytes: float
    shares_memory: bool
    cache_bytes: int
    layer_s: float = 60e-6
    exchange_s: float = 50e-6

    @property
    def reserve_bytes(self) -> float:
        """Less where nothing is captured."""
        return (0.25 if self.shares_memory else 2) * _GIB

    @property
    def origin(self) -> str:
        """What was measured."""
        told = "; ".join(
            f"{cores if self.shares_memory else 'each'}: {roof.bandwidth / 1e9:.1f} GB/s, "
            f"{roof.flops / 1e12:.2g} TFLOPS"
            for cores, roof in sorted(self.roofs.items())
        )
        dtype = next(iter(self.roofs.values())).dtype
        return f"measured now in {dtype}, by cores: {told}" if self.shares_memory else f"measured now: {told}"

    @property
    def assumed(self) -> str:
        """What the measurement does not show."""
        split = "" if self.shares_memory else f" and {1e6 * self.exchange_s:.0f} us where it is split"
        return f"{1e6 * self.layer_s:.0f} us a layer beside its matrices{split}"

    def group(self, model: PlannedModel, most: int) -> int:
        """Cores share any matrix; GPUs are the engine's ranks."""
        return most if self.shares_memory else _shared_by(model, most)

    def parts(self, model: PlannedModel, devices: int, forward: Forward) -> ForwardParts:
        """Matrices as measured for so many rows, what lies beyond one row being multiplying; the KV cache at
        the bandwidth. Narrower weights than those that were measured save reading, not computing."""
        roof = self.roofs[devices] if self.shares_memory else self.roofs[1]
        ranks = 1 if self.shares_memory else devices
        rows, known = forward.rows, sorted(roof.seconds_per_byte)
        seconds_per_byte = float(np.interp(rows, known, [roof.seconds_per_byte[each] for each in known]))
        seconds_per_byte *= max(1.0, rows / known[-1])
        saved_s = (model.wide_bytes - model.matrix_bytes) * min(roof.seconds_per_byte.values())
        read_s = model.wide_bytes * roof.seconds_per_byte[known[0]]
        cache_bytes = forward.context * model.kv_bytes_per_token * model.kv_share(ranks) * ranks
        attention_s = cache_bytes / roof.bandwidth + forward.row_context * model.attention_flops / roof.flops
        return ForwardParts(
            launch_s=0.0,
            weights_s=(read_s - saved_s) / ranks,
            matmul_s=(model.wide_bytes * seconds_per_byte - read_s) / ranks,
            attention_s=attention_s / ranks,
            layers_s=model.layers * self.layer_s,
            exchange_s=model.layers * self.exchange_s if ranks > 1 else 0.0,
            sampling_s=0.0,
        )

    def step_s(self, model: PlannedModel, devices: int, forward: Forward) -> float:
        return self.parts(model, devices, forward).seconds

    def disturbance(self, target: int, draft: PlannedModel) -> float:
        """Cores share the memory's bandwidth, unless the drafter's weights stay in the cache."""
        if not self.shares_memory or draft.matrix_bytes < self.cache_bytes:
            return 1.0
        wanted = self.roofs[target].bandwidth + self.roofs[1].bandwidth
        return max(1.0, wanted / self.roofs[max(self.roofs)].bandwidth)


def cost_table(
    platform: Platform, model: PlannedModel, devices: int, context: int, factor: float = 1.0
) -> CostTable:
    """The table that the engine would have measured, where every forward takes `factor` times as long."""
    contexts = [(rows, 0) for rows in _ROWS] + [(rows, context) for rows in _CONTEXT_ROWS]
    return CostTable(
        [
            Timing(rows, each, factor * platform.step_s(model, devices, Forward.of_one(rows, each)))
            for rows, each in contexts
        ]
    )


def _shared_by(model: PlannedModel, most: int) -> int:
    return max(size for size in model.ranks if size <= most)
