"""Engines whose true speed is known, on a machine that drifts and is noisy."""

import math
import random
from collections.abc import Generator
from contextlib import contextmanager

from ssd_serve.bench.peers.client import Ask, PeerError, Sample
from ssd_serve.bench.peers.engines import Engine
from ssd_serve.bench.peers.ways import DRAFT, OURS, Way

STEPS_S = {"plain": 0.012, "ar": 0.012, "draft": 0.008, "n-gram": 0.010, "sd": 0.007, "ssd": 0.006}
AUTO_S = 0.005
BEST = Way("", DRAFT, 5, 0.6)


def step_s(way: Way) -> float:
    """Seconds a token: least at the best shape, and with all threads."""
    seconds = STEPS_S.get(way.mode, AUTO_S)
    if way.length:
        seconds *= 1 + 0.1 * abs(math.log(way.length / BEST.length))
    if way.mode == DRAFT:
        seconds *= 1 + 0.3 * abs(way.threshold - BEST.threshold)
    if way.engine != OURS:
        seconds *= 1.3 if way.cores == 1 else 1.0
    return seconds


class Machine:
    """Starts engines that answer at once and tell how long it would have taken. `broken` ways fail when they
    are asked, `absent` ones when they are started; texts of `looping` ones loop until a seed is odd."""

    def __init__(
        self, noise: float = 0.02, broken: str = "none", absent: str = "none", looping: str = "none"
    ) -> None:
        self._chance = random.Random(7)
        self._noise = noise
        self._drift = 1.0
        self._broken, self._absent, self._looping = broken, absent, looping
        self.running: set[Way] = set()
        self.most = 0
        self.started: list[Way] = []
        self.asked: list[tuple[Way, Ask]] = []

    @contextmanager
    def launch(self, way: Way) -> Generator[Engine]:
        """One process."""
        if self._absent in way.label:
            raise PeerError("there is no such program")
        self.started.append(way)
        self.running.add(way)
        self.most = max(self.most, len(self.running))
        try:
            yield _Fake(self)
        finally:
            self.running.remove(way)

    def answer(self, way: Way, ask: Ask) -> Sample:
        """What a request gives."""
        self.asked.append((way, ask))
        if self._broken in way.label:
            raise PeerError("it broke off")
        self._drift *= 1.0005
        slow = self._drift * math.exp(self._chance.gauss(0, self._noise)) * (1 + ask.seed % 5 / 10)
        loops = self._looping in way.label and ask.seed % 2 == 0
        drafts = (ask.tokens, ask.tokens // 2) if way.speculates else (0, 0)
        return Sample(
            tokens=ask.tokens,
            counted=ask.tokens - 1,
            first_s=0.1 * slow,
            decode_s=(ask.tokens - 1) * step_s(way) * slow,
            drafted=drafts[0],
            accepted=drafts[1],
            ids=(1,) * ask.tokens if loops else tuple(range(ask.tokens)),
        )


class _Fake:
    version = "1.0"

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def page(self) -> str:
        return ""

    def ask(self, way: Way, ask: Ask) -> Sample:
        return self._machine.answer(way, ask)
