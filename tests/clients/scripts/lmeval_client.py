"""lm-eval's `local-completions`: log-likelihoods of continuations are those that transformers has.

`argv[2]`: the model's folder, for its tokenizer; `argv[3]`: pairs of texts with what transformers says.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import BASE_URL, MODEL, Checks

checks = Checks("lm_eval", "transformers")
TOLERANCE = 1e-3
folder, expected = sys.argv[2], json.loads(Path(sys.argv[3]).read_text())

with (
    checks.check("log-likelihoods equal transformers' to 1e-3") as seen,
    tempfile.TemporaryDirectory() as name,
):
    here = Path(name)
    lines = [{"ctx": each["context"], "cont": each["continuation"]} for each in expected]
    (here / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = {
        "task": "pairs",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(here / "pairs.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{ctx}}",
        "doc_to_target": "{{cont}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "perplexity", "aggregation": "perplexity"}],
    }
    (here / "pairs.yaml").write_text(json.dumps(task))
    options = {"model": MODEL, "base_url": f"{BASE_URL}/v1/completions", "tokenizer": folder}
    command = [str(Path(sys.executable).with_name("lm_eval")), "run", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in options.items())]
    command += [
        "--tasks",
        "pairs",
        "--include_path",
        name,
        "--log_samples",
        "--output_path",
        str(here / "out"),
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (samples,) = (here / "out").rglob("samples_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    found.sort(key=lambda each: each["doc_id"])
    pairs = [(each["filtered_resps"][0], want) for each, want in zip(found, expected, strict=True)]
    worst = max(abs(float(got[0]) - want["log_likelihood"]) for got, want in pairs)
    assert worst <= TOLERANCE, f"differs by {worst}"
    assert all((str(got[1]) == "True") == want["greedy"] for got, want in pairs)
    seen.append(f"{len(pairs)} pairs, at most {worst:.1e} apart, {sum(w['greedy'] for _, w in pairs)} greedy")
sys.exit(checks.tell())
