"""The measurement of what bodies cost: a body that is answered, and its figures."""

import pytest

from lab.bodies.experiment import run_bodies, table


@pytest.mark.slow
def test_each_kind_has_its_figures() -> None:
    told: list[str] = []
    result = run_bodies(["one name of 8 MiB", "120 texts"], 1, told.append)
    costs = result["costs"]
    assert isinstance(costs, list)
    assert [(cost["kind"], cost["status"]) for cost in costs] == [
        ("120 texts of 4 kB", 200),
        ("one name of 8 MiB", 400),
    ]
    assert all(cost["longest_hold_ms"] > 0 for cost in costs)
    assert len(told) == 2
    assert all(cost["kind"] in table(result) for cost in costs)
