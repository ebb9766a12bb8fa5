"""Table of devices: figures of the makers' data sheets, and the shares of them that a forward attains.

The shares are constants fitted to public measurements of plain decoding; three of Hopper's are fitted to this
project's own.
"""

from dataclasses import dataclass
from typing import Literal

from ssd_serve.base.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSheet:
    """Data sheet of a device. The fields before `bandwidth_share`, and `fp8`, are data-sheet values, the
    others attained."""

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    """Peak memory bandwidth in 10^9 bytes a second."""
    bf16_tflops: float
    """Peak dense matrix throughput in bf16, without structured sparsity."""
    peer_gb_s: float = float("inf")
    """10^9 bytes a second to one other device, one way."""
    links_gb_s: float = float("inf")
    """10^9 bytes a second to all other devices at once, one way."""
    bandwidth_share: float
    """Share of the bandwidth that a forward attains for weights and KV cache."""
    throughput_share: float
    """Share of the matrix throughput that it attains for rows beyond the first."""
    layer_s: float
    """Seconds that a layer takes besides reading its weights: norms, rotations, gates, attention's launch."""
    row_s: float = 0.0
    """Seconds that a layer takes more for a row that decodes. Rows of a prompt do not pay it."""
    several_s: float = 0.0
    """Seconds that a layer takes more as soon as there are several rows: other kernels multiply them."""
    exposed_share: float = 1.0
    """Share of the time of multiplying decoding rows that reading the weights does not hide."""
    exchange_s: float
    """Seconds of one all-reduce, of which a layer has two, besides its bytes."""
    launch_s: float = 0.0
    """Seconds from the host's launch to the first kernel of a captured forward, and from its last one back."""
    fp8: Literal["", "float8_e4m3fn", "float8_e4m3fnuz"] = ""
    """The eight-bit format that it multiplies; empty: none, such weights are widened."""


@dataclass(frozen=True, slots=True)
class _Attained:
    """Attained shares that devices of one maker have in common, until they are measured apart."""

    bandwidth_share: float
    throughput_share: float
    layer_s: float
    row_s: float
    exchange_s: float
    launch_s: float
    several_s: float = 0.0
    exposed_share: float = 1.0


_CDNA = _Attained(0.585, 0.40, 15e-6, 1.1e-6, 38.8e-6, 0.3e-3)
"""`bandwidth_share`, `layer_s`, `exchange_s`: fitted to AMD's 21.41, 32.87 and 52.32 tokens/s of plain Llama
3.1 70B on 1, 2 and 4 MI300X, with `launch_s` as assumed. Source: ROCm blog, "Enabling Speculative Speculative
Decoding on MI300X", 2026-05-29. Three figures determine the three constants.
`launch_s`: assumed; the start of a captured graph of some 1,600 nodes and the way back of its tokens.
`throughput_share`: a lower bound of the share of fp8's peak, also used for bf16. It follows from AMD's vLLM
table (ROCm/vllm, docs/dev-docker). That compares 64 requests of 2,048 and of 128 prompt tokens: Llama 3.1 70B
FP8 on 8 MI300X.
`row_s`: what the growth of that table, and of its Llama 3.1 405B, from 1 to 64 requests leaves unexplained.
It holds vLLM's own host work for a request: rows of trees are rather too dear here than too cheap."""

_HOPPER = _Attained(0.85, 0.5, 28e-6, 0.23e-6, 26e-6, 0.2e-3, 10e-6, 0.0)
"""`bandwidth_share`, and `layer_s` with twice `exchange_s`: within 4 % of 54.7 and 88.8 tokens/s of plain
Llama 3.1 70B and Qwen3 32B on 4 H100 (arXiv 2603.03251). Two figures do not determine more: how the seconds of a
layer are split, `throughput_share` and `launch_s` are assumed.
`row_s`, `several_s`, `exposed_share`: measured by this project on one H100, as means of two backends. They
fit the additional time of 8 and of 64 rows after 128 tokens in Llama 3.2 1B and Llama 3.1 8B."""


def _sheet(
    name: str,
    data: tuple[float, float, float, float, float],
    attained: _Attained,
    fp8: Literal["float8_e4m3fn", "float8_e4m3fnuz"],
) -> DeviceSheet:
    """`data`: GB, GB/s of memory, TFLOPS in bf16, GB/s to one other device and to all."""
    memory, bandwidth, tflops, peer, links = data
    return DeviceSheet(
        name=name,
        memory_gb=memory,
        bandwidth_gb_s=bandwidth,
        bf16_tflops=tflops,
        peer_gb_s=peer,
        links_gb_s=links,
        bandwidth_share=attained.bandwidth_share,
        throughput_share=attained.throughput_share,
        layer_s=attained.layer_s,
        row_s=attained.row_s,
        several_s=attained.several_s,
        exposed_share=attained.exposed_share,
        exchange_s=attained.exchange_s,
        launch_s=attained.launch_s,
        fp8=fp8,
    )


# Data sheets: AMD Instinct MI300X, MI325X, MI350X, MI355X (an Infinity Fabric link to each of seven others;
# half of what is printed for both ways); NVIDIA H100 SXM, H200 SXM (NVLink through a switch; theirs print
# twice the throughput, with sparsity).
_SHEETS = (
    _sheet("MI300X", (192, 5300, 1307.4, 64, 448), _CDNA, "float8_e4m3fnuz"),
    _sheet("MI325X", (256, 6000, 1307.4, 64, 448), _CDNA, "float8_e4m3fnuz"),
    _sheet("MI350X", (288, 8000, 2306.9, 76.8, 537.6), _CDNA, "float8_e4m3fn"),
    _sheet("MI355X", (288, 8000, 2516.6, 76.8, 537.6), _CDNA, "float8_e4m3fn"),
    _sheet("H100", (80, 3350, 989.4, 450, 450), _HOPPER, "float8_e4m3fn"),
    _sheet("H200", (141, 4800, 989.4, 450, 450), _HOPPER, "float8_e4m3fn"),
)


def sheet_names() -> tuple[str, ...]:
    """Return the names of the devices in the table."""
    return tuple(sheet.name.lower() for sheet in _SHEETS)


def device_sheet(name: str) -> DeviceSheet:
    """Return the device of this name. Raises `SettingsError` for an unknown one."""
    for sheet in _SHEETS:
        if sheet.name.lower() == name.lower():
            return sheet
    raise SettingsError(f"device {name!r} is not in the table; there are {', '.join(sheet_names())}")
