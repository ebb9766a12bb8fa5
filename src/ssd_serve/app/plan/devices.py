"""Seconds of a forward on devices: from a data sheet, or from roofs measured on this machine."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ssd_serve.app.plan.device_tables import DeviceSheet
from ssd_serve.app.plan.known_models import PlannedModel
from ssd_serve.base.cost import CostTable, Reading, Timing
from ssd_serve.base.logs import get_logger
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.models.memory import available_memory
from ssd_serve.models.roof import QUICK, Roof, cpu_roofs, last_level_cache, measure_roof, roof_dtype
from ssd_serve.models.sizes import PACKED
from ssd_serve.verifier.control.timing import TimingFiles, cpu_identity

_GIB = float(1 << 30)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXT_ROWS = (1, 8, 32)
_ELEMENT = 2
"""Bytes of an activation."""
_LOGIT_BYTES = 10
"""Traffic of one logit: written and read in bf16, scored and reduced in fp32."""


@dataclass(frozen=True, slots=True)
class Forward:
    """The rows of a forward, over all of its requests."""

    rows: int
    """Roots, tree nodes and prompt tokens."""
    prompt: int = 0
    """Rows that are prompt tokens; their logits are not computed."""
    context: int = 0
    """Tokens of KV cache that attention reads, each request's counted once."""
    row_context: int = 0
    """Sum over all rows of the tokens that the row attends to."""

    @classmethod
    def of_one(cls, rows: int, context: int) -> "Forward":
        """Make the forward of one request: a root and its tree, after `context` tokens."""
        return cls(rows, 0, context, rows * context)


@dataclass(frozen=True, slots=True)
class ForwardParts:
    """The consecutive parts of a forward, in seconds."""

    launch_s: float
    """Time from the host to the first kernel, and from the last kernel back."""
    weights_s: float
    """Reading every matrix once."""
    matmul_s: float
    """Multiplying, as far as reading the weights does not hide it."""
    attention_s: float
    """Reading the KV cache, and attention's arithmetic."""
    layers_s: float
    """Small kernels of each layer, and their cost for each row."""
    exchange_s: float
    """All-reduces between the ranks."""
    sampling_s: float

    @property
    def seconds(self) -> float:
        """Sum of all parts."""
        device_s = self.weights_s + self.matmul_s + self.attention_s + self.layers_s
        return self.launch_s + device_s + self.exchange_s + self.sampling_s


@dataclass(frozen=True, slots=True)
class Sheets:
    """`count` separate devices as a data sheet describes them."""

    sheet: DeviceSheet
    count: int
    shares_memory: bool = False
    reserve_bytes: float = 2 * _GIB
    """Memory of each device for captured graphs, activations and the process."""
    cache_bytes: int = 0
    """Size of a cache common to all devices, if it is worth counting."""

    @property
    def unit(self) -> str:
        """Name of one device."""
        return self.sheet.name

    @property
    def origin(self) -> str:
        """The data sheet's figures as text."""
        s = self.sheet
        return (
            f"data sheet: {s.memory_gb:g} GB, {s.bandwidth_gb_s / 1000:g} TB/s, {s.bf16_tflops:g} TFLOPS "
            "in bf16 each"
        )

    @property
    def assumed(self) -> str:
        """The shares of these figures that a forward is assumed to attain, as text."""
        s = self.sheet
        return (
            f"{s.bandwidth_share:.0%} of that bandwidth, {s.throughput_share:.0%} of those TFLOPS, "
            f"{1e6 * s.layer_s:.0f} us more a layer and {1e6 * s.row_s:.1f} us for each of its rows, "
            f"{1e6 * s.exchange_s:.0f} us an all-reduce, {1e3 * s.launch_s:.1f} ms a forward"
        )

    @property
    def memory_bytes(self) -> float:
        """Memory of one device."""
        return self.sheet.memory_gb * 1e9

    def group(self, model: PlannedModel, most: int) -> int:
        """Number of devices, at most `most`, that the model can be split over."""
        return max(size for size in model.ranks if size <= most)

    def parts(self, model: PlannedModel, devices: int, forward: Forward) -> ForwardParts:
        """Compute the parts of a forward of a model that is split over `devices`."""
        sheet, ranks = self.sheet, devices
        bandwidth = ranks * sheet.bandwidth_share * sheet.bandwidth_gb_s * 1e9
        flops = ranks * sheet.throughput_share * sheet.bf16_tflops * 1e12
        weights_s = model.matrix_bytes / bandwidth
        beyond_reading_s = max(0.0, forward.prompt * model.flops_per_row / flops - weights_s)
        # A head that several ranks need is held, and read, by each of them.
        cache_bytes = forward.context * model.kv_bytes_per_token * model.kv_share(ranks) * ranks
        decoding = forward.rows - forward.prompt
        exchange_s = 0.0
        if ranks > 1:  # two sums a layer, each a reduce-scatter and an all-gather
            speed = 1e9 * min(sheet.links_gb_s, (ranks - 1) * sheet.peer_gb_s)
            bytes_out = 2 * (ranks - 1) / ranks * forward.rows * model.hidden * _ELEMENT
            exchange_s = 2 * model.layers * (sheet.exchange_s + bytes_out / speed)
        return ForwardParts(
            launch_s=sheet.launch_s,
            weights_s=weights_s,
            matmul_s=sheet.exposed_share * decoding * model.flops_per_row / flops + beyond_reading_s,
            attention_s=cache_bytes / bandwidth + forward.row_context * model.attention_flops / flops,
            layers_s=model.layers
            * (sheet.layer_s + decoding * sheet.row_s + (decoding > 1) * sheet.several_s),
            exchange_s=exchange_s,
            sampling_s=decoding * model.vocabulary * _LOGIT_BYTES / bandwidth,
        )

    def step_s(self, model: PlannedModel, devices: int, forward: Forward) -> float:
        """Seconds of a forward."""
        return self.parts(model, devices, forward).seconds

    def served(self, model: PlannedModel, devices: int) -> CostTable | None:
        """Return the step times of earlier sessions: none here."""
        del model, devices
        return None

    def disturbance(self, target: int, draft: PlannedModel) -> float:
        """Return the factor by which a drafter on its own device slows the target: none here."""
        del target, draft
        return 1.0


@dataclass(frozen=True, slots=True)
class MeasuredRoofs:
    """This machine's devices: `roofs` by number of cores, or the roof of one GPU at 1."""

    unit: str
    count: int
    roofs: Mapping[int, Roof]
    memory_bytes: float
    """Memory of one GPU, or of all cores together."""
    shares_memory: bool
    cache_bytes: int
    exchange_s: float = 50e-6
    folder: Path | None = None
    """Folder where serving stores the step times of models."""
    packed: Mapping[int, Roof] = field(default_factory=dict[int, Roof])
    """Roofs of packed weights, where a model has them."""

    def served(self, model: PlannedModel, devices: int) -> CostTable | None:
        """Return the step times of earlier sessions on so many cores; None: it was not served on them."""
        if self.folder is None or not model.served_dtype:
            return None
        name = cpu_identity(
            model.name,
            layers=model.layers,
            hidden=model.hidden,
            vocabulary=model.vocabulary,
            dtype=model.served_dtype,
            cores=devices,
        )
        stored = TimingFiles(self.folder, get_logger("plan")).stored(name)
        return CostTable(stored) if stored else None

    @property
    def reserve_bytes(self) -> float:
        """Memory for the process, and on GPUs for captured graphs."""
        return (0.25 if self.shares_memory else 2) * _GIB

    @property
    def origin(self) -> str:
        """The measured figures as text."""
        kinds = {roof.dtype: roofs for roofs in (self.roofs, self.packed) for roof in roofs.values()}
        figures = "; ".join(
            f"{cores if self.shares_memory else 'each'}: {roof}"
            for roofs in kinds.values()
            for cores, roof in sorted(roofs.items())
        )
        return f"measured on this machine{', by cores' if self.shares_memory else ''}: {figures}"

    @property
    def assumed(self) -> str:
        """The constants that the measurement does not show, as text."""
        split = "" if self.shares_memory else f" and {1e6 * self.exchange_s:.0f} us where it is split"
        layer_s = self.roofs[max(self.roofs)].layers_s(1, 1)
        return f"{1e6 * layer_s:.0f} us a layer beside its matrices{split}"

    def group(self, model: PlannedModel, most: int) -> int:
        """Number of devices that the model uses: all cores, or as many GPUs as ranks can share it."""
        return most if self.shares_memory else max(size for size in model.ranks if size <= most)

    def parts(self, model: PlannedModel, devices: int, forward: Forward) -> ForwardParts:
        """Compute the parts of a forward. Weights narrower than the measured dtype save reading, not
        computing."""
        if (table := self.served(model, devices)) is not None:
            seconds = table.seconds(forward.rows, Reading(forward.context, forward.row_context))
            return ForwardParts(0.0, seconds, 0.0, 0.0, 0.0, 0.0, 0.0)
        packed = self.packed if roof_dtype(model.served_dtype or "bf16") == PACKED else {}
        roof = (packed or self.roofs)[devices if self.shares_memory else 1]
        ranks = 1 if self.shares_memory else devices
        wide = model.matrix_bytes if packed else model.wide_bytes
        saved_s = (wide - model.matrix_bytes) * min(roof.seconds_per_byte.values())
        read_s = roof.product_s(wide, 1)
        cache_bytes = forward.context * model.kv_bytes_per_token * model.kv_share(ranks) * ranks
        attention_s = cache_bytes / roof.bandwidth + forward.row_context * model.attention_flops / roof.flops
        return ForwardParts(
            launch_s=0.0,
            weights_s=(read_s - saved_s) / ranks,
            matmul_s=(roof.product_s(wide, forward.rows) - read_s) / ranks,
            attention_s=attention_s / ranks,
            layers_s=roof.layers_s(model.layers, forward.rows),
            exchange_s=model.layers * self.exchange_s if ranks > 1 else 0.0,
            sampling_s=0.0,
        )

    def step_s(self, model: PlannedModel, devices: int, forward: Forward) -> float:
        """Seconds of a forward."""
        return self.parts(model, devices, forward).seconds

    def disturbance(self, target: int, draft: PlannedModel) -> float:
        """Return the factor by which a drafter on one more core slows `target` cores: they share the memory's
        bandwidth, unless the drafter's weights stay in the cache."""
        if not self.shares_memory or draft.matrix_bytes < self.cache_bytes:
            return 1.0
        wanted = self.roofs[target].bandwidth + self.roofs[1].bandwidth
        return max(1.0, wanted / self.roofs[max(self.roofs)].bandwidth)


Platform = Sheets | MeasuredRoofs
"""Equal devices, of which a model takes one or several."""


def this_cpu(
    cores: Sequence[int], dtypes: Collection[str], folder: Path, native: NativeLibrary | None
) -> MeasuredRoofs:
    """Cores as devices: one, all but one (which a drafter would take), and all of them. Their roofs in these dtypes
    are measured once and stored in `folder`, where serving reads them."""
    memory, cache = available_memory("cpu"), last_level_cache()
    by_dtype = {
        dtype: {roof.cores: roof for roof in never_slower(cpu_roofs(cores, dtype, folder, native))}
        for dtype in dtypes
    }
    packed = by_dtype.get(PACKED, {})
    wide = next((roofs for dtype, roofs in by_dtype.items() if dtype != PACKED), packed)
    return MeasuredRoofs("CPU core", len(cores), wide, memory, True, cache, folder=folder, packed=packed)


def never_slower(roofs: Sequence[Roof]) -> list[Roof]:
    """Make roofs of ever more cores at least as good as those before: a core that another process uses at the
    moment is no property of the machine."""
    found: list[Roof] = []
    for roof in roofs:
        if found:
            last = found[-1]
            times = roof.seconds_per_byte.items()
            faster = {rows: min(each, last.seconds_per_byte[rows]) for rows, each in times}
            roof = replace(roof, seconds_per_byte=faster, flops=max(roof.flops, last.flops))
        found.append(roof)
    return found


def this_gpu(count: int, dtype: str) -> MeasuredRoofs:
    """Measure the first GPU, which stands for all `count`."""
    import torch

    memory = available_memory("cuda:0")
    roofs = {1: measure_roof("cuda:0", dtype, (), QUICK)}
    return MeasuredRoofs(torch.cuda.get_device_name(0), count, roofs, memory, False, 0)


def cost_table(
    platform: Platform, model: PlannedModel, devices: int, context: int, factor: float = 1.0
) -> CostTable:
    """Make the table that the engine would measure, where every forward takes `factor` times as long."""
    contexts = [(rows, 0) for rows in _ROWS] + [(rows, context) for rows in _CONTEXT_ROWS]
    return CostTable(
        [
            Timing(rows, each, factor * platform.step_s(model, devices, Forward.of_one(rows, each)))
            for rows, each in contexts
        ]
    )
