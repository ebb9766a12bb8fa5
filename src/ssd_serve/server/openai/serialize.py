"""JSON objects of responses: heads, choices, usage, speculation figures and log-probabilities.

Plain dictionaries and JSON bytes. Knows the shapes, not where the values come from.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from ssd_serve.base.messages import Figures, TokenLogprobs, acceptance_rates, sum_histograms
from ssd_serve.server.engine.choice import ChoiceEnd, ChoiceOutput
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.openai.message import MessageWriter
from ssd_serve.server.openai.prompts import TokenPrompt
from ssd_serve.server.openai.protocol import GenerationRequest
from ssd_serve.server.text import TokenTexts

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry; vLLM does the same."""

_TOKENS_PER_STEP = 64

Tokens = Sequence[int]
Entries = Sequence[TokenLogprobs | None]
"""Log-probabilities of tokens; None stands for a prompt's first token."""


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
    accepted_depths = sum_histograms([one.accepted_depths for one in figures])
    verified_depths = sum_histograms([one.verified_depths for one in figures])
    known: dict[str, object] = {
        "num_draft_tokens": drafted,
        "draft_acceptance_rate": ratio(accepted, drafted),
        "acceptance_histogram": accepted_depths,
        "acceptance_by_depth": acceptance_rates(verified_depths, accepted_depths),
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


def ratio(part: float, whole: float) -> float | None:
    """Return part / whole, or None where whole is 0."""
    return part / whole if whole else None


class ChoiceSerializer(ABC):
    """Writes the choices of one response in the shape of one API. `choices`: number for each prompt."""

    whole_kind: ClassVar[str]
    """Value of `object` in a whole response."""
    chunk_kind: ClassVar[str]
    """Value of `object` in a chunk."""

    def __init__(
        self,
        texts: TokenTexts,
        body: GenerationRequest,
        logprobs: bool,
        prompts: Sequence[TokenPrompt],
        choices: int,
    ) -> None:
        self._texts = texts
        self._logprobs = logprobs
        self._prompts = prompts
        self._choices = choices
        self._token_ids = bool(body.return_token_ids)
        self._prompt_logprobs = body.prompt_logprobs is not None

    @abstractmethod
    def opening(self, choice: int) -> dict[str, object] | None:
        """Return the entry before the choice's first token in a stream, if there is one."""

    def delta(self, delta: ChoiceOutput) -> dict[str, object] | None:
        """Return the entry of new output in a stream; None where there is nothing to send."""
        content = self._delta_content(delta)
        tokens_matter = self._logprobs or self._token_ids
        if not (any(content.values()) or delta.end or (delta.tokens and tokens_matter)):
            return None
        scored = self._logprobs and delta.tokens
        entry = self._entry(delta, content, self._written(*self._scored(delta)) if scored else None)
        return {**entry, "token_ids": delta.tokens} if self._token_ids else entry

    def whole(self, output: ChoiceOutput) -> Steps[dict[str, object]]:
        """Return the entry of a complete choice."""
        details = None
        if self._logprobs:
            tokens, entries, offsets = self._scored(output)
            details = yield from serialize_in_steps(
                len(tokens), lambda some: self._written(tokens[some], entries[some], offsets[some])
            )
        entry = self._entry(output, self._whole_content(output), details)
        if self._prompt_logprobs:
            ids = self._prompts[output.choice // self._choices].ids
            entry["prompt_logprobs"] = yield from prompt_logprobs(self._texts, ids, output.prompt_logprobs)
        return {**entry, "token_ids": output.tokens} if self._token_ids else entry

    def extra_fields(self) -> dict[str, object]:
        """Return more fields of a whole response or of a first chunk."""
        return {}

    @abstractmethod
    def _delta_content(self, delta: ChoiceOutput) -> dict[str, object]: ...

    @abstractmethod
    def _whole_content(self, output: ChoiceOutput) -> dict[str, object]: ...

    @abstractmethod
    def _written(self, tokens: Tokens, entries: Entries, offsets: Sequence[int]) -> dict[str, object]:
        """Return the logprobs object of tokens, whose texts start at the offsets."""

    def _scored(self, output: ChoiceOutput) -> tuple[Tokens, Entries, Sequence[int]]:
        """Return the tokens with log-probabilities, and the offsets of their texts."""
        return output.tokens, output.logprobs, output.offsets

    def _entry(
        self, output: ChoiceOutput, content: dict[str, object], details: dict[str, object] | None
    ) -> dict[str, object]:
        end = output.end
        return {
            "index": output.choice,
            **content,
            "logprobs": details,
            "finish_reason": end.reason if end else None,
            "stop_reason": end.cause if end else None,
        }


class CompletionSerializer(ChoiceSerializer):
    """Writes choices of `/v1/completions`.

    `echoes` holds the text before the output of each prompt, and the offsets of its tokens where the prompt
    is scored.
    """

    whole_kind = chunk_kind = "text_completion"

    def __init__(
        self,
        texts: TokenTexts,
        body: GenerationRequest,
        logprobs: bool,
        prompts: Sequence[TokenPrompt],
        choices: int,
        echoes: Sequence[tuple[str, Sequence[int]]],
    ) -> None:
        super().__init__(texts, body, logprobs, prompts, choices)
        self._echoes = echoes

    def opening(self, choice: int) -> dict[str, object] | None:
        text, _ = self._echoes[choice // self._choices]
        if choice > 0 and not text and not self._token_ids:
            return None
        return {**self._entry(ChoiceOutput(choice), {"text": text}, None), **self._prompt_ids(choice)}

    def _delta_content(self, delta: ChoiceOutput) -> dict[str, object]:
        return {"text": delta.text}

    def _whole_content(self, output: ChoiceOutput) -> dict[str, object]:
        text, _ = self._echoes[output.choice // self._choices]
        return {"text": text + output.text, **self._prompt_ids(output.choice)}

    def _prompt_ids(self, choice: int) -> dict[str, object]:
        ids = self._prompts[choice // self._choices].ids
        return {"prompt_token_ids": ids} if self._token_ids else {}

    def _written(self, tokens: Tokens, entries: Entries, offsets: Sequence[int]) -> dict[str, object]:
        return completion_logprobs(self._texts, tokens, entries, offsets)

    def _scored(self, output: ChoiceOutput) -> tuple[Tokens, Entries, Sequence[int]]:
        prompt = output.choice // self._choices
        text, prompt_offsets = self._echoes[prompt]
        offsets = [*prompt_offsets, *(len(text) + offset for offset in output.offsets)]
        if not prompt_offsets:
            return output.tokens, output.logprobs, offsets
        entries = [None, *output.prompt_logprobs, *output.logprobs]
        return [*self._prompts[prompt].ids, *output.tokens], entries, offsets


class ChatSerializer(ChoiceSerializer):
    """Writes choices of `/v1/chat/completions`, with one `MessageWriter` for each choice."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        texts: TokenTexts,
        body: GenerationRequest,
        logprobs: bool,
        prompt: TokenPrompt,
        writers: Sequence[MessageWriter],
        skip_special: bool,
    ) -> None:
        super().__init__(texts, body, logprobs, [prompt], len(writers))
        self._writers = writers
        self._skip_special = skip_special

    def opening(self, choice: int) -> dict[str, object] | None:
        return self._entry(ChoiceOutput(choice), {"delta": {"role": "assistant", "content": ""}}, None)

    def extra_fields(self) -> dict[str, object]:
        return {"prompt_token_ids": self._prompts[0].ids} if self._token_ids else {}

    def _delta_content(self, delta: ChoiceOutput) -> dict[str, object]:
        writer = self._writers[delta.choice]
        writer.skip(delta.resumed_text)
        return {"delta": writer.push(delta.text, last=delta.end is not None)}

    def _whole_content(self, output: ChoiceOutput) -> dict[str, object]:
        writer = self._writers[output.choice]
        writer.skip(output.resumed_text)
        writer.push(output.text, last=True)
        return {"message": writer.message()}

    def _written(self, tokens: Tokens, entries: Entries, offsets: Sequence[int]) -> dict[str, object]:
        del offsets
        return chat_logprobs(self._texts, tokens, entries, self._skip_special)

    def _entry(
        self, output: ChoiceOutput, content: dict[str, object], details: dict[str, object] | None
    ) -> dict[str, object]:
        entry = super()._entry(output, content, details)
        if entry["finish_reason"] == "stop" and self._writers[output.choice].called:
            entry["finish_reason"] = "tool_calls"
        return entry


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
        values = {token: entry.chosen} | dict(entry.top)
        ranks = {other: rank for rank, (other, _) in enumerate(entry.top, 1)}
        told = {
            str(each): {
                "logprob": finite(value),
                "rank": ranks.get(each),
                "decoded_token": texts.text_of(each),
            }
            for each, value in values.items()
        }
        written.append(msgspec.json.encode(told))
        if len(written) % _TOKENS_PER_STEP == 0:
            yield
    return msgspec.Raw(b"[%s]" % b",".join(written))


def completion_logprobs(
    texts: TokenTexts, tokens: Tokens, entries: Entries, offsets: Sequence[int]
) -> dict[str, object]:
    """Return the logprobs object of the completions API."""
    return {
        "tokens": [texts.text_of(token) for token in tokens],
        "token_logprobs": [entry and finite(entry.chosen) for entry in entries],
        "top_logprobs": [
            entry and _top_by_text(texts, token, entry) for token, entry in zip(tokens, entries, strict=True)
        ],
        "text_offset": list(offsets),
    }


def _top_by_text(texts: TokenTexts, chosen: int, entry: TokenLogprobs) -> dict[str, float]:
    """Map texts to log-probabilities. The chosen token is always included, as one more where necessary."""
    found = {texts.text_of(chosen): finite(entry.chosen)}
    for token, value in entry.top:
        text = texts.text_of(token)
        if token != chosen:
            # Different tokens may share a text, such as a letter and its byte.
            found[f"token_id:{token}" if text in found else text] = finite(value)
    return found


def chat_logprobs(
    texts: TokenTexts, tokens: Tokens, entries: Entries, skip_special: bool = True
) -> dict[str, object]:
    """Return the logprobs object of the chat API. `skip_special`: the text is without special tokens."""

    def entry_of(token: int, logprob: float) -> dict[str, object]:
        shown = not (skip_special and texts.is_special(token))
        data = list(texts.bytes_of(token)) if shown else None
        return {"token": texts.text_of(token), "logprob": finite(logprob), "bytes": data}

    return {
        "content": [
            {
                **entry_of(token, entry.chosen),
                "top_logprobs": [entry_of(other, value) for other, value in entry.top],
            }
            for token, entry in zip(tokens, entries, strict=True)
            if entry is not None
        ],
        "refusal": None,
    }


def finite(logprob: float) -> float:
    """Return the value within the range of JSON."""
    return max(logprob, MIN_LOGPROB)
