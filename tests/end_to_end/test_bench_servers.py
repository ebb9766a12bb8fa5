"""`ssd bench serve` against a real server."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ssd_serve.app.cli.main import main
from ssd_serve.bench.emulated import emulating
from tests.servers import free_port, running

pytestmark = pytest.mark.slow


def result_of(words: list[str], folder: Path) -> dict[str, Any]:
    """The file that a benchmark writes."""
    file = folder / "result.json"
    assert main(["bench", *words, "--json", str(file)]) == 0
    told: dict[str, Any] = json.loads(file.read_text())
    return told


def test_bench_serve_measures_an_openai_endpoint(tmp_path: Path) -> None:
    port = free_port()
    environment = {
        **os.environ,
        "SSD_MODE": "sd",
        "SSD_PORT": str(port),
        "SSD_RUN_DIR": str(tmp_path / "run"),
    }
    # On a device this slow speculation pays, however busy this machine is.
    environment |= {"SSD_MODEL_WRAPPER": emulating("mi300x-70b-1b"), "SSD_SPECULATION_MAY_STOP": "false"}
    with running([sys.executable, "-m", "ssd_serve", "serve"], environment, tmp_path, port) as (_, url, _log):
        words = ["serve", "--base-url", url, "--num-prompts", "6", "--output-len", "12", "--ignore-eos"]
        words += ["--request-rate", "20", "--input-len", "64", "128", "--temperature", "0.6"]
        told = result_of([*words, "--goodput", "ttft:60000", "tpot:60000"], tmp_path)
        file = tmp_path / "asked.jsonl"
        file.write_text('{"question": "How many ducks?"}\n', encoding="utf-8")
        chat = ["serve", "--base-url", f"{url}/v1", "--backend", "openai-chat", "--prompts", str(file)]
        asked = result_of([*chat, "--num-prompts", "3", "--output-len", "8"], tmp_path)
    assert (told["completed"], told["failed"]) == (6, 0)
    assert told["total_output_tokens"] == 6 * 12
    assert 6 * 64 <= told["total_input_tokens"] <= 6 * 150
    assert told["request_goodput"] == told["request_throughput"]
    assert told["spec_decode_draft_tokens"] > 0
    assert told["mean_ttft_ms"] < told["mean_e2el_ms"]
    assert (asked["completed"], asked["model_id"]) == (3, told["model_id"])
