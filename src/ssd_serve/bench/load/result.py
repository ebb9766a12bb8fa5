"""The shape of a result of `ssd bench load`, as far as it is read again."""

import msgspec

from ssd_serve.bench.statistics import Interval


class Percentiles(msgspec.Struct, frozen=True):
    """Of a latency, in ms."""

    p50: float
    p90: float
    p99: float


class LoadRow(msgspec.Struct, frozen=True, kw_only=True):
    """One mode under one load: a concurrency, arrivals at a share of the capacity, or a trace."""

    mode: str
    tokens_per_s: float
    requests: int
    failed: int
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    goodput_share: float = 0.0
    goodput_shares: dict[str, float] = {}
    tokens_per_round: float | None
    nodes_per_round: float | None
    concurrency: int = 0
    offered: float = 0.0
    whole_ms: Percentiles | None = None
    most_at_once: int = 0
    tokens_per_s_quartiles: list[float] = []
    client_cpu_share: float = 0.0
    idle_servers_cpu_share: float = 0.0

    @property
    def good(self) -> dict[str, float]:
        """Shares by times the limits; older results have one of them."""
        return self.goodput_shares or {"1": self.goodput_share}


class LoadRatio(msgspec.Struct, frozen=True):
    """Auto against another mode under one load; `faster` is None where it is a single pair."""

    concurrency: int
    ratio: str
    best: bool
    pairs: int
    faster: Interval | None
    offered: float = 0.0


class ChunkStepsMs(msgspec.Struct, frozen=True):
    """Chunks after a moment."""

    first_chunk_ms: float | None
    speculated_ms: float | None
    longest_gap_ms: float | None
    tokens_per_chunk: float | None


class Resume(msgspec.Struct, frozen=True):
    """One check of what comes after a load."""

    mode: str
    concurrency: int
    outlived_the_burst: bool
    tokens_per_chunk_under_load: float | None
    survivor_after_burst: ChunkStepsMs
    single_before_burst: ChunkStepsMs
    single_after_burst: ChunkStepsMs


class _Limits(msgspec.Struct, frozen=True):
    """What a good answer keeps."""

    ttft_ms: float
    tpot_ms: float


class _Mix(msgspec.Struct, frozen=True):
    """What requests were like."""

    shortest: int
    longest: int
    tokens: int
    shared: float
    prefix: int


class _Plan(msgspec.Struct, frozen=True):
    """What was run."""

    setting: str
    temperature: float
    launches: int
    limits: _Limits
    time_scale: float
    length_scale: float = 1.0
    mix: _Mix | None = None
    tokens: int = 0
    prompt_tokens: int = 0

    @property
    def requests(self) -> str:
        """What they are like; in older results without a mix."""
        if self.mix is None:
            return f"Prompts of up to {self.prompt_tokens} tokens, outputs of {self.tokens}"
        return (
            f"Prompts of {self.mix.shortest} to {self.mix.longest} tokens, evenly on a logarithmic scale, "
            f"{self.mix.shared:.0%} of them with one of four beginnings of {self.mix.prefix}; outputs of "
            f"{self.mix.tokens}"
        )


class LoadResult(msgspec.Struct, frozen=True):
    """What is read of a result; whatever else it holds is left alone."""

    plan: _Plan
    results: list[LoadRow]
    ratios: list[LoadRatio]
    trace: list[LoadRow]
    resume: list[Resume]
    notes: dict[str, object]
    hardware: dict[str, object]
    versions: dict[str, str]
    capacities: dict[str, float] = {}
