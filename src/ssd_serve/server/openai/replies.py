"""Parts of response objects that completions and chat share: ids, usage, speculation figures, logprobs.

Plain dictionaries, ready for JSON. Knows the shapes, not where the values come from.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ssd_serve.base.depths import added, rates
from ssd_serve.base.messages import Figures, TokenLogprobs
from ssd_serve.server.engine.choice import ChoiceEnd
from ssd_serve.server.http.worker_pool import Steps
from ssd_serve.server.text.tokenizer import TokenTexts

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry; vLLM does the same."""

_WRITTEN_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every object of one response begins with. `name` is the request's, told in a header."""

    name: str
    identifier: str
    created: int
    model: str
    fingerprint: str
    seed: int

    @classmethod
    def now(cls, kind: str, name: str, model: str, fingerprint: str, seed: int) -> "ResponseHead":
        """The head of a response that begins now; `kind` begins its id."""
        return cls(name, f"{kind}-{name}", int(time.time()), model, fingerprint, seed)

    def object(self, kind: str) -> dict[str, object]:
        """A response or chunk without its choices."""
        return {
            "id": self.identifier,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, object]:
    """The usage object. `cached_tokens` None: it would tell what others have asked."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": None if cached_tokens is None else {"cached_tokens": cached_tokens},
    }


def speculation(figures: Sequence[Figures], complete: bool) -> dict[str, object]:
    """How speculation went over all choices, in vLLM's shape and with what only this engine knows.

    `acceptance_histogram`: rounds by how many nodes they accepted. `acceptance_by_depth`: of the rounds that
    verified a node at each depth, how many accepted one. `draft_acceptance_rate` counts nodes, so a wide tree
    has a low one. Where the engine did not tell all its figures (not `complete`), what only the engine counts
    is null.
    """
    rounds = sum(one.rounds for one in figures)
    tokens = sum(one.tokens for one in figures)
    accepted = sum(one.accepted for one in figures)
    seen: dict[str, object] = {
        "num_spec_steps": rounds,
        "num_tokens": tokens,
        "num_accepted_draft_tokens": accepted,
        "mean_acceptance_length": ratio(rounds + accepted, rounds),
    }
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
    return {"speculative_decoding": {**seen, **(known if complete else dict.fromkeys(known))}}


def timings(
    prompt_tokens: int, tokens: int, endings: Sequence[ChoiceEnd], tells_cached: bool
) -> dict[str, object]:
    """Where the time went, by llama.cpp's names and ours; of several choices the slowest. Null: not known, or
    it would tell what others have asked."""
    firsts = [each.first_token_s for each in endings if each.first_token_s is not None]
    prompt_s = max((each.figures.prompt_s for each in endings), default=0.0)
    first_s, decoding_s = max(firsts, default=0.0), max((each.decoding_s for each in endings), default=0.0)
    known = tells_cached and bool(firsts) and prompt_s > 0
    return {
        "queue_ms": _ms(max(0.0, first_s - prompt_s)) if known else None,
        "prompt_n": prompt_tokens,
        "prompt_ms": _ms(prompt_s) if known else None,
        "prompt_per_second": ratio(prompt_tokens, prompt_s) if known else None,
        "first_token_ms": _ms(first_s) if firsts else None,
        "predicted_n": tokens,
        "predicted_ms": _ms(decoding_s),
        "predicted_per_second": ratio(tokens, decoding_s),
        "draft_n": sum(each.figures.drafted for each in endings),
        "draft_n_accepted": sum(each.figures.accepted for each in endings),
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _sources(figures: Sequence[Figures]) -> dict[str, dict[str, int]]:
    """What became of the nodes that each source had proposed, over all choices."""
    named = [pair for one in figures for pair in one.sources.items()]
    return {
        source: {
            "num_draft_tokens": sum(each.verified for name, each in named if name == source),
            "num_accepted_draft_tokens": sum(each.accepted for name, each in named if name == source),
        }
        for source in dict.fromkeys(name for name, _ in named)
    }


def ratio(part: float, whole: float) -> float | None:
    """part / whole, or None where there is nothing to divide by."""
    return part / whole if whole else None


def written_in_steps(length: int, write: Callable[[slice], dict[str, object]]) -> Steps[dict[str, object]]:
    """The same object as `write` gives for all of `length` tokens, its lists as JSON already."""
    whole = write(slice(0, 0))
    lists: dict[str, list[bytes]] = {name: [] for name, value in whole.items() if isinstance(value, list)}
    for place in range(0, length, _WRITTEN_AT_ONCE):
        part = write(slice(place, place + _WRITTEN_AT_ONCE))
        for name, written in lists.items():
            written.append(msgspec.json.encode(part[name])[1:-1])
        yield
    return {**whole, **{name: msgspec.Raw(b"[%s]" % b",".join(parts)) for name, parts in lists.items()}}


def prompt_logprobs(
    texts: TokenTexts, tokens: Sequence[int], entries: Sequence[TokenLogprobs]
) -> Steps[msgspec.Raw]:
    """What vLLM tells of a prompt: null for its first token, then of each token itself and of the most
    probable ones at its place, by id."""
    written = [b"null"]
    for token, entry in zip(tokens[1:], entries, strict=False):
        told = {token: finite(entry.chosen)} | {other: finite(value) for other, value in entry.top}
        ranks = {other: rank for rank, (other, _) in enumerate(entry.top, 1)}
        written.append(
            msgspec.json.encode(
                {
                    str(each): {"logprob": value, "rank": ranks.get(each), "decoded_token": texts.text_of(each)}
                    for each, value in told.items()
                }
            )
        )
        if len(written) % _WRITTEN_AT_ONCE == 0:
            yield
    return msgspec.Raw(b"[%s]" % b",".join(written))


def completion_logprobs(
    texts: TokenTexts,
    tokens: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
) -> dict[str, object]:
    """The logprobs object of the completions API; None stands for a prompt's first token, which has none."""
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
    """The chosen token is always there, so there may be one more than was asked for."""
    found = {texts.text_of(chosen): finite(entry.chosen)}
    for token, value in entry.top:
        # Different tokens may share a text (pieces of characters): the more probable one stays.
        found.setdefault(texts.text_of(token), finite(value))
    return found


def chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], entries: Sequence[TokenLogprobs]
) -> dict[str, object]:
    """The logprobs object of the chat API."""
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
    """The value, kept inside what JSON can carry."""
    return max(logprob, MIN_LOGPROB)
