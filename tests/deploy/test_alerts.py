"""Alert rules: each has a test in which it fires for one server and not for another."""

import re
import shutil
import subprocess
from typing import Any

import pytest

from tests.deploy.files import DEPLOY, read_yaml

RULES = "alerts.test.yaml"
PROMTOOL = shutil.which("promtool")


def cases() -> dict[str, Any]:
    return {case["name"]: case for case in read_yaml(RULES)["tests"]}


def fires(case: Any) -> list[str]:
    """The series of alerts that must fire at the end of a case."""
    return [sample["labels"] for sample in case["promql_expr_test"][-1]["exp_samples"]]


def instances(text: str) -> set[str]:
    return set(re.findall(r'(?:instance="\w+", )?(?:replica|instance)="([\w:]+)"', text))


def test_every_alert_has_firing_and_quiet_cases() -> None:
    alerts = {rule["alert"] for group in read_yaml("alerts.yaml")["groups"] for rule in group["rules"]}
    assert set(cases()) == alerts
    for name, case in cases().items():
        firing = fires(case)
        assert firing
        assert all(f'alertname="{name}"' in each for each in firing)
        seen = instances(" ".join(series["series"] for series in case["input_series"]))
        assert seen > instances(" ".join(firing))


@pytest.mark.skipif(PROMTOOL is None, reason="promtool comes with Prometheus; no package of Python brings it")
@pytest.mark.parametrize(
    "command",
    [("test", "rules", RULES), ("check", "rules", "alerts.yaml"), ("check", "config", "prometheus.yaml")],
)
def test_alert_rules_pass_promtool(command: tuple[str, ...]) -> None:
    done = subprocess.run([str(PROMTOOL), *command], cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
