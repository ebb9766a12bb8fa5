"""`ssd bench serve`: loads any OpenAI endpoint, and tells what `vllm bench serve` would tell.

Knows what is sent when; the client and the figures are those of `ssd bench load`.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import httpx

from ssd_serve.base.depths import POSITIONS
from ssd_serve.base.errors import SsdError, UserError
from ssd_serve.bench.load.arrivals import arrival_times
from ssd_serve.bench.load.client import Answer, Endpoint, LoadClient, LoadRequest, open_client
from ssd_serve.bench.load.keys import detailed, serve_keys
from ssd_serve.bench.metrics_page import by_label, metric
from ssd_serve.bench.tables import text_table

_OWN = "ssd_"
_PREFIXES = (_OWN, "vllm:")
"""Of the metrics of engines that tell what speculation did."""
_COUNTERS = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
_TOLD_WITHIN_S = 1.5
"""Servers tell their counters about once a second."""
_LATENCIES = {
    "ttft": "time to the first token",
    "tpot": "time per token after it",
    "itl": "between two chunks",
    "e2el": "whole request",
    "client_queue_time": "waited in the client",
}


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What is sent: `wanted` at `rate` a second (infinite: all at once), at most `concurrency` at a time.

    `limits` of goodput are milliseconds by name.
    """

    endpoint: Endpoint
    wanted: Sequence[LoadRequest]
    rate: float = math.inf
    burstiness: float = 1.0
    concurrency: int | None = None
    seed: int = 0
    warm_ups: int = 1
    percents: Sequence[float] = (99.0,)
    limits: Mapping[str, float] | None = None
    detailed: bool = False


@dataclass(frozen=True, slots=True)
class _Counted:
    """What a server has counted of its speculation; accepted tokens by position, too."""

    drafts: float
    drafted: float
    accepted: float
    positions: Mapping[int, float]


def as_requests(texts: Sequence[str], count: int, tokens: int, seed: int) -> list[LoadRequest]:
    """As many as are wanted, the texts one after another and from the first on again."""
    return [LoadRequest(texts[index % len(texts)], tokens, seed + index) for index in range(count)]


def run_serve(plan: ServePlan) -> dict[str, object]:
    """The result file. Raises `UserError` for an endpoint that cannot be reached, `SsdError` where it fails
    every request."""
    return asyncio.run(_run(plan))


async def _run(plan: ServePlan) -> dict[str, object]:
    endpoint = plan.endpoint
    async with open_client(endpoint.url, endpoint.api_key) as http:
        if endpoint.model is None:
            endpoint = replace(endpoint, model=await _first_model(http))
        times = arrival_times(len(plan.wanted), plan.rate, plan.burstiness, plan.seed)
        wanted = [replace(each, at_s=at) for each, at in zip(plan.wanted, times, strict=True)]
        async with LoadClient(endpoint) as client:
            _check(await client.closed_loop(wanted[: plan.warm_ups], 1))
            await asyncio.sleep(_TOLD_WITHIN_S if plan.warm_ups else 0.0)
            before = await _speculation(http)
            answers = await client.open_loop(wanted, plan.concurrency)
            await asyncio.sleep(0.0 if before is None else _TOLD_WITHIN_S)
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
        **(
            detailed(answers)
            if plan.detailed
            else {"errors": sorted({one.error for one in answers if one.error})}
        ),
    }


def serve_table(result: Mapping[str, object]) -> str:
    """The figures for a terminal."""
    percents = [name.removesuffix("_ttft_ms") for name in result if name.endswith("_ttft_ms")]
    rows = [
        (told, *(f"{result[f'{which}_{name}_ms']:.2f}" for which in percents))
        for name, told in _LATENCIES.items()
    ]
    head = (
        f"{result['completed']} requests in {result['duration']:.2f} s, {result['failed']} failed, "
        f"{result['max_concurrent_requests']} at once: {result['request_throughput']:.2f} requests/s, "
        f"{result['output_throughput']:.2f} tokens/s"
    )
    good = result["request_goodput"]
    head += "" if good is None else f", {good:.2f} good requests/s"
    if "spec_decode_acceptance_length" in result:
        head += f"\nspeculation: {result['spec_decode_acceptance_length']:.2f} tokens a round"
        rates = result.get("spec_decode_per_position_acceptance_rates")
        shares = ", ".join(f"{100 * rate:.1f} %" for rate in rates) if isinstance(rates, list) else ""
        head += f", accepted by position: {shares}" if shares else ""
    return f"{head}\n{text_table(('ms', *percents), rows)}"


async def _first_model(http: httpx.AsyncClient) -> str:
    try:
        answer = await http.get("/v1/models")
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{http.base_url}/v1/models names no model ({error!r}): is a server there? Else give --model"
        ) from error


async def _speculation(http: httpx.AsyncClient) -> _Counted | None:
    """What the metrics page tells by vLLM's names; None where there is no such page."""
    try:
        page = (await http.get("/metrics")).raise_for_status().text
        prefix = next((each for each in _PREFIXES if f"{each}spec_decode_num_drafts_total" in page), None)
        if prefix is None:
            return None
        drafts, drafted, accepted, positions = (f"{prefix}spec_decode_num_{name}_total" for name in _COUNTERS)
        told = {int(place): value for place, value in by_label(page, positions, "position").items()}
        if prefix == _OWN:
            told.pop(POSITIONS, None)  # all deeper ones together
        return _Counted(metric(page, drafts), metric(page, drafted), metric(page, accepted), told)
    except (httpx.HTTPError, ValueError):
        return None


def _speculation_keys(before: _Counted | None, after: _Counted | None) -> dict[str, object]:
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
    """Single failures are counted; an endpoint that answers nothing ends the benchmark."""
    if answers and all(answer.error for answer in answers):
        raise SsdError(f"the endpoint failed every request: {answers[0].error}")
