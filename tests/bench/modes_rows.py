"""Rows of a result of `ssd bench modes`, made up."""

from typing import Any

from ssd_serve.bench.modes_result import ModesRow


def modes_row(mode: str, speed: float, **fields: Any) -> ModesRow:
    """A row of one core at temperature 0, unless `fields` say otherwise."""
    usual: dict[str, Any] = {
        "setting": "real",
        "shape": mode,
        "temperature": 0.0,
        "target": "cpu:0",
        "draft": "",
        "devices": 1,
        "requests": 64,
        "tokens_per_s_quartiles": [speed - 1, speed, speed + 1],
        "ssd": None,
        "tokens_per_round": 2.5,
        "acceptance": 0.25,
        "nodes_per_round": 4.0,
        "hit_rate": 0.875,
        "forward_share": 0.9,
        "wait_share": 0.06,
        "host_share": 0.04,
    }
    return ModesRow(mode=mode, tokens_per_s=speed, **{**usual, **fields})
