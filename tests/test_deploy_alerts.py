"""Every metric that an alert asks for is one that the server exports."""

import re
from pathlib import Path

from prometheus_client import generate_latest

from ssd_serve.server.metrics import Metrics
from tests.server.fakes import STATUS

RULES = Path(__file__).parents[1] / "deploy" / "alerts.yaml"


def test_metrics_of_alerts_exist() -> None:
    exported = generate_latest(Metrics(lambda: STATUS, lambda: True).registry).decode()
    wanted = set(re.findall(r"ssd_\w+", " ".join(re.findall(r"expr: (.*)", RULES.read_text()))))
    assert len(wanted) == 2
    for name in wanted:
        assert re.search(rf"^{name}[{{ ]", exported, re.MULTILINE), name
