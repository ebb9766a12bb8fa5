"""Table of devices: figures of the makers' data sheets, and the shares of them that a forward attains.

The shares are constants fitted to public measurements of plain decoding; three of Hopper's are fitted to this
project's own.
"""

from dataclasses import dataclass, replace
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


_CDNA = DeviceSheet(
    name="MI300X",
    memory_gb=192,
    bandwidth_gb_s=5300,
    bf16_tflops=1307.4,
    peer_gb_s=64,
    links_gb_s=448,
    bandwidth_share=0.585,
    throughput_share=0.40,
    layer_s=15e-6,
    row_s=1.1e-6,
    exchange_s=38.8e-6,
    launch_s=0.3e-3,
    fp8="float8_e4m3fnuz",
)
"""`bandwidth_share`, `layer_s`, `exchange_s`: fitted to AMD's 21.41, 32.87 and 52.32 tokens/s of plain Llama
3.1 70B on 1, 2 and 4 MI300X, with `launch_s` as assumed. Source: ROCm blog, "Enabling Speculative Speculative
Decoding on MI300X", 2026-05-29. Three figures determine the three constants.
`launch_s`: assumed; the start of a captured graph of some 1,600 nodes and the way back of its tokens.
`throughput_share`: a lower bound of the share of fp8's peak, also used for bf16. It follows from AMD's vLLM
table (ROCm/vllm, docs/dev-docker). That compares 64 requests of 2,048 and of 128 prompt tokens: Llama 3.1 70B
FP8 on 8 MI300X.
`row_s`: what the growth of that table, and of its Llama 3.1 405B, from 1 to 64 requests leaves unexplained.
It holds vLLM's own host work for a request: rows of trees are rather too dear here than too cheap."""

_HOPPER = DeviceSheet(
    name="H100",
    memory_gb=80,
    bandwidth_gb_s=3350,
    bf16_tflops=989.4,
    peer_gb_s=450,
    links_gb_s=450,
    bandwidth_share=0.85,
    throughput_share=0.5,
    layer_s=28e-6,
    row_s=0.23e-6,
    several_s=10e-6,
    exposed_share=0.0,
    exchange_s=26e-6,
    launch_s=0.2e-3,
    fp8="float8_e4m3fn",
)
"""`bandwidth_share`, and `layer_s` with twice `exchange_s`: within 4 % of 54.7 and 88.8 tokens/s of plain
Llama 3.1 70B and Qwen3 32B on 4 H100 (arXiv 2603.03251). Two figures do not determine more: how the seconds of a
layer are split, `throughput_share` and `launch_s` are assumed.
`row_s`, `several_s`, `exposed_share`: measured by this project on one H100, as means of two backends. They
fit the additional time of 8 and of 64 rows after 128 tokens in Llama 3.2 1B and Llama 3.1 8B."""


# Data sheets: AMD Instinct MI300X, MI325X, MI350X, MI355X (an Infinity Fabric link to each of seven others;
# half of what is printed for both ways); NVIDIA H100 SXM, H200 SXM (NVLink through a switch; theirs print
# twice the throughput, with sparsity).
# Devices of one maker share the attained values until they are measured apart.
_MI325X = replace(_CDNA, name="MI325X", memory_gb=256, bandwidth_gb_s=6000)
_MI350X = replace(
    _CDNA,
    name="MI350X",
    memory_gb=288,
    bandwidth_gb_s=8000,
    bf16_tflops=2306.9,
    peer_gb_s=76.8,
    links_gb_s=537.6,
    fp8="float8_e4m3fn",
)
_MI355X = replace(_MI350X, name="MI355X", bf16_tflops=2516.6)
_H200 = replace(_HOPPER, name="H200", memory_gb=141, bandwidth_gb_s=4800)
_SHEETS = {sheet.name.lower(): sheet for sheet in (_CDNA, _MI325X, _MI350X, _MI355X, _HOPPER, _H200)}


def sheet_names() -> tuple[str, ...]:
    """Return the names of the devices in the table."""
    return tuple(_SHEETS)


def device_sheet(name: str) -> DeviceSheet:
    """Return the device of this name. Raises `SettingsError` for an unknown one."""
    if name.lower() not in _SHEETS:
        raise SettingsError(f"device {name!r} is not in the table; there are {', '.join(_SHEETS)}")
    return _SHEETS[name.lower()]
