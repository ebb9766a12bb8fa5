"""The fault benchmark, shortened: lost messages, clients that do not read, a server that is killed."""

from pathlib import Path
from typing import Any

import pytest

from ssd_serve.base.settings import Settings
from ssd_serve.bench.emulated import emulating
from tests.chaos.faults.experiment import FaultsPlan, run_faults
from tests.chaos.faults.report import harmless
from tests.end_to_end.tiny_pair import write_pair

pytestmark = pytest.mark.slow

CLIENTS = ("clients that never read", "clients that read slowly")
MESSAGES = (
    "messages dropped",
    "messages delayed and reordered",
    "messages duplicated",
    "every message dropped",
)
KILLED = "kill -9 of the server"


def struck(folder: Path, *cases: str) -> dict[str, dict[str, Any]]:
    """What came of each fault, none of which did harm; a server of its own has borne these."""
    target, draft = write_pair(folder / "pair")
    settings = Settings(
        target=str(target),
        draft=str(draft),
        dtype="fp32",
        budget=2,
        model_wrapper=emulating("mi300x-70b-1b*2"),
    )
    found = run_faults(settings, FaultsPlan(requests=2, tokens=60, only=cases), print)
    assert harmless(found)
    listed = found["outcomes"]
    assert isinstance(listed, list)
    outcomes = {str(each["fault"]).split(" (")[0]: each for each in listed}
    assert tuple(outcomes) == cases
    return outcomes


def nobody_waited_long(outcomes: dict[str, dict[str, Any]]) -> bool:
    return all(each["stall_s"] < 10.0 and each["speculates"] for each in outcomes.values())


def test_clients_that_do_not_read_cost_the_others_nothing(tmp_path: Path) -> None:
    outcomes = struck(tmp_path, *CLIENTS)
    assert nobody_waited_long(outcomes)
    assert outcomes["clients that read slowly"]["more"] == {"clients": 4, "whole_answers": 4}


def test_lost_and_changed_messages_cost_no_token_and_nobody_waits_long(tmp_path: Path) -> None:
    outcomes = struck(tmp_path, *MESSAGES)
    assert nobody_waited_long(outcomes)
    assert all(each["more"]["messages_changed"] > 0 for each in outcomes.values())


def test_another_server_gives_the_rest_when_one_is_killed(tmp_path: Path) -> None:
    killed = struck(tmp_path, KILLED)[KILLED]
    assert killed["more"]["clients_cut_off"] == 2
    assert killed["more"]["tokens_cut_off"] > 0
    assert killed["lost"] == 0, "another server has given them the rest"
