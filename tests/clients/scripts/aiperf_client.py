"""AIPerf loads the server and has figures of every request."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import BASE_URL, MODEL, Checks

checks = Checks("aiperf")
with checks.check("16 streamed chats, 2 at a time") as seen, tempfile.TemporaryDirectory() as name:
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", MODEL, "--url", BASE_URL]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", sys.argv[2], "--ui", "none"]
    command += ["--request-count", "16", "--concurrency", "2", "--isl", "64", "--osl", "32"]
    subprocess.run([*command, "--output-artifact-dir", name], check=True, stdout=sys.stderr)
    told = json.loads((Path(name) / "profile_export_aiperf.json").read_text())
    assert told["request_count"]["avg"] == 16
    assert told["request_error_rate"]["avg"] == 0
    first, speed = told["time_to_first_token"]["p50"], told["output_token_throughput"]["avg"]
    seen.append(f"16 requests, {speed:.0f} tokens/s, first token {first:.0f} ms")
sys.exit(checks.tell())
