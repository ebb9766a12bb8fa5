"""Traffic that does not wait for answers: Poisson arrivals at shares of the capacity, and a trace as it was.

Knows what is sent when to which server; plans, figures and requests are other modules'.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ssd_serve.bench.load.arrivals import arrival_times
from ssd_serve.bench.load.client import Answer, LoadClient, LoadRequest
from ssd_serve.bench.load.statistics import GoodLimits, duration, summary, throughput, whole_ms
from ssd_serve.bench.load.trace import FittedTrace
from ssd_serve.bench.statistics import percentile


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """As many arrivals at each of `shares` of the capacity, in `runs` that the launches share out."""

    shares: tuple[float, ...] = ()
    requests: int = 64
    runs: int = 6


def arriving(wanted: Sequence[LoadRequest], rate: float) -> list[LoadRequest]:
    """The requests with times of arrival, which follow from them."""
    times = arrival_times(len(wanted), rate, seed=wanted[0].seed)
    return [replace(each, at_s=at) for each, at in zip(wanted, times, strict=True)]


async def capacities(
    clients: Mapping[str, LoadClient], wanted: Sequence[LoadRequest], concurrency: int, rest_s: float
) -> dict[str, float]:
    """Requests a second of each server where there are always `concurrency` of them, as long as they last."""
    found: dict[str, float] = {}
    for name, client in sorted(clients.items()):
        await asyncio.sleep(rest_s)
        answers = await client.closed_loop(wanted, concurrency)
        found[name] = sum(not answer.error for answer in answers) / duration(answers)
    return found


def replay_row(name: str, answers: Sequence[Answer], limits: GoodLimits) -> dict[str, object]:
    """One server's figures under the arrivals of a trace."""
    late = [1e3 * (answer.sent_s - answer.due_s) for answer in answers]
    return {
        "mode": name,
        "tokens_per_s": round(throughput(answers), 2),
        **summary(answers, limits),
        "whole_ms": whole_ms(answers),
        "client_late_ms_p99": round(percentile(late, 99), 2),
    }


def told(replay: FittedTrace, context: int) -> dict[str, object]:
    """For the result file."""
    return {**asdict(replay), "arrivals": len(replay.arrivals), "context": context}
