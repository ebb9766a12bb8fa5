"""Tests of logging: one line for each event, also from libraries; levels and formats."""

import io
import json
import logging
from collections.abc import Generator

import pytest

from ssd_serve.base.logs import Logger, RateLimitedLogger, carry_library_logs


@pytest.fixture(autouse=True)
def _library_logging_as_before() -> Generator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_lines_for_people_and_for_machines() -> None:
    out = io.StringIO()
    Logger("server", "info", "text", stream=out).bind(port=8000).info("ready", mode="ssd", why="all is well")
    assert out.getvalue().endswith('info    server: ready port=8000 mode=ssd why="all is well"\n')
    out = io.StringIO()
    log = Logger("server", "warning", "json", stream=out)
    log.info("not told")
    log.error("broken\nline", code=3)
    record = json.loads(out.getvalue())
    assert (record["level"], record["process"], record["event"], record["code"]) == (
        "error",
        "server",
        "broken\nline",
        3,
    )


def test_rate_limited_warnings_count_suppressed_ones() -> None:
    out, now = io.StringIO(), [0.0]
    rate_limited = RateLimitedLogger(Logger("verifier", stream=out), clock=lambda: now[0])
    for now[0] in (0.0, 1.0, 59.0, 60.0, 61.0, 130.0):
        rate_limited.warning("refused", at=now[0])
    said = [line.partition("verifier: ")[2] for line in out.getvalue().splitlines()]
    assert said == ["refused at=0", "refused at=60 suppressed=2", "refused at=130 suppressed=1"]


def test_libraries_log_in_the_same_way() -> None:
    out = io.StringIO()
    carry_library_logs(Logger("server", "info", "json", stream=out))
    logging.getLogger("uvicorn.error").info("not told")
    logging.getLogger("uvicorn.error").warning("Invalid %s received.", "request")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        logging.getLogger("ssd_serve.server").exception("a stream failed")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["Invalid request received", "a stream failed"]
    assert "ZeroDivisionError" in lines[1]["traceback"]


def test_library_warnings_are_rate_limited_by_place() -> None:
    out = io.StringIO()
    carry_library_logs(Logger("server", "info", "json", stream=out))
    for number in range(1000):
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request %d", number)
    logging.getLogger("uvicorn.error").warning("something else")
    events = [json.loads(line)["event"] for line in out.getvalue().splitlines()]
    assert events == ["Invalid HTTP request 0", "something else"]
