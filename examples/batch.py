"""Answer every line of a file without a server: `python batch.py PROMPTS.txt ANSWERS.jsonl [MODEL]`.

All prompts are one batch: the engine takes as many at once as fit. Each answer depends on its prompt and its seed only,
not on the other prompts.
"""

import json
import sys
from pathlib import Path

from ssd_serve import LLM, SamplingParams

prompts = [line for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines() if line.strip()]
params = [SamplingParams(max_tokens=48, temperature=0.7, seed=index) for index in range(len(prompts))]
with LLM((sys.argv[3:] or ["smollm2"])[0]) as llm:
    outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
with Path(sys.argv[2]).open("w", encoding="utf-8") as file:
    for prompt, output in zip(prompts, outputs, strict=True):
        row = {"prompt": prompt, "answer": output.text, "finish_reason": output.finish_reason}
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
print(f"{len(outputs)} answers in {sys.argv[2]}")
