"""One streaming client for every engine with an OpenAI endpoint, and what is read from its answers.

It shares the cores with the server that it measures: events are only stamped with their time while they
arrive, and parsed after the last. Knows HTTP and what servers report, not how they are started.
"""

import http.client
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ssd_serve.base.errors import SsdError
from ssd_serve.bench.completions import DATA, DONE, Chunk, request
from ssd_serve.bench.metrics_page import metric

_ANSWER_S = 300.0
_DRAFTED, _ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"


class PeerError(SsdError):
    """An engine of the comparison did not start, or did not answer as it should."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: prompt ids, how many new tokens (never fewer), temperature, seed."""

    prompt: tuple[int, ...]
    tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What one request gave. `counted` tokens came after the first event, in `decode_s` seconds. Its text
    is `ids`, or `text` of a server that tells no ids."""

    tokens: int
    counted: int
    first_s: float
    decode_s: float
    drafted: int = 0
    accepted: int = 0
    ids: tuple[int, ...] = ()
    text: str = ""

    @property
    def whole_s(self) -> float:
        """From the request to the last token."""
        return self.first_s + self.decode_s

    @property
    def step_s(self) -> float:
        """Decoding without the prompt: seconds a token."""
        return self.decode_s / self.counted


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event: seconds since the request, and its data."""

    at: float
    data: bytes


def body(ask: Ask, extra: Mapping[str, object]) -> dict[str, object]:
    """The request as every server understands it, and what only one of them does."""
    asked = request(ask.prompt, ask.tokens, ask.temperature, ask.seed)
    return {**asked, "stream_options": {"include_usage": True}, **extra}


def stream(port: int, asked: Mapping[str, object]) -> list[Event]:
    """Post to `/v1/completions` on loopback and collect the events until the stream ends.

    By the standard library: of the cores that are measured, httpx takes many times as much for an event.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
    data = msgspec.json.encode(asked)
    events: list[Event] = []
    try:
        started = time.perf_counter()
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise PeerError(
                f"the server answered {response.status}: {response.read(500).decode(errors='replace')}"
            )
        while line := response.readline():
            if line.startswith(DATA):
                events.append(Event(time.perf_counter() - started, line[len(DATA) :].strip()))
    except (OSError, http.client.HTTPException) as error:
        raise PeerError(f"the server broke off its answer: {error!r}") from error
    finally:
        connection.close()
    return events


def read_answer(events: Sequence[Event], ask: Ask) -> Sample:
    """Times and figures of a whole answer. Refuses one that is not as long as it was asked to be."""
    first = last = 0.0
    first_tokens = tokens = drafted = accepted = 0
    ids, text = list[int](), list[str]()
    for event in events:
        if event.data == DONE:
            continue
        chunk = _decoded(event.data)
        if chunk.trouble:
            raise PeerError(f"the server reported an error: {chunk.trouble}")
        if any(choice.text or choice.token_ids for choice in chunk.choices):
            if not first_tokens:
                first = event.at
                first_tokens = max(1, len(chunk.token_ids))
            last = event.at
            ids += chunk.token_ids
            text += [choice.text or "" for choice in chunk.choices]
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        if chunk.timings is not None:
            drafted, accepted = chunk.timings.draft_n, chunk.timings.draft_n_accepted
        if chunk.metrics is not None and chunk.metrics.speculative_decoding is not None:
            speculation = chunk.metrics.speculative_decoding
            drafted, accepted = speculation.num_draft_tokens or 0, speculation.num_accepted_draft_tokens or 0
    if tokens != ask.tokens:
        raise PeerError(f"the answer has {tokens} tokens instead of {ask.tokens}")
    if last <= first:
        raise PeerError("the answer came in one piece, so its decoding cannot be timed")
    told = "" if ids else "".join(text)
    return Sample(tokens, tokens - first_tokens, first, last - first, drafted, accepted, tuple(ids), told)


def _decoded(data: bytes) -> Chunk:
    try:
        return msgspec.json.decode(data, type=Chunk)
    except msgspec.MsgspecError as error:
        raise PeerError(f"an event of the server is not understood ({error}): {data[:200]!r}") from error


def draft_counters(page: str) -> tuple[int, int]:
    """Drafted and accepted tokens since the start, from vLLM's metrics page; zeros without speculation."""
    return int(metric(page, _DRAFTED)), int(metric(page, _ACCEPTED))


def get(port: int, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
    """Status and text of a page; status 0 when nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()
