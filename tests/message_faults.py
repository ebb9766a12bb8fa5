"""Schedules of lost, late and duplicated messages for `memory_pair` and for the proxy of chaos tests."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from ssd_serve.base.draft_messages import Message
from ssd_serve.bench.memory_channel import Schedule


def scripted(fates: Mapping[int, tuple[int, ...]]) -> Schedule:
    """Apply faults to these messages (counted from 0), and deliver all others without delay."""
    return lambda index, _message: fates.get(index, (0,))


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Probabilities of faults; delays are 1 to `max_ticks`; the message types `spare` have none."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    max_ticks: int = 8
    spare: tuple[type[Message], ...] = ()


def seeded(seed: int, rates: FaultRates) -> Schedule:
    """Return random faults that depend only on the seed."""
    source = random.Random(seed)

    def fate(_index: int, message: Message) -> tuple[int, ...]:
        if isinstance(message, rates.spare):
            return (0,)
        if source.random() < rates.drop:
            return ()
        copies = 2 if source.random() < rates.duplicate else 1
        return tuple(
            source.randint(1, rates.max_ticks) if source.random() < rates.delay else 0 for _ in range(copies)
        )

    return fate
