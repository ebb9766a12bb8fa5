"""The transformers peer: a script that answers requests, one JSON line each, on its standard streams.

Run as a file by any Python that has torch and transformers, so it imports nothing of this project. First line
out: versions. Then for each line in, `{"prompt", "tokens", "temperature", "seed", "threads", "length",
"threshold", "match"}`, one line out with the counts of new tokens after each step, the seconds since the
request, drafted tokens, and the text as ids. `length` 0: plain decoding; `match` 0: drafts of the assistant,
else n-gram lookup.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
import transformers


class Steps:
    """A stopping criterion that stops nothing: called once a step, it notes time and length."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.counts: list[int] = []
        self.seconds: list[float] = []
        self.started = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """input_ids: [1, prompt and new tokens]."""
        self.counts.append(input_ids.shape[1] - self.prompt)
        self.seconds.append(time.perf_counter() - self.started)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Worker:
    """A target and its assistant."""

    def __init__(self, target: str, draft: str) -> None:
        self.target, self.draft = _load(target), _load(draft)
        self.rows = 0
        self.target.register_forward_pre_hook(self._count, with_kwargs=True)

    def answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        """One request."""
        torch.manual_seed(ask["seed"])
        ids = torch.tensor([ask["prompt"]])
        sampling: dict[str, Any] = {"do_sample": False}
        if ask["temperature"] > 0:
            sampling = {"do_sample": True, "temperature": ask["temperature"], "top_k": 0, "top_p": 1.0}
        torch.set_num_threads(ask["threads"])
        assistance: dict[str, Any] = {}
        if ask["match"]:
            assistance = {"prompt_lookup_num_tokens": ask["length"], "max_matching_ngram_size": ask["match"]}
        elif ask["length"]:
            own = self.draft.generation_config
            own.num_assistant_tokens, own.num_assistant_tokens_schedule = ask["length"], "constant"
            own.assistant_confidence_threshold = ask["threshold"]
            assistance = {"assistant_model": self.draft}
        self.rows = 0
        steps = Steps(ids.shape[1])
        with torch.inference_mode():
            text = self.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=ask["tokens"],
                stopping_criteria=transformers.StoppingCriteriaList([steps]),
                **sampling,
                **assistance,
            )
        drafted = self.rows - ids.shape[1] - (len(steps.counts) - 1)
        told = {"counts": steps.counts, "seconds": steps.seconds, "drafted": drafted}
        return {**told, "text": text[0, ids.shape[1] :].tolist()}

    def _count(self, _model: Any, _args: Any, told: dict[str, Any]) -> None:
        """What a forward of the target has beyond the prompt and one token a step was drafted."""
        self.rows += told["input_ids"].shape[1]


def _load(folder: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, use_safetensors=True
    ).eval()
    model.generation_config.eos_token_id = None  # every answer has the length that was asked for
    model.generation_config.pad_token_id = 0
    return model


def main() -> None:
    """Answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("draft")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    worker = Worker(args.target, args.draft)
    print(json.dumps({"version": transformers.__version__, "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
