"""Paths of other servers' APIs that are not built here, and what to use instead."""

_TEXT_ONLY = "this server reads and writes text only"
_NOT_BUILT = {
    "embeddings": "this server generates text; serve embeddings with a server for embedding models",
    "rerank": "this server generates text; rank with a server for embedding models",
    "score": "log-probabilities of a text come from /v1/completions with echo, logprobs and max_tokens 0",
    "classify": "restrict the answer of /v1/chat/completions to labels with structured_outputs.choice",
    "moderations": "restrict the answer of /v1/chat/completions to labels with structured_outputs.choice",
    "audio": f"{_TEXT_ONLY}; send a transcript to /v1/chat/completions",
    "images": f"{_TEXT_ONLY}; send a description to /v1/chat/completions",
    "videos": f"{_TEXT_ONLY}; send a description to /v1/chat/completions",
    "realtime": f"{_TEXT_ONLY}; stream /v1/chat/completions or /v1/responses",
    "files": "nothing is stored; send texts in the request",
    "batches": "send the requests to /v1/chat/completions at once; they run together",
    "fine_tuning": "train elsewhere, and serve the resulting folder with SSD_TARGET",
    "assistants": "nothing is stored; send the whole conversation to /v1/responses",
    "threads": "nothing is stored; send the whole conversation to /v1/responses",
    "load_lora_adapter": "merge the adapter into the weights, and serve the resulting folder with SSD_TARGET",
}
"""Sentences by the first part of a path, with or without `/v1`."""


def not_built(path: str) -> str | None:
    """Return an error message for a path of another API; None for any other path."""
    first = path.removeprefix("/v1").strip("/").partition("/")[0]
    instead = _NOT_BUILT.get(first)
    return None if instead is None else f"{path}: not built; {instead}"
