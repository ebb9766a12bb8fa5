"""The result of `ssd bench peers`: what is written is what is read."""

from collections.abc import Mapping

import msgspec

from ssd_serve.bench.document import read_as
from ssd_serve.bench.peers.ways import BF16
from ssd_serve.bench.statistics import Interval


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One way at one temperature: quartiles over all answers, and tokens/s of whole requests by launch."""

    engine: str
    mode: str
    shape: str
    dtype: str
    weights: str
    temperature: float
    answers: int
    whole_ms: list[float]
    first_token_ms: list[float]
    decoded_per_s: list[float]
    launches: list[float]
    tokens_per_round: float
    drafted_per_round: float
    acceptance: float | None

    @property
    def name(self) -> str:
        """Engine, mode and shape."""
        return f"{self.engine} {self.mode}" + (f" ({self.shape})" if self.shape else "")

    @property
    def group(self) -> tuple[bool, float]:
        """What it is shown among: weights of as many bits, the same temperature."""
        return self.dtype != BF16, self.temperature


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """How many times as fast one of ours is as a peer; None: of too few pairs. `aim` is for the whole
    request, and is reached where the interval's lower end reaches it."""

    dtype: str
    temperature: float
    ours: str
    theirs: str
    whole: Interval | None
    first_token: Interval | None
    decoding: Interval | None
    aim: float | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the aim is; None: there is none."""
        return None if self.aim is None else self.whole is not None and self.whole.low >= self.aim


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """The shape that a peer's mode is measured in, and the tokens/s of whole requests of all that were tried,
    as they were last measured."""

    name: str
    dtype: str
    temperature: float
    best: str
    tried: dict[str, float]


class Failure(msgspec.Struct, frozen=True):
    """What could not be measured, when, and why."""

    way: str
    when: str
    reason: str


class LeftOut(msgspec.Struct, frozen=True):
    """A peer that is not compared."""

    engine: str
    reason: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    temperatures: list[float]
    prompts: int
    tuning_prompts: int
    tokens: int
    launches: int
    cores: int
    dtypes: list[str]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a result file; whatever else it holds is left alone."""

    results: list[Row]
    ratios: list[Ratio]
    tuning: list[Tuned]
    failures: list[Failure]
    left_out: list[LeftOut]
    plan: Plan
    missing: int
    engines: dict[str, str]
    hardware: dict[str, object]


def read(result: Mapping[str, object]) -> Result:
    """The result as its type."""
    return read_as(Result, result, "ssd bench peers")
