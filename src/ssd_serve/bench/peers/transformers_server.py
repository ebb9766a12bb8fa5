"""The transformers peer: a script that serves `/v1/completions` with prompt ids, as a stream.

It runs in any Python that has torch and transformers, so it imports nothing of this project. `--length` 0: plain
decoding; `--match` 0: drafts of the assistant model, else n-gram lookup.
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
import transformers


class StepStream:
    """A stopping criterion that never stops: after each step it streams the new token ids."""

    def __init__(self, prompt: int, handler: BaseHTTPRequestHandler) -> None:
        self.sent = prompt
        self.handler = handler

    def __call__(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """input_ids: [1, prompt and new tokens]."""
        ids = input_ids[0, self.sent :].tolist()
        self.sent = input_ids.shape[1]
        if ids:
            send(self.handler, {"choices": [{"text": "", "token_ids": ids}]})
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def send(handler: BaseHTTPRequestHandler, event: dict[str, Any]) -> None:
    """Write one server-sent event."""
    handler.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    handler.wfile.flush()


def load(folder: str) -> Any:
    """Load a model without an end token, so that answers have the requested length."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("port", type=int)
    for name, kind in (("threads", int), ("length", int), ("threshold", float), ("match", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    target, draft = load(args.target), load(args.draft)
    assistance: dict[str, Any] = {}
    if args.match:
        assistance = {"prompt_lookup_num_tokens": args.length, "max_matching_ngram_size": args.match}
    elif args.length:
        own = draft.generation_config
        own.num_assistant_tokens, own.num_assistant_tokens_schedule = args.length, "constant"
        own.assistant_confidence_threshold = args.threshold
        assistance = {"assistant_model": draft}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            torch.manual_seed(body["seed"])
            ids = torch.tensor([body["prompt"]])
            sampling: dict[str, Any] = {"do_sample": False}
            if body["temperature"] > 0:
                sampling = {"do_sample": True, "temperature": body["temperature"], "top_k": 0, "top_p": 1.0}
            with torch.inference_mode():
                target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=body["max_tokens"],
                    stopping_criteria=transformers.StoppingCriteriaList([StepStream(ids.shape[1], self)]),
                    **sampling,
                    **assistance,
                )
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: Any) -> None:
            """Write no access log."""

    HTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
