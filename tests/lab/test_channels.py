"""Channels are measured against a real process; what is printed has every way in it."""

import pytest

from lab.channels.experiment import measured_sockets, table
from lab.channels.feature_report import feature_table
from lab.channels.features import FeaturePlan, measured_features


def test_both_kinds_of_socket_are_measured() -> None:
    found = measured_sockets(20)
    assert list(found) == ["unix socket", "tcp, encrypted"]
    assert all(0 < row["p50"] <= row["p99"] < 1e6 for row in found.values())


def test_the_table_names_every_way() -> None:
    trips = {"unix socket": {"p50": 30.0, "p99": 50.0}, "ray actor call": {"p50": 600.0, "p99": 1100.0}}
    starts = {"local": {"connected_s": 1.0, "ready_s": 2.5, "own_mib": 0.0}}
    text = table({"round_trips_us": trips, "starts": starts})
    rows = [line.split() for line in text.splitlines()]
    assert ["unix", "socket", "30.0", "50.0"] in rows
    assert ["ray", "actor", "call", "600.0", "1100.0"] in rows
    assert ["local", "1.0", "2.5", "0.0"] in rows


@pytest.mark.slow
def test_features_go_by_both_ways_and_all_rows_are_read() -> None:
    plan = FeaturePlan(hidden=16, requests=2, tokens=3, rounds=4, forward_s=0.01, prompt=64, chunk=16)
    result = measured_features(plan)
    ways = result["ways"]
    assert isinstance(ways, dict)
    assert list(ways) == ["unix socket", "shared memory"]
    for found in ways.values():
        assert found["rounds"]["rows_read"] == found["rounds"]["rows"] == 24
        assert found["rounds"]["told_again"] == 0
        assert found["prompt"]["rows_read"] == 64
    assert feature_table(result).count("shared memory") == 1
