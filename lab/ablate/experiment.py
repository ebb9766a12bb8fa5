"""`python -m lab.ablate`: what each part of the design is worth, one run, the same draft budget.

Growth: best-first live trees (the drafter itself) against the same trees drafted while the verifier waits,
chains, uniform trees and SSD's outcome tables. Choice: shared noise against rejection sampling. The engine,
its decisions and the models are real; time is virtual (see `lab.virtual`): forwards take what a device table
says, and host work takes nothing. So this compares the algorithms, not their implementations, and is not a
measurement of any device.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count

from lab.ablate.growth import TableCore, TableShape, UniformCore
from lab.ablate.rejection import DrawingSource, Drawn, RejectionRounds
from lab.virtual.rig import DRAFT_SLOTS, TREE_NODES, Decoded, InTurnChannel, TimedPair, decode
from ssd_serve.bench.prompts import NEARLY, NEW_TOKENS, Continue, Prompt, choose, refuse_loops, repeated_share
from ssd_serve.bench.rotation import next_to, rotate, tune
from ssd_serve.bench.statistics import ratio_interval
from ssd_serve.cache.slots import SlotPool
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.cluster.channels.channel import Channel
from ssd_serve.draft_messages import Hello
from ssd_serve.drafter.build import CoreParts, build_core
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.sources.draft_model import ModelSource
from ssd_serve.errors import SsdError
from ssd_serve.messages import SamplingParameters
from ssd_serve.plan.forwards import Forward
from ssd_serve.plan.virtual_time import Clock, Core, VirtualChannel
from ssd_serve.verifier.planning.growth import FixedSteps, GrowPolicy, Never, Outlook, WhenItPays
from ssd_serve.verifier.planning.ranking import RankedNode
from ssd_serve.verifier.scheduler import ScheduledChunk

BEST_FIRST, SYNCHRONOUS, CHAIN = "best-first", "best-first-synchronous", "chain"
UNIFORM_TREE, UNIFORM_TABLE, GEOMETRIC_TABLE = "uniform-tree", "uniform-table", "geometric-table"
SHARED, REJECTION = "shared-noise", "rejection"
TABLES = (UNIFORM_TABLE, GEOMETRIC_TABLE)
_FAN_OUTS = (1, 2, 3, 4, 6, 8, 12, 16)
_LEVELS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)


@dataclass(frozen=True, slots=True)
class GrowthWay:
    """One way to speculate. `fan_out` and `levels` shape what is drafted while the verifier waits (0 levels:
    as many as pay), `length` and `fallback` a table."""

    growth: str
    choice: str
    fan_out: int = 0
    levels: int = 0
    length: int = 0
    fallback: int = 0

    @property
    def shape(self) -> str:
        """For tables and result files; the live tree has none."""
        if self.growth == UNIFORM_TREE:
            return f"{self.fan_out} a node, {self.levels} levels"
        if self.growth in (CHAIN, SYNCHRONOUS):
            return f"{self.levels or 'adaptive'} steps"
        if self.growth in TABLES:
            return f"chains of {self.length}, {self.fallback} after a miss"
        return ""

    @property
    def waits(self) -> bool:
        """Whether the verifier waits for every draft step."""
        return self.growth in (CHAIN, SYNCHRONOUS)

    def neighbours(self) -> Iterator["GrowthWay"]:
        """One step to either side in each direction of the shape."""
        if self.fan_out:
            yield from (replace(self, fan_out=each) for each in next_to(_FAN_OUTS, self.fan_out))
        if self.levels:
            yield from (replace(self, levels=each) for each in next_to(_LEVELS, self.levels))
        if self.growth in TABLES:
            yield from (replace(self, length=each) for each in next_to(_LEVELS, self.length))
            yield from (replace(self, fallback=each) for each in next_to(_LEVELS, self.fallback))


@dataclass(frozen=True, slots=True)
class AblationPlan:
    """What to run. `width`: rows of a draft step, for all; `candidates`: best guesses of an expanded node;
    `tokens`: new ones of each prompt."""

    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    prompts: int = 64
    tuning_prompts: int = 8
    tokens: int = NEW_TOKENS
    width: int = 32
    candidates: int = 16
    depth: int = 16


class AfterMiss:
    """Where nothing is ready, wait until a chain of so many tokens is; elsewhere never."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._missed = False
        self._grown = 0

    def wants(self, outlook: Outlook) -> bool:
        """What arrives first may still belong to outcomes that did not happen."""
        if outlook.steps == 0:
            self._missed, self._grown = outlook.missed > 0, 0
        elif not outlook.missed:
            self._grown += 1
        return self._missed and self._grown < self._tokens and outlook.steps < 2 * self._tokens + 4

    def learn(self, before: Outlook, after: Outlook, waited_s: float) -> None:
        """Nothing to learn."""


@dataclass(frozen=True, slots=True)
class _Text:
    """One continuation: `ready` has the depth of what was ready when each of its rounds began."""

    decoded: Decoded
    ready: tuple[int, ...]
    draft_steps: int
    draft_rows: int

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.decoded.decoded / self.decoded.seconds


class AblationRun:
    """A fresh engine and drafter of one way."""

    def __init__(self, pair: TimedPair, plan: AblationPlan, way: GrowthWay, temperature: float) -> None:
        self._way, self._plan, self._temperature = way, plan, temperature
        self._clock = Clock()
        self._draft = pair.timed_draft()
        drawn = Drawn()
        facts = pair.target.facts
        rounds = None
        if way.choice == REJECTION:
            rounds = RejectionRounds(
                pair.target, pair.noise(), facts.eos_token_ids, self._clock, pair.table.target.seconds, drawn
            )
        self._engine, planner = pair.engine(self._clock, self._policy(), plan.width, rounds)
        planner.before = self._begin_round
        if way.growth in TABLES:
            planner.pick = self._chain
        core = self._core(pair, drawn, facts.eos_token_ids)
        self._engine.drafters.connect(self._channel(core, pair.hello()), synchronous=way.waits)
        self._engine.drafters.drain({})
        self._number = 0
        self._ready: list[int] = []

    def text(self, prompt: Prompt) -> _Text:
        """The continuation of a prompt."""
        self._number += 1
        self._ready = []
        self._draft.forwards = self._draft.rows = 0
        parameters = SamplingParameters(
            temperature=self._temperature, max_tokens=self._plan.tokens, ignore_eos=True
        )
        decoded = decode(self._engine, self._clock, self._number, prompt, parameters)
        rows = self._draft.rows - len(prompt.tokens)
        return _Text(decoded, tuple(self._ready), self._draft.forwards, rows)

    def _channel(self, core: Core, hello: Hello) -> Channel:
        """To one drafter: a virtual one works while the clock goes on, whoever listens to it."""
        if isinstance(core, DrafterCore) and self._way.waits:
            return InTurnChannel(self._clock, core, self._draft, hello)
        return VirtualChannel(self._clock, core, self._draft, hello)

    def _policy(self) -> GrowPolicy:
        if self._way.growth in TABLES:
            return AfterMiss(self._way.fallback)
        if self._way.levels:
            return FixedSteps(self._way.levels)
        return WhenItPays(concurrent=not self._way.waits)

    def _core(self, pair: TimedPair, drawn: Drawn, ends: tuple[int, ...]) -> Core:
        plan, way, pool = self._plan, self._way, SlotPool(DRAFT_SLOTS)
        candidates = 1 if way.growth == CHAIN else plan.candidates
        source = ModelSource(self._draft, pool, pair.noise(), candidates)
        if way.choice == REJECTION:
            draws = 1 if way.growth in TABLES else candidates
            source = DrawingSource(self._draft, pool, pair.noise(), candidates, draws, drawn)
        if way.growth == UNIFORM_TREE:
            return UniformCore(source, plan.width, way.fan_out, way.levels)
        if way.growth in TABLES:
            shape = TableShape(way.length, way.fallback, way.growth == GEOMETRIC_TABLE)
            return TableCore(source, plan.width, plan.candidates, shape)
        width = 1 if way.growth == CHAIN else plan.width
        limits = GrowthLimits(width, candidates, plan.depth, TREE_NODES)
        return build_core(CoreParts(guesses=source, limits=limits, ends=ends, name=way.growth))

    def _begin_round(self, parts: Sequence[ScheduledChunk]) -> None:
        """Note what has been drafted below the root when the round begins."""
        for part in parts:
            replica = part.request.replica
            if part.request.decoding and replica is not None:
                if self._way.growth == UNIFORM_TREE:  # thrown away on both sides
                    replica.tree = SpeculationTree(replica.tree.root.name, TREE_NODES)
                self._ready.append(replica.tree.ready_depth())

    def _chain(self, parts: Sequence[ScheduledChunk]) -> list[RankedNode]:
        """What a table verifies: the chain of first guesses."""
        found: list[RankedNode] = []
        for index, part in enumerate(parts):
            request = part.request
            if not request.decoding or request.replica is None:
                continue
            tree = request.replica.tree
            node = tree.root
            while node.expanded and tree.depth(node) < min(self._way.length, request.left - 1):
                above = tree.depth(node) - 1
                node = tree.child_at(node, 0)
                found.append((tree.reach(node), index, node.token, above))
        return found


def run_ablation(
    pair: TimedPair, prompts: Sequence[Prompt], plan: AblationPlan, say: Callable[[str], None]
) -> dict[str, object]:
    """`{"benchmark", "plan", "results", ...}`: a row for each temperature, growth and choice.

    Raises `SsdError` where a way has no text that counts.
    """
    rows: list[dict[str, object]] = []
    for temperature in plan.temperatures:
        chosen = choose(prompts, plan.prompts, plan.tuning_prompts, _plainly(pair, plan, temperature))
        say(f"temperature {temperature:g}: {chosen.left_out:.0%} of the prompts left out, because they loop")
        ways = _ways(pair, chosen.tuning, plan, temperature, say)
        texts = _texts(pair, plan, ways, chosen.prompts, temperature)
        for way, some in texts.items():
            if way.choice == SHARED:
                refuse_loops(way.growth, chosen.prompts, (text.decoded.tokens for text in some))
            rows.append(_row(temperature, way, some, texts[ways[0]]))
            say(f"  {way.growth}, {way.choice}, {way.shape}: {rows[-1]['tokens_per_s']} tokens/s")
    return {
        "benchmark": "ablate",
        "time": "virtual: forwards take what a device table says and host work nothing; "
        "not a measurement of any device",
        "plan": asdict(plan),
        "table": pair.table.told(),
        "plain_tokens_per_s": round(1 / pair.table.target.seconds(Forward.of_one(1, 512)), 1),
        "results": rows,
    }


def _texts(
    pair: TimedPair,
    plan: AblationPlan,
    ways: Sequence[GrowthWay],
    prompts: Sequence[Prompt],
    temperature: float,
) -> dict[GrowthWay, list[_Text]]:
    runs = {way: AblationRun(pair, plan, way, temperature) for way in ways}
    for run in runs.values():  # calibration settles
        run.text(prompts[0])
    return rotate(ways, prompts, lambda way, prompt: runs[way].text(prompt))


def _row(
    temperature: float, way: GrowthWay, texts: Sequence[_Text], live: Sequence[_Text]
) -> dict[str, object]:
    pairs = [(mine, other) for mine, other in zip(live, texts, strict=True) if _counts(way, other)]
    if not pairs:
        raise SsdError(
            f"{way.growth}, {way.choice}, temperature {temperature:g}: every text nearly loops; "
            "ask for more prompts (--prompts) or a higher temperature"
        )
    ratio = None if texts is live else ratio_interval([mine.speed / other.speed for mine, other in pairs])
    texts = [other for _, other in pairs]
    rounds = max(1, sum(text.decoded.figures.rounds for text in texts))
    ready = [depth for text in texts for depth in text.ready]
    steps, tokens = sum(text.draft_steps for text in texts), sum(text.decoded.decoded for text in texts)
    return {
        "temperature": temperature,
        "growth": way.growth,
        "choice": way.choice,
        "shape": way.shape,
        "prompts": len(texts),
        "tokens": tokens,
        "rounds": rounds,
        "hit_rate": round(sum(depth > 0 for depth in ready) / max(1, len(ready)), 4),
        "ready_depth": round(statistics.mean(ready), 3) if ready else 0.0,
        "tokens_per_round": round(tokens / rounds, 3),
        "tokens_per_s": round(_speed(texts), 2),
        "live": asdict(ratio) if ratio is not None else None,
        "verified_per_round": round(sum(text.decoded.figures.drafted for text in texts) / rounds, 2),
        "draft_steps_per_round": round(steps / rounds, 2),
        "rows_per_draft_step": round(sum(text.draft_rows for text in texts) / max(1, steps), 2),
    }


def _counts(way: GrowthWay, text: _Text) -> bool:
    """Rejection sampling draws texts of its own. Those that nearly loop are left out, as prompts are whose
    plain continuation does."""
    return way.choice == SHARED or repeated_share(text.decoded.tokens) <= NEARLY


def _speed(texts: Sequence[_Text]) -> float:
    if not texts:
        return 0.0
    return sum(text.decoded.decoded for text in texts) / sum(text.decoded.seconds for text in texts)


def _plainly(pair: TimedPair, plan: AblationPlan, temperature: float) -> Continue:
    clock, numbers = Clock(), count()
    plain, _ = pair.engine(clock, Never(), plan.width)
    parameters = SamplingParameters(temperature=temperature, max_tokens=plan.tokens, ignore_eos=True)
    return lambda some: [decode(plain, clock, next(numbers), each, parameters).tokens for each in some]


def shapes(growth: str, choice: str) -> list[GrowthWay]:
    """Where the tuning of a way begins; the live tree has nothing to tune."""
    way = GrowthWay(growth, choice)
    if growth == UNIFORM_TREE:
        return [replace(way, fan_out=fan, levels=levels) for fan, levels in ((2, 5), (4, 5), (4, 7))]
    if growth in TABLES:
        return [replace(way, length=length, fallback=after) for length, after in ((4, 3), (8, 4), (10, 6))]
    levels = {CHAIN: (2, 4, 8), SYNCHRONOUS: (0, 2, 4)}.get(growth, (0,))
    return [replace(way, levels=each) for each in levels]


def _ways(
    pair: TimedPair,
    prompts: Sequence[Prompt],
    plan: AblationPlan,
    temperature: float,
    say: Callable[[str], None],
) -> list[GrowthWay]:
    """All ways of a temperature in their best shapes, the live tree first. At temperature 0 nothing is drawn,
    and rejection sampling accepts what shared noise accepts."""

    def speeds(ways: Sequence[GrowthWay], some: Sequence[Prompt]) -> dict[GrowthWay, float]:
        texts = _texts(pair, plan, ways, some, temperature)
        return {way: _speed([text for text in own if _counts(way, text)]) for way, own in texts.items()}

    found: list[GrowthWay] = []
    for choice in (SHARED, REJECTION) if temperature > 0 else (SHARED,):
        for growth in (BEST_FIRST, SYNCHRONOUS, CHAIN, UNIFORM_TREE, *TABLES):
            best, tried = tune(shapes(growth, choice), GrowthWay.neighbours, speeds, prompts)
            found.append(best)
            if tried:
                told = ", ".join(f"{way.shape}: {speed:.1f}" for way, speed in tried.items())
                say(f"  {growth}, {choice}: {told}")
    return found
