"""The fault benchmark, shortened: lost messages, clients that do not read, a server that is killed."""

from pathlib import Path

import pytest

from lab.faults.experiment import Plan, run_faults
from lab.faults.report import harmless
from ssd_serve.settings import Settings
from tests.end_to_end.tiny_pair import write_pair

pytestmark = pytest.mark.slow

CASES = (
    "clients that never read",
    "clients that read slowly",
    "messages dropped",
    "messages delayed and reordered",
    "messages duplicated",
    "every message dropped",
    "kill -9 of the server",
)


def test_no_token_is_lost_or_wrong_and_nobody_waits_long(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path / "pair")
    settings = Settings(
        target=str(target), draft=str(draft), dtype="fp32", budget=2, emulate="mi300x-70b-1b*2"
    )
    found = run_faults(settings, Plan(requests=2, tokens=60, only=CASES), print)
    assert harmless(found)
    listed = found["outcomes"]
    assert isinstance(listed, list)
    outcomes = {str(each["fault"]).split(" (")[0]: each for each in listed}
    assert tuple(outcomes) == CASES
    killed = outcomes.pop("kill -9 of the server")
    assert killed["more"]["clients_cut_off"] == 2
    assert killed["more"]["tokens_cut_off"] > 0
    assert killed["lost"] == 0, "another server has given them the rest"
    assert all(each["stall_s"] < 10.0 and each["speculates"] for each in outcomes.values())
    assert outcomes["clients that read slowly"]["more"] == {"clients": 4, "whole_answers": 4}
    for name in CASES[2:-1]:
        assert outcomes[name]["more"]["messages_changed"] > 0
