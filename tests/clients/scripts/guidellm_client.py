"""GuideLLM loads the server and has figures of every request."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import BASE_URL, MODEL, Checks

checks = Checks("guidellm")
with checks.check("16 requests, 2 at a time") as seen, tempfile.TemporaryDirectory() as name:
    told = Path(name) / "told.json"
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-progress"]
    command += ["--backend", f"kind=openai_http,target={BASE_URL},model={MODEL}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=16"]
    command += ["--tokenizer", f"kind=hf_auto,model={sys.argv[2]}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"]
    subprocess.run([*command, "--output", f"kind=json,path={told}"], check=True, stdout=sys.stderr)
    (benchmark,) = json.loads(told.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (16, 0), totals
    speed = benchmark["metrics"]["output_tokens_per_second"]["successful"]["mean"]
    seen.append(f"{totals['successful']} requests, {speed:.0f} tokens/s")
sys.exit(checks.tell())
