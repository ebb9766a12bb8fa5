"""The page's table of a replayed trace: a line a way, and what had to be changed to fit."""

import pytest

from ssd_serve.base.errors import UserError
from ssd_serve.bench.load.trace_report import trace_table
from tests.bench.load.test_report import RESULT, row


def test_a_line_for_each_way_and_what_was_sent() -> None:
    whole = {"p50": 1200.0, "p90": 2000.0, "p99": 3456.0}
    notes = {
        "trace": {
            **{"arrivals": 594, "context": 2048, "left_out": 8225},
            **{"prompt_tokens_lost_share": 0.0, "output_tokens_lost_share": 0.04},
        },
        "device_table": "mi300x-70b-1b*2",
    }
    found = {
        **RESULT,
        "trace": [row("ar", 0, 20.0, whole_ms=whole), row("auto", 0, 21.5, whole_ms=whole, failed=2)],
        "notes": {**RESULT["notes"], **notes},
    }
    table, told = trace_table(found).split("\n\n")
    plain, auto = table.splitlines()[2:]
    assert "| plain (ar) | 20.0 | 0.05 / 0.09 / 0.10 | 15.2 / 19.0 / 20.0 | 1.20 / 2.00 / 3.46 |" in plain
    assert auto.startswith("| auto | 21.5 |")
    assert auto.endswith("| 2.50 |  | 2 |")
    assert told.startswith("594 arrivals")
    assert "at most 4% of the tokens are lost" in told


def test_another_result_is_refused() -> None:
    with pytest.raises(UserError, match="ssd bench load"):
        trace_table({"benchmark": "modes"})


def test_a_load_without_a_trace_is_refused() -> None:
    with pytest.raises(UserError, match="ssd bench load --trace"):
        trace_table({**RESULT, "trace": [], "notes": {"trace": None, "device_table": None}})
