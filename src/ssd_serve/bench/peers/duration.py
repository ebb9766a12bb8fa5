"""How long a comparison takes, guessed before anything is measured. Knows counts, not engines."""

from itertools import product

from ssd_serve.bench.peers.fleet import WARM_UPS
from ssd_serve.bench.peers.result import Plan
from ssd_serve.bench.peers.ways import (
    LLAMA,
    OUR_MODES,
    OURS,
    PEER_MODES,
    PLAIN,
    TRANSFORMERS,
    VLLM,
    Peers,
    shapes,
)

_START_S = {OURS: 15.0, LLAMA: 3.0, VLLM: 45.0, TRANSFORMERS: 10.0}
_FIRST_S, _TOKEN_S = 0.3, 0.014
"""Of an answer on two cores of a server's processor, all engines together."""
_CLIMBS, _TRIED, _DUEL = 3, 5, 4
"""Rotations until the best shape is inside of what was tried, shapes in each, and answers to each prompt of a
duel."""


def answers_of(plan: Plan, peers: Peers) -> int:
    """How many answers count in the end."""
    ways = sum(len(OUR_MODES) + len(PEER_MODES) * len(peers.engines(dtype)) for dtype in plan.dtypes)
    return ways * len(plan.temperatures) * plan.prompts * plan.launches


def minutes(plan: Plan, peers: Peers) -> float:
    """Tuning and measuring, of an embedded pair with ballast on two cores. An estimate, not a promise."""
    answer = _FIRST_S + _TOKEN_S * plan.tokens
    measured = plan.launches * len(plan.temperatures) * (plan.prompts + WARM_UPS)
    seconds = 0.0
    for dtype in plan.dtypes:
        seconds += plan.launches * len(OUR_MODES) * _START_S[OURS]
        seconds += len(OUR_MODES) * measured * answer
        for engine, mode in product(peers.engines(dtype), PEER_MODES):
            starts, answers = _tuning(len(shapes(engine, mode, plan.cores)), plan.tuning_prompts, mode)
            servers = plan.launches * (1 if mode == PLAIN else len(plan.temperatures))
            seconds += (measured + len(plan.temperatures) * answers) * answer
            if engine != TRANSFORMERS or mode == PLAIN:  # one process answers in all its ways
                tuned = 1 if engine == TRANSFORMERS else len(plan.temperatures) * starts
                seconds += (servers + tuned) * _START_S[engine]
    return seconds / 60


def _tuning(shapes_at_first: int, prompts: int, mode: str) -> tuple[int, int]:
    """Engines that are started, and answers."""
    tried, climbs = (2, 1) if mode == PLAIN else (_TRIED, _CLIMBS)
    starts, answers = climbs * (tried - 1) + shapes_at_first, climbs * tried * prompts
    answers += (climbs - 1) * _DUEL * prompts
    few = 4
    while shapes_at_first > 1:
        answers += shapes_at_first * few
        shapes_at_first, few = shapes_at_first // 2, min(prompts, 2 * few)
    return starts, answers + WARM_UPS * starts
