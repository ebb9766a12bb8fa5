"""The engine in virtual time: a verifier and a drafter, each on a device of its own that only a table times.

Models, engine, trees and messages are real; time is not. A forward takes what the device table says, a
message takes a fixed time, and host work takes none. So results do not depend on the machine, nor on what
else it does. Not a measurement of any device. Knows how things are put together, not what is compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from ssd_serve.bench.device_tables import DeviceTable, ForwardTimes, forward_of
from ssd_serve.bench.prompts import Prompt
from ssd_serve.draft_messages import (
    NOISE_SCHEME,
    PROTOCOL_VERSION,
    Growth,
    Hello,
)
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.inline import InlineChannel
from ssd_serve.errors import SsdError
from ssd_serve.kernels.batch import Batch
from ssd_serve.logs import get_logger
from ssd_serve.messages import (
    Committed,
    Figures,
    Finished,
    SamplingParameters,
    Submit,
)
from ssd_serve.models.interface import ForwardResult, Model
from ssd_serve.models.wrapped import WrappedModel
from ssd_serve.plan.forwards import Forward
from ssd_serve.plan.virtual_time import MESSAGE_S, Clock, Timed, VirtualRounds
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for
from ssd_serve.verifier.build import EngineParts, build_engine
from ssd_serve.verifier.drafts.drafters import Drafters
from ssd_serve.verifier.engine import Engine
from ssd_serve.verifier.features import FeatureStore
from ssd_serve.verifier.planning.cost import CostTable, HostCost, Timing
from ssd_serve.verifier.planning.decision import Decision
from ssd_serve.verifier.planning.growth import GrowPolicy
from ssd_serve.verifier.planning.planner import RoundPlanner
from ssd_serve.verifier.planning.ranking import RankedNode
from ssd_serve.verifier.request import Request
from ssd_serve.verifier.round import Rounds
from ssd_serve.verifier.scheduler import ScheduledChunk, SchedulerLimits

SLOTS = 4096
DRAFT_SLOTS = 16384
TREE_NODES = 16384
_MOST_ROWS = 64
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_CONTEXT_ROWS = (1, 8, 32)
_CONTEXT = 512
_STEP_ROWS = 12


class TimedModel(WrappedModel):
    """A model that adds up what its forwards would take."""

    def __init__(self, model: Model, times: ForwardTimes) -> None:
        super().__init__(model)
        self._times = times
        self._seconds = 0.0
        self.forwards = 0
        self.rows = 0

    def forward(self, batch: Batch) -> ForwardResult:
        """Forward now; its time is only noted."""
        self._seconds += self._times.seconds(forward_of(batch))
        self.forwards += 1
        self.rows += batch.rows
        return self._model.forward(batch)

    def take_seconds(self) -> float:
        """Seconds noted since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class InTurnChannel(InlineChannel):
    """The end of a channel to a drafter that works while the verifier waits, and only then."""

    def __init__(self, clock: Clock, core: DrafterCore, timed: Timed, hello: Hello) -> None:
        super().__init__(core, hello, clock)
        self._virtual = clock
        self._timed = timed

    def draft(self) -> list[Growth]:
        growth = super().draft()
        self._virtual.advance(self._virtual.now + self._timed.take_seconds())
        return growth


class ObservedPlanner(RoundPlanner):
    """A planner that others may look at: `before` sees the work of a round before it waits for growth,
    `after` sees it with the chosen nodes; `pick` may choose other nodes."""

    before: Callable[[Sequence[ScheduledChunk]], None] | None = None
    after: Callable[[Sequence[ScheduledChunk], Sequence[RankedNode]], None] | None = None
    pick: Callable[[Sequence[ScheduledChunk]], list[RankedNode]] | None = None

    def choose(
        self, running: Sequence[Request], parts: Sequence[ScheduledChunk], drain: Callable[[], object]
    ) -> tuple[list[RankedNode], Decision]:
        if self.before is not None:
            self.before(parts)
        nodes, decision = super().choose(running, parts, drain)
        if self.pick is not None:
            nodes = self.pick(parts)
        if self.after is not None:
            self.after(parts, nodes)
        return nodes, decision


@dataclass(frozen=True, slots=True)
class TimedPair:
    """Loaded models, and the table that times them. The draft model needs `DRAFT_SLOTS` slots."""

    target: Model
    draft: Model
    table: DeviceTable

    def noise(self) -> NoiseRows:
        """Fresh noise rows for one side."""
        vocabulary = self.target.facts.vocabulary
        return NoiseRows(vocabulary, capacity_for(vocabulary))

    def timed_draft(self) -> TimedModel:
        """The draft model, timed by the table."""
        return TimedModel(self.draft, self.table.draft)

    def hello(self) -> Hello:
        """What both sides agree on; the drafter's step of some nodes, its message included."""
        facts = self.target.facts
        return Hello(
            protocol=PROTOCOL_VERSION,
            noise=NOISE_SCHEME,
            tokenizer="bench",
            vocabulary=facts.vocabulary,
            context=facts.context,
            name="bench",
            step_ms=1e3 * (self.table.draft.seconds(Forward.of_one(_STEP_ROWS, _CONTEXT)) + MESSAGE_S),
        )

    def cost(self) -> CostTable:
        """The table as the verifier's cost model."""
        seconds = self.table.target.seconds
        points = [(rows, 0) for rows in _ROWS] + [(rows, _CONTEXT) for rows in _CONTEXT_ROWS]
        return CostTable([Timing(*each, seconds(Forward.of_one(*each))) for each in points])

    def engine(
        self,
        clock: Clock,
        policy: GrowPolicy,
        width: int,
        rounds: Rounds | None = None,
        drafters: Drafters | None = None,
        together: int = 1,
        features: FeatureStore | None = None,
    ) -> tuple[Engine, ObservedPlanner]:
        """A fresh engine for `together` requests at a time, without its drafters. `features`: what these may
        read of the target."""
        facts = self.target.facts
        engine = build_engine(
            EngineParts(
                model=self.target,
                drafters=drafters or Drafters(self.hello(), clock=clock, log=get_logger("bench", "warning")),
                cost=self.cost(),
                host=HostCost(0.0),
                slots=self.target.slots,
                limits=SchedulerLimits(together, 1024, 1024),
                prefix_cache=False,
                budget=_MOST_ROWS - together,
                draft_width=width,
                tree_nodes=TREE_NODES,
                policy=policy,
                clock=clock,
                rounds=rounds
                or VirtualRounds(
                    self.target, self.noise(), facts.eos_token_ids, clock, self.table.target.seconds
                ),
                planner_kind=ObservedPlanner,
                features=features,
            )
        )
        return engine, cast(ObservedPlanner, engine.planner)


@dataclass(frozen=True, slots=True)
class Decoded:
    """One request: its text, and the virtual seconds of all tokens but those of the first report."""

    tokens: tuple[int, ...]
    decoded: int
    seconds: float
    figures: Figures


def decode(
    engine: Engine, clock: Clock, number: int, prompt: Prompt, parameters: SamplingParameters
) -> Decoded:
    """One request alone on the engine; the prompt is not part of its time."""
    refused = engine.submit(Submit(number, prompt.tokens, parameters, prompt.seed))
    if refused is not None:
        raise SsdError(f"the benchmark's own request was refused: {refused.message}")
    tokens: list[int] = []
    started, before = 0.0, 0
    while True:
        for report in engine.step():
            if isinstance(report, Committed):
                tokens.extend(report.tokens)
            elif isinstance(report, Finished):
                return Decoded(tuple(tokens), len(tokens) - before, clock.now - started, report.figures)
        if not before and tokens:
            started, before = clock.now, len(tokens)
