"""Does speculation come back when the load goes? A request before, during and after a burst, by chunks.

A chunk is what one round committed: two tokens or more mean that a guess was accepted. Knows answers and
times, not why a server speculates.
"""

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ssd_serve.bench.load.client import Answer, LoadClient, LoadRequest, Recording, read
from ssd_serve.bench.load.statistics import speculation_figures


@dataclass(frozen=True, slots=True)
class ChunkSteps:
    """Chunks after a moment, in seconds from it; None where it did not happen.

    `first_chunk_s` is when the first chunk came, `speculated_s` when the first with an accepted guess came.
    """

    first_chunk_s: float | None
    speculated_s: float | None
    longest_gap_s: float | None
    tokens_per_chunk: float | None


def steps_after(arrivals: Sequence[tuple[float, int]], moment_s: float) -> ChunkSteps:
    """What came after the moment. Gaps are between chunks, the first one counted from the moment."""
    later = [(at - moment_s, count) for at, count in arrivals if at > moment_s]
    times = [0.0, *(at for at, _ in later)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return ChunkSteps(
        first_chunk_s=later[0][0] if later else None,
        speculated_s=next((at for at, count in later if count > 1), None),
        longest_gap_s=max(gaps, default=None),
        tokens_per_chunk=sum(count for _, count in later) / len(later) if later else None,
    )


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """One check: a request alone, a long one beside a burst, and the first one again right after it."""

    single: LoadRequest
    survivor: LoadRequest
    burst: Sequence[LoadRequest]
    concurrency: int
    alone_s: float
    """How long the long request is followed after the burst has ended; then the client hangs up."""


async def check_resume(client: LoadClient, plan: ResumePlan) -> dict[str, object]:
    """Run the check on one server; times in ms."""
    before = await client.closed_loop([plan.single], 1)
    recording = Recording(plan.survivor)
    long = asyncio.create_task(client.record(recording))
    answers = await client.closed_loop(plan.burst, plan.concurrency)
    end_s = max(answer.ended_s for answer in answers)
    await asyncio.wait({long}, timeout=plan.alone_s)
    outlived = not long.done()
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
    after = await client.closed_loop([plan.single], 1)
    survivor = read(recording)
    during = [(at, count) for at, count in survivor.arrivals if at <= end_s]
    return {
        "concurrency": plan.concurrency + 1,
        "outlived_the_burst": outlived or any(at > end_s for at, _ in survivor.arrivals),
        "tokens_per_chunk_under_load": _mean([count for _, count in during]),
        "survivor_after_burst": _told(steps_after(survivor.arrivals, end_s)),
        "single_before_burst": _told(_whole(before[0])) | speculation_figures(before),
        "single_after_burst": _told(_whole(after[0])) | speculation_figures(after),
        "failed": sum(bool(answer.error) for answer in [*before, *answers, *after]),
    }


def _whole(answer: Answer) -> ChunkSteps:
    """The steps of an answer after its first token, which no drafter could have guessed."""
    return steps_after(answer.arrivals, answer.arrivals[0][0]) if answer.arrivals else steps_after((), 0.0)


def _told(steps: ChunkSteps) -> dict[str, float | None]:
    return {
        "first_chunk_ms": _ms(steps.first_chunk_s),
        "speculated_ms": _ms(steps.speculated_s),
        "longest_gap_ms": _ms(steps.longest_gap_s),
        "tokens_per_chunk": None if steps.tokens_per_chunk is None else round(steps.tokens_per_chunk, 3),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 2)


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 3) if values else None
