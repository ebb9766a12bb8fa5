"""JSON objects of responses: heads, choices, usage, speculation figures and log-probabilities.

Plain dictionaries and JSON bytes. Knows the shapes, not where the values come from.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from ssd_serve.base.depths import added, rates
from ssd_serve.base.messages import Figures, TokenLogprobs
from ssd_serve.server.engine.choice import ChoiceEnd, ChoiceOutput
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.openai.prompts import TokenPrompt
from ssd_serve.server.openai.tools.message import MessageWriter
from ssd_serve.server.text.tokenizer import TokenTexts

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry; vLLM does the same."""

_TOKENS_PER_STEP = 64


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Fields that every object of one response begins with. `name` is the request's name in its header."""

    name: str
    identifier: str
    created: int
    model: str
    fingerprint: str
    seed: int

    @classmethod
    def now(cls, kind: str, name: str, model: str, fingerprint: str, seed: int) -> "ResponseHead":
        """Make the head of a response that begins now; its id begins with `kind`."""
        return cls(name, f"{kind}-{name}", int(time.time()), model, fingerprint, seed)

    def object(self, kind: str) -> dict[str, object]:
        """Return a response or chunk without its choices."""
        return {
            "id": self.identifier,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, object]:
    """Return the usage object. `cached_tokens` is None where it would reveal other users' prompts."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": None if cached_tokens is None else {"cached_tokens": cached_tokens},
    }


def speculation(ends: Sequence[ChoiceEnd]) -> dict[str, object]:
    """Sum the speculation figures of choices, in vLLM's shape with this engine's additions.

    `acceptance_histogram`: rounds by accepted draft tokens. `acceptance_by_depth`: share of the rounds with a
    node at each depth that accepted one. `draft_acceptance_rate` counts nodes, so a wide tree has a low rate.
    Where the statistics of a choice are incomplete, figures that only the engine counts are null.
    """
    figures = [end.figures for end in ends]
    rounds = sum(one.rounds for one in figures)
    accepted = sum(one.accepted for one in figures)
    drafted = sum(one.drafted for one in figures)
    hits = sum(one.hits for one in figures)
    misses = sum(one.misses for one in figures)
    accepted_depths = added([one.accepted_depths for one in figures])
    verified_depths = added([one.verified_depths for one in figures])
    known: dict[str, object] = {
        "num_draft_tokens": drafted,
        "draft_acceptance_rate": ratio(accepted, drafted),
        "acceptance_histogram": accepted_depths,
        "acceptance_by_depth": rates(verified_depths, accepted_depths),
        "sources": _sources(figures),
        "cache_hits": hits,
        "cache_misses": misses,
        "cache_hit_rate": ratio(hits, hits + misses),
        "mean_ready_depth": ratio(sum(one.ready_depth for one in figures), rounds),
        "mean_ready_nodes": ratio(sum(one.ready_nodes for one in figures), rounds),
        "preemptions": sum(one.preemptions for one in figures),
    }
    return {
        "speculative_decoding": {
            "num_spec_steps": rounds,
            "num_tokens": sum(one.tokens for one in figures),
            "num_accepted_draft_tokens": accepted,
            "mean_acceptance_length": ratio(rounds + accepted, rounds),
            **(known if all(end.complete for end in ends) else dict.fromkeys(known)),
        }
    }


def _sources(figures: Sequence[Figures]) -> dict[str, dict[str, int]]:
    named = [pair for one in figures for pair in one.sources.items()]
    return {
        source: {
            "num_draft_tokens": sum(each.verified for name, each in named if name == source),
            "num_accepted_draft_tokens": sum(each.accepted for name, each in named if name == source),
        }
        for source in dict.fromkeys(name for name, _ in named)
    }


def timings(
    prompt_tokens: int, tokens: int, ends: Sequence[ChoiceEnd], reveals_cache: bool
) -> dict[str, object]:
    """Return times under llama.cpp's names and ours; of several choices the slowest. Null: unknown, or it
    would reveal other users' prompts."""
    firsts = [each.first_token_s for each in ends if each.first_token_s is not None]
    prompt_s = max((each.figures.prompt_s for each in ends), default=0.0)
    first_s, decoding_s = max(firsts, default=0.0), max((each.decoding_s for each in ends), default=0.0)
    known = reveals_cache and bool(firsts) and prompt_s > 0
    return {
        "queue_ms": _ms(max(0.0, first_s - prompt_s)) if known else None,
        "prompt_n": prompt_tokens,
        "prompt_ms": _ms(prompt_s) if known else None,
        "prompt_per_second": ratio(prompt_tokens, prompt_s) if known else None,
        "first_token_ms": _ms(first_s) if firsts else None,
        "predicted_n": tokens,
        "predicted_ms": _ms(decoding_s),
        "predicted_per_second": ratio(tokens, decoding_s),
        "draft_n": sum(each.figures.drafted for each in ends),
        "draft_n_accepted": sum(each.figures.accepted for each in ends),
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def ratio(part: float, whole: float) -> float | None:
    """Return part / whole, or None where whole is 0."""
    return part / whole if whole else None


class ChoiceSerializer(ABC):
    """Writes the choices of one response in the shape of one API."""

    whole_kind: ClassVar[str]
    """Value of `object` in a whole response."""
    chunk_kind: ClassVar[str]
    """Value of `object` in a chunk."""

    def __init__(self, texts: TokenTexts, logprobs: bool, token_ids: bool, prompt_logprobs: bool) -> None:
        self.texts = texts
        self.logprobs = logprobs
        self.token_ids = token_ids
        self.prompt_logprobs = prompt_logprobs

    @abstractmethod
    def opening(self, choice: int) -> dict[str, object] | None:
        """Return the entry before the choice's first token in a stream, if there is one."""

    @abstractmethod
    def delta(self, delta: ChoiceOutput) -> dict[str, object] | None:
        """Return the entry of new output in a stream; None where there is nothing to send."""

    @abstractmethod
    def whole(self, output: ChoiceOutput) -> Steps[dict[str, object]]:
        """Return the entry of a complete choice."""

    def extra_fields(self) -> dict[str, object]:
        """Return more fields of a whole response or of a first chunk."""
        return {}

    def has_content(self, delta: ChoiceOutput, text: object) -> bool:
        """True where a stream sends an entry for this delta."""
        tokens_matter = self.logprobs or self.token_ids
        return bool(text or delta.end or (delta.tokens and tokens_matter))


class CompletionSerializer(ChoiceSerializer):
    """Writes choices of `/v1/completions`.

    `echoes` holds the text before the output of each prompt, and the offsets of its tokens where the prompt
    is scored. `choices` is the number of choices for each prompt.
    """

    whole_kind = chunk_kind = "text_completion"

    def __init__(
        self,
        texts: TokenTexts,
        prompts: Sequence[TokenPrompt],
        choices: int,
        echoes: Sequence[tuple[str, Sequence[int]]],
        logprobs: bool,
        token_ids: bool,
        prompt_logprobs: bool,
    ) -> None:
        super().__init__(texts, logprobs, token_ids, prompt_logprobs)
        self._prompts = prompts
        self._choices = choices
        self._echoes = echoes

    def opening(self, choice: int) -> dict[str, object] | None:
        text, _ = self._echoes[choice // self._choices]
        if choice > 0 and not text and not self.token_ids:
            return None
        entry = self._entry(choice, text, None, None)
        if self.token_ids:
            entry["prompt_token_ids"] = self._prompt_ids(choice)
        return entry

    def delta(self, delta: ChoiceOutput) -> dict[str, object] | None:
        if not self.has_content(delta, delta.text):
            return None
        details = None
        if self.logprobs and delta.tokens:
            echo, _ = self._echoes[delta.choice // self._choices]
            offsets = [len(echo) + offset for offset in delta.offsets]
            details = completion_logprobs(self.texts, delta.tokens, delta.logprobs, offsets)
        entry = self._entry(delta.choice, delta.text, details, delta.end)
        if self.token_ids:
            entry["token_ids"] = list(delta.tokens)
        return entry

    def whole(self, output: ChoiceOutput) -> Steps[dict[str, object]]:
        choice, prompt = output.choice, output.choice // self._choices
        details = (yield from self._all_logprobs(prompt, output)) if self.logprobs else None
        entry = self._entry(choice, self._echoes[prompt][0] + output.text, details, output.end)
        if self.prompt_logprobs:
            ids = self._prompts[prompt].ids
            entry["prompt_logprobs"] = yield from prompt_logprobs(self.texts, ids, output.prompt_logprobs)
        if self.token_ids:
            entry |= {"token_ids": list(output.tokens), "prompt_token_ids": self._prompt_ids(choice)}
        return entry

    @staticmethod
    def _entry(
        choice: int, text: str, details: dict[str, object] | None, end: ChoiceEnd | None
    ) -> dict[str, object]:
        return {
            "index": choice,
            "text": text,
            "logprobs": details,
            "finish_reason": end.reason if end else None,
            "stop_reason": end.cause if end else None,
        }

    def _prompt_ids(self, choice: int) -> list[int]:
        return list(self._prompts[choice // self._choices].ids)

    def _all_logprobs(self, prompt: int, output: ChoiceOutput) -> Steps[dict[str, object]]:
        """Write log-probabilities of the output, behind those of the prompt where it is scored."""
        text, prompt_offsets = self._echoes[prompt]
        tokens, entries, offsets = [*output.tokens], list[TokenLogprobs | None](output.logprobs), list[int]()
        if prompt_offsets:
            tokens = [*self._prompts[prompt].ids, *tokens]
            entries = [None, *output.prompt_logprobs, *entries]
        offsets = [*prompt_offsets, *(len(text) + offset for offset in output.offsets)]
        return serialize_in_steps(
            len(tokens),
            lambda some: completion_logprobs(self.texts, tokens[some], entries[some], offsets[some]),
        )


class ChatSerializer(ChoiceSerializer):
    """Writes choices of `/v1/chat/completions`, with one `MessageWriter` for each choice."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        texts: TokenTexts,
        prompt: TokenPrompt,
        writers: Sequence[MessageWriter],
        logprobs: bool,
        token_ids: bool,
        prompt_logprobs: bool,
    ) -> None:
        super().__init__(texts, logprobs, token_ids, prompt_logprobs)
        self._prompt = prompt
        self._writers = writers

    def opening(self, choice: int) -> dict[str, object] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice, "delta": delta, **self._rest(choice, None, None)}

    def delta(self, delta: ChoiceOutput) -> dict[str, object] | None:
        writer = self._writers[delta.choice]
        writer.skip(delta.resumed_text)
        message = writer.push(delta.text, last=delta.end is not None)
        if not self.has_content(delta, message):
            return None
        details = None
        if self.logprobs and delta.tokens:
            details = chat_logprobs(self.texts, delta.tokens, delta.logprobs)
        entry = {
            "index": delta.choice,
            "delta": message,
            **self._rest(delta.choice, details, delta.end),
        }
        if self.token_ids:
            entry["token_ids"] = list(delta.tokens)
        return entry

    def whole(self, output: ChoiceOutput) -> Steps[dict[str, object]]:
        choice, details = output.choice, None
        writer = self._writers[choice]
        if self.logprobs:
            details = yield from serialize_in_steps(
                len(output.tokens),
                lambda some: chat_logprobs(self.texts, output.tokens[some], output.logprobs[some]),
            )
        writer.skip(output.resumed_text)
        writer.push(output.text, last=True)
        entry: dict[str, object] = {
            "index": choice,
            "message": writer.message(),
            **self._rest(choice, details, output.end),
        }
        if self.prompt_logprobs:
            ids = self._prompt.ids
            entry["prompt_logprobs"] = yield from prompt_logprobs(self.texts, ids, output.prompt_logprobs)
        if self.token_ids:
            entry["token_ids"] = list(output.tokens)
        return entry

    def extra_fields(self) -> dict[str, object]:
        return {"prompt_token_ids": list(self._prompt.ids)} if self.token_ids else {}

    def _rest(
        self, choice: int, details: dict[str, object] | None, end: ChoiceEnd | None
    ) -> dict[str, object]:
        called = end is not None and end.reason == "stop" and self._writers[choice].called
        return {
            "logprobs": details,
            "finish_reason": "tool_calls" if called else end.reason if end else None,
            "stop_reason": end.cause if end else None,
        }


def serialize_in_steps(
    length: int, write: Callable[[slice], Mapping[str, object]]
) -> Steps[dict[str, object]]:
    """Return what `write` gives for all `length` tokens, with its lists already as JSON."""
    whole = write(slice(0, 0))
    lists: dict[str, list[bytes]] = {name: [] for name, value in whole.items() if isinstance(value, list)}
    for start in range(0, length, _TOKENS_PER_STEP):
        part = write(slice(start, start + _TOKENS_PER_STEP))
        for name, written in lists.items():
            written.append(msgspec.json.encode(part[name])[1:-1])
        yield
    return {**whole, **{name: msgspec.Raw(b"[%s]" % b",".join(parts)) for name, parts in lists.items()}}


def prompt_logprobs(
    texts: TokenTexts, tokens: Sequence[int], entries: Sequence[TokenLogprobs]
) -> Steps[msgspec.Raw]:
    """Write the prompt's log-probabilities as vLLM does: null for the first token; then, by id, those of each
    token and of the most probable tokens at its position."""
    written = [b"null"]
    for token, entry in zip(tokens[1:], entries, strict=False):
        values = {token: finite(entry.chosen)} | {other: finite(value) for other, value in entry.top}
        ranks = {other: rank for rank, (other, _) in enumerate(entry.top, 1)}
        written.append(
            msgspec.json.encode(
                {
                    str(each): {
                        "logprob": value,
                        "rank": ranks.get(each),
                        "decoded_token": texts.text_of(each),
                    }
                    for each, value in values.items()
                }
            )
        )
        if len(written) % _TOKENS_PER_STEP == 0:
            yield
    return msgspec.Raw(b"[%s]" % b",".join(written))


def completion_logprobs(
    texts: TokenTexts,
    tokens: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
) -> dict[str, object]:
    """Return the logprobs object of the completions API. None stands for a prompt's first token."""
    return {
        "tokens": [texts.text_of(token) for token in tokens],
        "token_logprobs": [None if entry is None else finite(entry.chosen) for entry in entries],
        "top_logprobs": [
            None if entry is None else _top_by_text(texts, token, entry)
            for token, entry in zip(tokens, entries, strict=True)
        ],
        "text_offset": list(offsets),
    }


def _top_by_text(texts: TokenTexts, chosen: int, entry: TokenLogprobs) -> dict[str, float]:
    """Map texts to log-probabilities. The chosen token is always included, as one more where necessary."""
    found = {texts.text_of(chosen): finite(entry.chosen)}
    for token, value in entry.top:
        # Different tokens may share a text (parts of characters): the more probable token stays.
        found.setdefault(texts.text_of(token), finite(value))
    return found


def chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], entries: Sequence[TokenLogprobs]
) -> dict[str, object]:
    """Return the logprobs object of the chat API."""
    return {
        "content": [
            {
                **_chat_token(texts, token, entry.chosen),
                "top_logprobs": [_chat_token(texts, other, value) for other, value in entry.top],
            }
            for token, entry in zip(tokens, entries, strict=True)
        ],
        "refusal": None,
    }


def _chat_token(texts: TokenTexts, token: int, logprob: float) -> dict[str, object]:
    text = texts.text_of(token)
    known = "�" not in text
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode()) if known else None}


def finite(logprob: float) -> float:
    """Return the value within the range of JSON."""
    return max(logprob, MIN_LOGPROB)
