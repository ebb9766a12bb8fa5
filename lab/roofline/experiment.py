"""How far decoding is from what its device can do: `python -m lab.roofline`.

The roof of a round is `tokens a round / max(weight bytes / bandwidth, operations / throughput)`: the target
reads its weights once, whatever it verifies. Bandwidth and throughput are measured now; tokens, nodes and
shares of the time come from a result of `ssd bench modes` in its real setting. What attention reads is left
out on both sides. Throughput is that of the dtype, also where a device multiplies fp8 weights as they are.
Knows result files, sizes and roofs; runs no engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from ssd_serve.bench.document import read_file
from ssd_serve.bench.machine import hardware
from ssd_serve.bench.modes_result import ModesRow
from ssd_serve.bench.tables import markdown_table
from ssd_serve.bench.workload import BALLAST_HIDDEN, TARGET_LAYERS
from ssd_serve.devices import parse_device
from ssd_serve.errors import UserError
from ssd_serve.models.architectures.registry import describe
from ssd_serve.models.config import read_json
from ssd_serve.models.hub import embedded_folder
from ssd_serve.models.ranks.parallel import Parallel
from ssd_serve.models.sizes import model_sizes
from ssd_serve.plan.roof import Roof, measure_roof
from ssd_serve.recipes.ballast import BallastSizes, enlarged, enlarged_config

TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class _ModesResult(msgspec.Struct, frozen=True):
    """What is read of a result of `ssd bench modes`."""

    results: list[ModesRow]
    hardware: dict[str, object]


@dataclass(frozen=True, slots=True)
class Distance:
    """One mode against its roof. Shares multiply: `reached` is about `forward_share * forward_reached`."""

    setting: str
    shape: str
    temperature: float
    cores: int
    tokens_per_s: float
    tokens_per_round: float
    rows_per_round: float
    roof_tokens_per_s: float
    reached: float
    """Measured tokens a second as a share of the roof."""
    forward_reached: float
    """The least time of a forward as a share of what forwards took."""
    forward_share: float
    wait_share: float
    host_share: float
    bound_by: str


def distances(
    rows: Sequence[ModesRow], roofs: Sequence[Roof], weight_bytes: float, flops_per_row: float
) -> list[Distance]:
    """Every row of real devices whose number of cores has a roof; a GPU is 0 of them. One request: a round is
    its root and its nodes."""
    found: list[Distance] = []
    by_cores = {roof.cores: roof for roof in roofs}
    for row in rows:
        device = parse_device(row.target)
        roof = by_cores.get(len(device.indices) if device.kind == "cpu" else 0)
        if roof is None or row.setting != "real":
            continue
        verified = 1 + row.nodes_per_round
        min_s = roof.seconds(weight_bytes, verified * flops_per_row)
        round_s = row.tokens_per_round / row.tokens_per_s
        found.append(
            Distance(
                setting=row.setting,
                shape=row.shape,
                temperature=row.temperature,
                cores=roof.cores,
                tokens_per_s=row.tokens_per_s,
                tokens_per_round=row.tokens_per_round,
                rows_per_round=verified,
                roof_tokens_per_s=row.tokens_per_round / min_s,
                reached=min_s / round_s,
                forward_reached=min_s / (row.forward_share * round_s),
                forward_share=row.forward_share,
                wait_share=row.wait_share,
                host_share=row.host_share,
                bound_by="memory" if min_s <= weight_bytes / roof.bandwidth else "computing",
            )
        )
    return found


def run_roofline(
    modes: Path | None, target: Path | None, device: str, dtype: str, cores: Sequence[int]
) -> dict[str, object]:
    """Measure the roofs, one core and all of them or one GPU, and compare them with a result file.

    `device` is torch's name, `dtype` one of fp32, bf16, fp16. `target` None: the ballast model that `ssd
    bench modes` uses.
    """
    name = TORCH_NAMES[dtype]
    found = None if modes is None else read_file(_ModesResult, modes, "ssd bench modes")
    if modes is not None and found is not None:
        _same_machine(modes, found.hardware)
    counts = [1, *(count for count in (2, 4, 8, 16, 32, 64, 128) if count < len(cores)), len(cores)]
    bound = [cores[:count] for count in dict.fromkeys(counts)] if device == "cpu" else [()]
    roofs = [measure_roof(device, name, each) for each in bound]
    result: dict[str, object] = {
        "bench": "roofline",
        "device": device,
        "dtype": dtype,
        "roofs": [_roof(each) for each in roofs],
    }
    if modes is not None and found is not None:
        if target is None:
            elements = _benchmark_elements()
            weight_bytes = elements * ITEM_BYTES[dtype]
        else:
            sizes = model_sizes(target, device=device, dtype=dtype)
            elements, weight_bytes = sizes.elements, sizes.matrix_bytes
        rows = distances(found.results, roofs, weight_bytes, 2.0 * elements)
        result["target"] = {"weight_bytes": weight_bytes, "flops_per_row": 2 * elements}
        result["modes_file"] = modes.name
        result["distances"] = [asdict(row) for row in rows]
    return result


def page(result: Mapping[str, object]) -> str:
    """The result in Markdown."""
    read = msgspec.convert(result, type=_Page)
    rows = (
        (
            f"{roof.cores} core(s)" if roof.cores else read.device,
            ", ".join(f"{rows}: {value:.1f}" for rows, value in roof.gb_per_s_by_rows.items()),
            f"{roof.gflops:.0f}",
        )
        for roof in read.roofs
    )
    parts = [
        f"Roofs in {read.dtype}, the best of some repeats of products of few rows and of a large product:",
        markdown_table(("device", "weights read, GB/s, by rows", "throughput, GFLOP/s"), rows),
    ]
    if read.target is not None:
        parts += _distances(read, read.target.weight_bytes)
    gpus = read.hardware.get("gpus")
    parts.append(
        f"Measured on {read.hardware.get('cpu')}, {read.hardware.get('cores')} cores"
        + (f", {', '.join(map(str, gpus))}" if isinstance(gpus, list) and gpus else "")
        + f"; torch {read.versions.get('torch')}."
    )
    return "\n\n".join(parts)


class _PageRoof(msgspec.Struct, frozen=True):
    cores: int
    gb_per_s: float
    gflops: float
    gb_per_s_by_rows: dict[str, float]


class _PageTarget(msgspec.Struct, frozen=True):
    weight_bytes: float
    flops_per_row: float


class _Page(msgspec.Struct, frozen=True):
    device: str
    dtype: str
    roofs: list[_PageRoof]
    hardware: dict[str, object]
    versions: dict[str, str]
    target: _PageTarget | None = None
    modes_file: str = ""
    distances: list[Distance] = []


_HEAD = (
    *("mode", "T", "cores", "tokens/s", "tokens a round", "rows a round", "roof, tokens/s", "reached"),
    *("of the forward's time", "forward / wait / host", "bound by"),
)


def _distances(read: _Page, weight_bytes: float) -> list[str]:
    rows = (
        (
            row.shape,
            f"{row.temperature:g}",
            row.cores or "GPU",
            f"{row.tokens_per_s:.1f}",
            f"{row.tokens_per_round:.2f}",
            f"{row.rows_per_round:.1f}",
            f"{row.roof_tokens_per_s:.1f}",
            f"{row.reached:.2f}",
            f"{row.forward_reached:.2f}",
            f"{row.forward_share:.2f} / {row.wait_share:.2f} / {row.host_share:.2f}",
            row.bound_by,
        )
        for row in read.distances
    )
    return [
        f"A round reads {weight_bytes / 1e6:.0f} MB of weights at least once. The roof is tokens a round / "
        "max(weight bytes / bandwidth, operations / throughput); tokens/s and shares are those of "
        f"{read.modes_file}:",
        markdown_table(_HEAD, rows),
        "*Reached* is measured / roof: the forward's share of the time, times the share of the forward's "
        "time that the roof explains. Roofs count the target alone: a synchronous draft's own steps are its "
        "*wait*; of SSD's two cores only the target's is counted.",
    ]


def _roof(roof: Roof) -> dict[str, object]:
    return {
        "cores": roof.cores,
        "gb_per_s": round(roof.bandwidth / 1e9, 3),
        "gflops": round(roof.flops / 1e9, 2),
        "gb_per_s_by_rows": {
            str(rows): round(1e-9 / seconds, 3) for rows, seconds in roof.seconds_per_byte.items()
        },
    }


def _same_machine(path: Path, theirs: Mapping[str, object]) -> None:
    """A roof says nothing about figures of another machine."""
    ours = hardware()
    for name in ("cpu", "cores", "gpus"):
        if theirs.get(name) != ours[name]:
            raise UserError(
                f"{path} was measured on another machine ({name}: {theirs.get(name)}, here {ours[name]}); "
                "run `ssd bench modes` here first, or leave the modes out with --no-modes"
            )


def _benchmark_elements() -> int:
    """Numbers in the matrices of the embedded target with the ballast of `ssd bench modes`."""
    raw = dict(read_json(embedded_folder("target") / "config.json"))
    old = BallastSizes.of(raw)
    enlarged_raw = enlarged_config(raw, old, enlarged(old, BALLAST_HIDDEN, TARGET_LAYERS, None, None))
    return describe(enlarged_raw).sizes(Parallel()).elements
