"""Pytest plugin: in CI, a test that is skipped for a reason not listed here fails."""

import os
import re
from collections.abc import Generator

import pytest

EXPECTED = {
    r"Prometheus": "no package of Python brings it or promtool, and CI needs Python and make only",
    r"not for Python 3\.10": "the marks of these tests ask for the version, not for the package",
    r"Chromium is not installed": "no package of Python brings it; the page's other tests need no browser",
    r"helm is not installed": "no package of Python brings it; the tests render the chart themselves",
    r"nginx is not installed": "no package of Python brings it",
    r"root may|only root": "the user that runs CI decides which of two tests can run",
    r"FlashInfer is not installed": "its packages need a GPU's toolkit; doubles stand in for it",
    r"this (processor|machine) (has|cannot)|not an x86 CPU|x86 CPU with|this torch has no int8": (
        "instructions that the processor lacks"
    ),
}
"""Reasons of skips (regular expressions), and why each is unavoidable."""


def is_expected(reason: str) -> bool:
    """True if a skip for this reason is allowed everywhere."""
    return any(re.search(known, reason) for known in EXPECTED)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not hasattr(report, "wasxfail"):
        _judge(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Judge skips of whole files, which xdist does not report."""
    report = yield
    _judge(report)
    return report


def _judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not (report.skipped and os.environ.get("CI") and isinstance(report.longrepr, tuple)):
        return
    path, line, reason = report.longrepr
    if not is_expected(reason):
        report.outcome = "failed"
        report.longrepr = f"{path}:{line}: {reason}: not a skip that {__name__} expects in CI"
