"""Devices that one need not own: memory, bandwidth and matrix throughput as their makers' data sheets say.

A table of public figures and of openly assumed shares of them; nothing here was measured by this project.
Knows no models.
"""

from dataclasses import dataclass
from typing import Literal

from ssd_serve.errors import SettingsError


@dataclass(frozen=True, slots=True)
class DeviceSheet:
    """One device. The first four fields and `fp8` are data-sheet values, the others assumptions."""

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    """Peak memory bandwidth in 10^9 bytes a second."""
    bf16_tflops: float
    """Peak dense matrix throughput in bf16, without structured sparsity."""
    bandwidth_share: float
    """Share of the bandwidth that a decoding step attains."""
    throughput_share: float
    """Share of the matrix throughput that a step of many rows attains."""
    layer_s: float
    """Seconds that a layer takes besides reading its weights: small kernels, attention, launches."""
    exchange_s: float
    """Seconds more for a layer whose matrices are split over several devices."""
    fp8: Literal["", "float8_e4m3fn", "float8_e4m3fnuz"] = ""
    """The eight-bit format that it multiplies; empty: none, such weights are widened."""


# MI300X: share and seconds fitted to AMD's published 21.4, 32.9 and 52.3 tokens/s of plain Llama 3.1 70B on
# 1, 2 and 4 devices, and to the 1B draft step of about 1.75 ms that their speculative figures imply. Its
# successors: taken to behave alike. H100: one published figure, 54.7 tokens/s of the same model on 4 devices
# (arXiv 2603.03251), cannot tell shares from seconds; the split is a guess that meets it. H200: as H100.
_CDNA = {"bandwidth_share": 0.63, "throughput_share": 0.5, "layer_s": 63e-6, "exchange_s": 50e-6}
_HOPPER = {"bandwidth_share": 0.75, "throughput_share": 0.5, "layer_s": 30e-6, "exchange_s": 26e-6}

# Data sheets: AMD Instinct MI300X, MI325X, MI350X, MI355X; NVIDIA H100 SXM, H200 SXM (theirs print twice the
# throughput, with sparsity).
_SHEETS = (
    DeviceSheet("MI300X", 192, 5300, 1307.4, **_CDNA, fp8="float8_e4m3fnuz"),
    DeviceSheet("MI325X", 256, 6000, 1307.4, **_CDNA, fp8="float8_e4m3fnuz"),
    DeviceSheet("MI350X", 288, 8000, 2306.9, **_CDNA, fp8="float8_e4m3fn"),
    DeviceSheet("MI355X", 288, 8000, 2516.6, **_CDNA, fp8="float8_e4m3fn"),
    DeviceSheet("H100", 80, 3350, 989.4, **_HOPPER, fp8="float8_e4m3fn"),
    DeviceSheet("H200", 141, 4800, 989.4, **_HOPPER, fp8="float8_e4m3fn"),
)


def sheet_names() -> tuple[str, ...]:
    """The names that `device_sheet` knows."""
    return tuple(sheet.name.lower() for sheet in _SHEETS)


def device_sheet(name: str) -> DeviceSheet:
    """The device of this name; an unknown one is a `SettingsError`."""
    for sheet in _SHEETS:
        if sheet.name.lower() == name.lower():
            return sheet
    raise SettingsError(f"device {name!r} is not in the table; there are {', '.join(sheet_names())}")
