"""The sets of requests that are measured, chosen before anything is.

A looping text is guessed by any drafter. So a server that is not measured answers every request, and one
whose text comes near a loop is replaced by another of its length, for all. Knows requests and texts, not who
is compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ssd_serve.base.errors import SsdError, UserError
from ssd_serve.bench.load.client import LoadClient, LoadRequest
from ssd_serve.bench.load.plan import LoadPlan
from ssd_serve.bench.load.requests import Candidates, RequestMaker
from ssd_serve.bench.load.trace import Arrival
from ssd_serve.bench.prompts import NEARLY, repeated_share

CAPACITY, TRACE = "capacity", "trace"
_ATTEMPTS = 64


def closed(concurrency: int, pair: int) -> str:
    """The name of a closed loop's set."""
    return f"{concurrency}:{pair}"


def opened(share: float, run: int) -> str:
    """The name of an open loop's set."""
    return f"open:{share}:{run}"


def single(launch: int) -> str:
    """The name of a set of one, sent before and after a crowd."""
    return f"resume:{launch}"


def candidate_sets(
    plan: LoadPlan, maker: RequestMaker, arrivals: Sequence[Arrival], context: int
) -> dict[str, list[Candidates]]:
    """What can be sent in each set that counts: warm-ups and crowds around a check do not."""
    if (plan.concurrencies or plan.open_loop.shares) and plan.mix.longest + plan.mix.tokens > context:
        raise UserError(f"--prompt-tokens and --tokens together must not exceed the context of {context}")
    sizes = {
        closed(crowd, pair): plan.size(crowd) for crowd in plan.concurrencies for pair in range(plan.pairs)
    }
    if plan.open_loop.shares:
        sizes[CAPACITY] = 2 * plan.crowd
    for share in plan.open_loop.shares:
        sizes |= {opened(share, run): plan.open_loop.requests for run in range(plan.open_loop.runs)}
    if plan.resume and plan.concurrencies:
        sizes |= {single(launch): 1 for launch in range(plan.launches)}
    found = {name: maker.candidates(name, size, plan.mix) for name, size in sizes.items()}
    return {**found, TRACE: maker.replay(arrivals)} if arrivals else found


@dataclass(frozen=True, slots=True)
class Sets:
    """Requests by the name of their set, and the share of those tried that was left out."""

    requests: dict[str, list[LoadRequest]]
    left_out: float


async def choose(client: LoadClient, sets: Mapping[str, Sequence[Candidates]], at_once: int) -> Sets:
    """The first candidate of each request whose text does not nearly loop."""
    found: dict[tuple[str, int], LoadRequest] = {}
    places = [(name, index) for name, some in sets.items() for index in range(len(some))]
    left, tried = places, 0
    for attempt in range(_ATTEMPTS):
        wanted = [sets[name][index](attempt) for name, index in left]
        tried += len(wanted)
        for place, each, answer in zip(left, wanted, await client.closed_loop(wanted, at_once), strict=True):
            if answer.error:
                raise SsdError(f"the server that continues all prompts failed: {answer.error}")
            if repeated_share(answer.text) <= NEARLY:
                found[place] = each
        left = [place for place in left if place not in found]
        if not left:
            return Sets(
                {name: [found[name, index] for index in range(len(some))] for name, some in sets.items()},
                1 - len(places) / max(1, tried),
            )
    name, index = left[0]
    tokens = sets[name][index](0).tokens
    raise UserError(
        f"{len(left)} of {len(places)} requests have no prompt among {_ATTEMPTS} whose text does not loop, "
        f"the first of them with {tokens} new tokens: ask for fewer, or for a higher temperature"
    )
