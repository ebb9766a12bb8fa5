"""`ssd bench serve`: loads any OpenAI endpoint and reports the figures of `vllm bench serve`."""

import asyncio
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from ssd_serve.base.engine_config import EMBEDDED
from ssd_serve.base.errors import SsdError, UserError
from ssd_serve.base.messages import POSITIONS
from ssd_serve.bench.client import Answer, Endpoint, LoadRequest, open_client, send_load
from ssd_serve.bench.prompts import held_out_prompts, named_seed
from ssd_serve.models.hub import resolve_model
from ssd_serve.models.text.tokenizer import Tokenizer

_OWN = "ssd_"
_PREFIXES = (_OWN, "vllm:")
"""Prefixes of the speculation metrics of engines."""
_COUNTERS = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
_METRICS_DELAY_S = 1.5
"""Servers update their counters about once a second."""
_TTFT, _TPOT, _E2EL = "ttft", "tpot", "e2el"
GOODPUT_LIMITS = (_TTFT, _TPOT, _E2EL)


@dataclass(frozen=True, slots=True)
class ServePlan:
    """A load: `requests` at `rate` a second (infinite: all at once), at most `concurrency` at a time.

    `limits` of goodput are milliseconds by name.
    """

    endpoint: Endpoint
    requests: Sequence[LoadRequest]
    rate: float = math.inf
    burstiness: float = 1.0
    concurrency: int | None = None
    seed: int = 0
    warm_ups: int = 1
    percents: Sequence[float] = (99.0,)
    limits: Mapping[str, float] | None = None
    detailed: bool = False


@dataclass(frozen=True, slots=True)
class _SpeculationCounters:
    """A server's speculation counters; `positions` has accepted tokens by position."""

    drafts: float
    drafted: float
    accepted: float
    positions: Mapping[int, float]


def as_requests(texts: Sequence[str], count: int, tokens: int, seed: int) -> list[LoadRequest]:
    """Make `count` requests of the texts in turn, starting again after the last text."""
    return [LoadRequest(texts[index % len(texts)], tokens, seed + index) for index in range(count)]


def run_serve(plan: ServePlan) -> dict[str, object]:
    """Send the load and return the result file.

    Raises `UserError` for an endpoint that cannot be reached, `SsdError` if every request fails.
    """
    return asyncio.run(_run(plan))


async def _run(plan: ServePlan) -> dict[str, object]:
    endpoint = plan.endpoint
    async with open_client(endpoint.url, endpoint.api_key) as http:
        if endpoint.model is None:
            endpoint = replace(endpoint, model=await _first_model(http))
        times = arrival_times(len(plan.requests), plan.rate, plan.burstiness, plan.seed)
        wanted = [replace(each, at_s=at) for each, at in zip(plan.requests, times, strict=True)]
        _check(await send_load(http, endpoint, plan.requests[: plan.warm_ups], 1))
        await asyncio.sleep(_METRICS_DELAY_S if plan.warm_ups else 0.0)
        before = await _speculation(http)
        answers = await send_load(http, endpoint, wanted, plan.concurrency)
        await asyncio.sleep(0.0 if before is None else _METRICS_DELAY_S)
        after = await _speculation(http)
    _check(answers)
    return {
        "benchmark": "serve",
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if endpoint.chat else "openai",
        "model_id": endpoint.model,
        "num_prompts": len(wanted),
        "request_rate": "inf" if math.isinf(plan.rate) else plan.rate,
        "burstiness": plan.burstiness,
        "max_concurrency": plan.concurrency,
        "seed": plan.seed,
        "ignore_eos": endpoint.exact,
        **serve_keys(answers, plan.percents, plan.limits or {}),
        **_speculation_keys(before, after),
        "answers": [_answer_row(request, answer) for request, answer in zip(wanted, answers, strict=True)],
        **(
            detailed(answers)
            if plan.detailed
            else {"errors": sorted({one.error for one in answers if one.error})}
        ),
    }


async def _first_model(http: httpx.AsyncClient) -> str:
    try:
        answer = await http.get("/v1/models")
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{http.base_url}/v1/models names no model ({error!r}): is a server there? Else give --model"
        ) from error


async def _speculation(http: httpx.AsyncClient) -> _SpeculationCounters | None:
    """Read the counters by vLLM's metric names; None for a server without them."""
    try:
        page = (await http.get("/metrics")).raise_for_status().text
        prefix = next((each for each in _PREFIXES if f"{each}spec_decode_num_drafts_total" in page), None)
        if prefix is None:
            return None
        drafts, drafted, accepted, positions = (f"{prefix}spec_decode_num_{name}_total" for name in _COUNTERS)
        accepted_at = {int(place): value for place, value in by_label(page, positions, "position").items()}
        if prefix == _OWN:
            accepted_at.pop(POSITIONS, None)  # sums all deeper positions
        return _SpeculationCounters(
            metric(page, drafts), metric(page, drafted), metric(page, accepted), accepted_at
        )
    except (httpx.HTTPError, ValueError):
        return None


def by_label(page: str, name: str, label: str) -> dict[str, float]:
    """Return a metric by the values of one of its labels, summed over the others."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and label in sample.labels:
                value = sample.labels[label]
                found[value] = found.get(value, 0.0) + sample.value
    return found


def metric(page: str, name: str) -> float:
    """Return the sum of a metric over its labels; 0 if the page lacks it."""
    families = text_string_to_metric_families(page)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def _speculation_keys(
    before: _SpeculationCounters | None, after: _SpeculationCounters | None
) -> dict[str, object]:
    if before is None or after is None:
        return {}
    drafts, drafted = int(after.drafts - before.drafts), int(after.drafted - before.drafted)
    accepted = int(after.accepted - before.accepted)
    if not drafts or not drafted:
        return {}
    came = [after.positions[place] - before.positions.get(place, 0.0) for place in sorted(after.positions)]
    deepest = max((place for place, count in enumerate(came, 1) if count), default=0)
    rates = [count / drafts for count in came[:deepest]]
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        **({"spec_decode_per_position_acceptance_rates": rates} if rates else {}),
    }


def _check(answers: Sequence[Answer]) -> None:
    if answers and all(answer.error for answer in answers):
        raise SsdError(f"the endpoint failed every request: {answers[0].error}")


def _answer_row(request: LoadRequest, answer: Answer) -> dict[str, object]:
    """Return the single answer for the result file, by which all figures can be recomputed."""
    prompt = request.prompt if isinstance(request.prompt, str) else ",".join(map(str, request.prompt))
    return {
        "prompt": hashlib.sha256(prompt.encode()).hexdigest()[:16],
        "seed": request.seed,
        "due_s": round(answer.due_s, 6),
        "sent_s": round(answer.sent_s, 6),
        "ttft_s": round(answer.ttft_s, 6) if answer.arrivals else None,
        "latency_s": round(answer.latency_s, 6) if answer.arrivals else None,
        "tokens": answer.tokens,
        "error": answer.error,
    }


def arrival_times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Return the seconds from the start at which `count` requests arrive, `rate` a second.

    Pauses have a gamma distribution of the shape `burstiness`: 1 is a Poisson process, less is bursty, more
    is more even. The last request arrives at `count / rate`, so that every seed offers the same rate.
    """
    if math.isinf(rate):
        return [0.0] * count
    pauses = np.random.default_rng(seed).gamma(burstiness, size=count)
    times = np.cumsum(pauses)
    return [float(at) for at in times * (count / rate / times[-1])]


def serve_keys(
    answers: Sequence[Answer], percents: Sequence[float], limits: Mapping[str, float]
) -> dict[str, object]:
    """Return throughputs, and mean, median, deviation and percentiles of each latency in ms.

    Latencies count from sending; waiting in the client before is `client_queue_time`. `limits` of goodput are
    milliseconds by name. Only complete answers count, except in `failed`.
    """
    whole = [answer for answer in answers if not answer.error]
    seconds = max(answer.ended_s for answer in answers) - min(answer.sent_s for answer in answers)
    read = [answer.prompt_tokens for answer in whole if answer.prompt_tokens is not None]
    generated = sum(answer.tokens for answer in whole)
    good = sum(is_good(answer, limits) for answer in whole)
    keys: dict[str, object] = {
        "duration": seconds,
        "completed": len(whole),
        "failed": len(answers) - len(whole),
        "total_input_tokens": sum(read) if len(read) == len(whole) else None,
        "total_output_tokens": generated,
        "request_throughput": len(whole) / seconds,
        "request_goodput": good / seconds if limits else None,
        "output_throughput": generated / seconds,
        "total_token_throughput": (sum(read) + generated) / seconds if len(read) == len(whole) else None,
        "max_concurrent_requests": most_at_once(whole),
    }
    for name, values in _latencies(whole).items():
        keys |= _spread(name, values, percents)
    return keys


def detailed(answers: Sequence[Answer]) -> dict[str, object]:
    """Return the lists behind the figures, in seconds; the lists of a failed request are empty."""
    start = min(answer.due_s for answer in answers)
    return {
        "input_lens": [answer.prompt_tokens for answer in answers],
        "output_lens": [answer.tokens for answer in answers],
        "ttfts": [answer.ttft_s if answer.arrivals else 0.0 for answer in answers],
        "itls": [answer.gaps_s for answer in answers],
        "start_times": [answer.sent_s - start for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def is_good(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Return True if a complete answer keeps every limit; a single token has no time per token."""
    seen = {_TTFT: answer.ttft_s, _TPOT: answer.tpot_s or 0.0, _E2EL: answer.latency_s}
    return all(1e3 * seen[name] <= limit for name, limit in limits.items())


def most_at_once(answers: Sequence[Answer]) -> int:
    """Return the maximum number of requests that ran at the same time."""
    changes = [(answer.sent_s, 1) for answer in answers]
    changes += [(answer.sent_s + answer.latency_s, -1) for answer in answers]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def _latencies(whole: Sequence[Answer]) -> dict[str, list[float]]:
    return {
        _TTFT: [answer.ttft_s for answer in whole],
        _TPOT: [tpot for answer in whole if (tpot := answer.tpot_s) is not None],
        "itl": [gap for answer in whole for gap in answer.gaps_s],
        _E2EL: [answer.latency_s for answer in whole],
        "client_queue_time": [answer.sent_s - answer.due_s for answer in whole],
    }


def _spread(name: str, values: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    """Return zeros for no values, as vLLM does."""
    ms = 1e3 * np.array(values or [0.0])
    found = {"mean": np.mean(ms), "median": np.median(ms), "std": np.std(ms)}
    found |= {f"p{percent:g}": np.percentile(ms, percent) for percent in percents}
    return {f"{which}_{name}_ms": float(value) for which, value in found.items()}


def latency_rows(result: Mapping[str, object]) -> list[dict[str, object]]:
    """Return one row a latency for the printed table."""
    names = dict.fromkeys(name.split("_", 1)[1] for name in result if name.endswith("_ms"))
    return [
        {"ms": name.removesuffix("_ms")}
        | {
            which.removesuffix(f"_{name}"): value
            for which, value in result.items()
            if which.endswith(f"_{name}")
        }
        for name in names
    ]


def held_out_texts(seed: int, count: int, shortest: int, longest: int) -> list[str]:
    """Return texts for servers with any tokenizer, from files held out from the embedded pair.

    Lengths are uniform on a logarithmic scale, in tokens of the embedded pair.
    """
    folder = resolve_model(EMBEDDED, "target")
    tokenizer = Tokenizer(folder)
    pool = held_out_prompts(folder, tokenizer, longest)
    texts: list[str] = []
    for index in range(count):
        share = named_seed(f"length:{seed}:{index}") / 2**32
        length = round(shortest * (longest / shortest) ** share)
        place, tokens = named_seed(f"serve:{seed}") + index, list[int]()
        while len(tokens) < length:
            tokens.extend(pool[place % len(pool)].tokens)
            place += 1
        texts.append(tokenizer.decode(tokens[-length:]))
    return texts
