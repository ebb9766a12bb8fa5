"""What a set of answers adds up to, under the names and by the definitions of `vllm bench serve`.

So that figures of both commands stand side by side. Knows answers, not servers.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from ssd_serve.bench.load.client import Answer
from ssd_serve.bench.load.statistics import duration

TTFT, TPOT, ITL, E2EL, QUEUE = "ttft", "tpot", "itl", "e2el", "client_queue_time"
GOOD = (TTFT, TPOT, E2EL)
"""What goodput may limit."""


def serve_keys(
    answers: Sequence[Answer], percents: Sequence[float], limits: Mapping[str, float]
) -> dict[str, object]:
    """Throughputs, and mean, median, deviation and percentiles of each latency in ms.

    Latencies count from when a request was sent; what it waited in the client before is `client_queue_time`.
    `limits` of goodput are milliseconds by name. Only whole answers count, but for `failed`.
    """
    whole = [answer for answer in answers if not answer.error]
    seconds = duration(answers)
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
    """The lists behind the figures, in seconds; of a failed request they are empty."""
    start = min(answer.due_s for answer in answers)
    return {
        "input_lens": [answer.prompt_tokens for answer in answers],
        "output_lens": [answer.tokens for answer in answers],
        "ttfts": [_ttft(answer) if answer.arrivals else 0.0 for answer in answers],
        "itls": [answer.gaps_s for answer in answers],
        "start_times": [answer.sent_s - start for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def is_good(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Whether a whole answer keeps every limit; one token has no time per token to keep."""
    seen = {TTFT: _ttft(answer), TPOT: answer.tpot_s or 0.0, E2EL: _latency(answer)}
    return all(1e3 * seen[name] <= limit for name, limit in limits.items())


def most_at_once(answers: Sequence[Answer]) -> int:
    """The most requests that ran at the same time."""
    changes = [(answer.sent_s, 1) for answer in answers]
    changes += [(answer.sent_s + _latency(answer), -1) for answer in answers]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def _latencies(whole: Sequence[Answer]) -> dict[str, list[float]]:
    return {
        TTFT: [_ttft(answer) for answer in whole],
        TPOT: [tpot for answer in whole if (tpot := answer.tpot_s) is not None],
        ITL: [gap for answer in whole for gap in answer.gaps_s],
        E2EL: [_latency(answer) for answer in whole],
        QUEUE: [answer.sent_s - answer.due_s for answer in whole],
    }


def _ttft(answer: Answer) -> float:
    return answer.arrivals[0][0] - answer.sent_s


def _latency(answer: Answer) -> float:
    return answer.arrivals[-1][0] - answer.sent_s


def _spread(name: str, values: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    """Zeros where there are none, as there."""
    ms = 1e3 * np.array(values or [0.0])
    found = {"mean": np.mean(ms), "median": np.median(ms), "std": np.std(ms)}
    found |= {f"p{percent:g}": np.percentile(ms, percent) for percent in percents}
    return {f"{which}_{name}_ms": float(value) for which, value in found.items()}
