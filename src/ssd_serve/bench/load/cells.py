"""The cells of tables of `ssd bench load`. Knows rows, not tables."""

from ssd_serve.bench.load.groups import ALL_DEVICES
from ssd_serve.bench.load.result import Percentiles

_MODES = {
    "ar": "plain (ar)",
    "sd": "synchronous (sd)",
    "ssd": "SSD (ssd)",
    "auto": "auto",
}


def spread(found: Percentiles | None, decimals: int = 0, unit: float = 1.0) -> str:
    """Median, 90th and 99th percentile, multiplied by `unit`; nothing where there are none."""
    values = () if found is None else (found.p50, found.p90, found.p99)
    return " / ".join(f"{unit * value:.{decimals}f}" for value in values)


def mode_name(name: str) -> str:
    """For people."""
    mode = name.removesuffix(ALL_DEVICES)
    return _MODES.get(mode, mode) + (", all devices" if mode != name else "")


def number(value: float | None, absent: str = "") -> str:
    """Two decimals, or what stands for none."""
    return absent if value is None else f"{value:.2f}"
