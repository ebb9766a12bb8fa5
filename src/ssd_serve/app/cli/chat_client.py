"""A client of a running server: the model that it serves, and streamed answers of /v1/chat/completions."""

import contextlib
import http.client
import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO, TypeAlias
from urllib.parse import urlsplit

import msgspec

from ssd_serve.base.errors import SettingsError, SsdError, in_a_line
from ssd_serve.base.messages import PromptProgress
from ssd_serve.server.banner import QUESTION

_SILENCE_S = 600.0
_Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A server's model, and the sampling values that requests take from it; None: the server does not tell."""

    name: str
    sampling: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """More of an answer, and the number of its tokens so far. The last piece of this server has `figures`."""

    text: str
    tokens: int
    figures: Mapping[str, Any]
    progress: PromptProgress | None = None


class ChatClient:
    """A client of the server at `url`, with or without /v1 at its end. Errors are `SsdError`s of one sentence."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise SettingsError(
                f"--url must be the address of a server, such as http://127.0.0.1:8000, not {url}"
            )
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._path = parts.netloc.rpartition("@")[2], parts.path.rstrip("/").removesuffix("/v1")
        self._url = f"{parts.scheme}://{self._host}{self._path}"
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}

    def model(self) -> ServedModel:
        """Return the first model that the server lists."""
        with self._answer("GET", "/v1/models", None) as answer:
            try:
                card = json.loads(answer.read())["data"][0]
                sampling = card.get("default_sampling_params")
                return ServedModel(str(card["id"]), None if sampling is None else dict(sampling))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise SsdError(
                    f"{self._url} lists no models at /v1/models: is it an OpenAI-compatible server?"
                ) from error

    def stream(self, body: Mapping[str, Any]) -> Generator[ChatPiece]:
        """Stream the answer to a chat request. Closing the generator ends the request."""
        whole = {
            **body,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        tokens = 0
        with self._answer("POST", "/v1/chat/completions", whole) as answer:
            for line in answer:
                chunk: _Json = json.loads(line[len(b"data:") :]) if line.startswith(b"data: {") else {}
                if "error" in chunk:
                    raise SsdError(self._refusal(answer.status, line[len(b"data:") :]))
                total = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                text = "".join(
                    each.get("delta", {}).get("content") or "" for each in chunk.get("choices", ())
                )
                if "prompt_progress" in chunk:
                    yield ChatPiece("", tokens, {}, msgspec.convert(chunk["prompt_progress"], PromptProgress))
                elif text or total > tokens or "timings" in chunk:
                    tokens = max(tokens, total)
                    yield ChatPiece(text, tokens, chunk if "timings" in chunk else {})

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, body: _Json | None) -> Generator[http.client.HTTPResponse]:
        """Send a request; the connection closes at the end of the `with` block."""
        with contextlib.closing(self._kind(self._host, timeout=_SILENCE_S)) as connection:
            try:
                text = None if body is None else json.dumps(body)
                connection.request(method, self._path + path, text, self._headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    raise SsdError(self._refusal(answer.status, answer.read(1 << 20)))
                yield answer
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise SsdError(
                    f"{self._url} does not answer ({in_a_line(error)}): start `ssd serve`, or correct the address"
                ) from error

    def _refusal(self, status: int, body: bytes) -> str:
        if status == 401:
            return f"{self._url} wants a key: give it with --api-key or SSD_API_KEY"
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return str(json.loads(body)["error"]["message"])
        return f"{self._url} answered {status}"


def remote_summary(tokens: int, rate: float | None, figures: Mapping[str, Any]) -> str:
    """The line below an answer; other servers send no `figures`, and have the rate that the client saw."""
    timings = figures.get("timings") or {}
    rate = timings.get("predicted_per_second") or rate
    drafts = (figures.get("metrics") or {}).get("speculative_decoding") or {}
    parts = [f"{tokens} tokens", *([f"{rate:.1f} tokens/s"] if rate else [])]
    if timings.get("draft_n"):
        parts.append(f"{drafts.get('mean_acceptance_length') or 1.0:.2f} tokens a round")
        parts.append(f"{timings['draft_n_accepted']} of {timings['draft_n']} drafted tokens accepted")
    return f"[{', '.join(parts)}]"


def show_first_answer(out: TextIO, url: str, key: str | None) -> None:
    """Ask a server one question, and print its answer with what speculation gave; print nothing if it refuses."""
    with contextlib.suppress(SsdError):
        client = ChatClient(url, key)
        asked = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 64}
        pieces = list(client.stream({"model": client.model().name, **asked}))
        text = " ".join("".join(piece.text for piece in pieces).split())
        line = remote_summary(pieces[-1].tokens, None, pieces[-1].figures) if pieces else ""
        print(f"Asked: {QUESTION}\nAnswer: {text} {line}\n", file=out, flush=True)
