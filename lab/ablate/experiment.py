"""`python -m lab.ablate`: what each part of the design is worth, one run, the same draft budget.

Growth: best-first live trees (the drafter itself) against uniform trees and SSD's outcome tables. Choice:
shared noise against rejection sampling. The engine, its decisions and the models are real; time is virtual
(see `lab.virtual`): forwards take what a device table says, and host work takes nothing. So this compares the
algorithms, not their implementations, and is not a measurement of any device.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from lab.ablate.growth import TableCore, TableShape, UniformCore
from lab.ablate.rejection import DrawingSource, Drawn, RejectionRounds
from lab.virtual.rig import DRAFT_SLOTS, TREE_NODES, Decoded, Pair, decode
from ssd_serve.bench.prompts import MAX_REPEATED, Prompt, repeated_share
from ssd_serve.cache.slots import SlotPool
from ssd_serve.cache.tree import SpeculationTree
from ssd_serve.drafter.build import CoreParts, build_core
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.sources.draft_model import ModelSource
from ssd_serve.messages import SamplingParameters
from ssd_serve.plan.forwards import Forward
from ssd_serve.plan.virtual_time import Clock, Core, VirtualChannel
from ssd_serve.verifier.planning.growth import FixedSteps, GrowPolicy, Never, Outlook, WhenItPays
from ssd_serve.verifier.planning.ranking import RankedNode
from ssd_serve.verifier.scheduler import ScheduledChunk

BEST_FIRST, UNIFORM_TREE, UNIFORM_TABLE, GEOMETRIC_TABLE = (
    "best-first",
    "uniform-tree",
    "uniform-table",
    "geometric-table",
)
SHARED, REJECTION = "shared-noise", "rejection"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to speculate. `fan_out` and `levels` shape a uniform tree, `length` and `fallback` a table."""

    growth: str
    choice: str
    fan_out: int = 0
    levels: int = 0
    length: int = 0
    fallback: int = 0

    @property
    def shape(self) -> str:
        """For tables and result files; best-first has none."""
        if self.growth == UNIFORM_TREE:
            return f"{self.fan_out} a node, {self.levels} levels"
        if self.growth in (UNIFORM_TABLE, GEOMETRIC_TABLE):
            return f"chains of {self.length}, {self.fallback} after a miss"
        return ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `width`: rows of a draft step, for all; `candidates`: best guesses of an expanded node."""

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    prompts: int = 16
    prompt_tokens: int = 64
    width: int = 32
    candidates: int = 16
    depth: int = 16
    tuning_prompts: int = 4
    tuning_tokens: int = 48
    trees: tuple[tuple[int, int], ...] = ((2, 5), (4, 5), (4, 7))
    """Fan-outs and levels of uniform trees to choose from."""
    tables: tuple[tuple[int, int], ...] = ((4, 3), (8, 4), (10, 6))
    """Chain lengths, and lengths after a miss, of tables to choose from."""


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


class Run:
    """A fresh engine and drafter of one way; counts what was ready when rounds began."""

    def __init__(self, pair: Pair, plan: Plan, way: Way, temperature: float) -> None:
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
        if way.growth in (UNIFORM_TABLE, GEOMETRIC_TABLE):
            planner.pick = self._chain
        core = self._core(pair, drawn, facts.eos_token_ids)
        self._engine.drafters.connect(VirtualChannel(self._clock, core, self._draft, pair.hello()))
        self._engine.drafters.drain({})
        self._number = 0
        self.ready: list[int] = []
        """Depth of what was ready, in the rounds since the last `text` began."""

    def text(self, prompt: Prompt, tokens: int) -> Decoded:
        """The continuation of a prompt."""
        self._number += 1
        self.ready = []
        self._draft.forwards = self._draft.rows = 0
        parameters = SamplingParameters(temperature=self._temperature, max_tokens=tokens, ignore_eos=True)
        return decode(self._engine, self._clock, self._number, prompt, parameters)

    @property
    def draft_steps(self) -> int:
        """Draft steps of the last text."""
        return self._draft.forwards

    @property
    def draft_rows(self) -> int:
        """Rows of those steps, its prompt included."""
        return self._draft.rows

    def _policy(self) -> GrowPolicy:
        if self._way.growth == BEST_FIRST:
            return WhenItPays(concurrent=True)
        if self._way.growth == UNIFORM_TREE:
            return FixedSteps(self._way.levels)
        return AfterMiss(self._way.fallback)

    def _core(self, pair: Pair, drawn: Drawn, ends: tuple[int, ...]) -> Core:
        plan, way, pool = self._plan, self._way, SlotPool(DRAFT_SLOTS)
        tables = way.growth in (UNIFORM_TABLE, GEOMETRIC_TABLE)
        if way.choice == REJECTION:
            draws = 1 if tables else plan.candidates
            source: ModelSource = DrawingSource(
                self._draft, pool, pair.noise(), plan.candidates, draws, drawn
            )
        else:
            source = ModelSource(self._draft, pool, pair.noise(), plan.candidates)
        if way.growth == BEST_FIRST:
            limits = GrowthLimits(plan.width, plan.candidates, plan.depth, TREE_NODES)
            return build_core(CoreParts(guesses=source, limits=limits, ends=ends, name=BEST_FIRST))
        if way.growth == UNIFORM_TREE:
            return UniformCore(source, plan.width, way.fan_out, way.levels)
        shape = TableShape(way.length, way.fallback, way.growth == GEOMETRIC_TABLE)
        return TableCore(source, plan.width, plan.candidates, shape)

    def _begin_round(self, parts: Sequence[ScheduledChunk]) -> None:
        """Note what has been drafted below the root when the round begins."""
        for part in parts:
            replica = part.request.replica
            if part.request.decoding and replica is not None:
                if self._way.growth == UNIFORM_TREE:  # thrown away on both sides
                    replica.tree = SpeculationTree(replica.tree.root.name, TREE_NODES)
                self.ready.append(replica.tree.ready_depth())

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
    pair: Pair, prompts: Sequence[Prompt], plan: Plan, say: Callable[[str], None]
) -> dict[str, object]:
    """`{"benchmark", "plan", "results", ...}`: a row for each temperature, growth and choice."""
    rows: list[dict[str, object]] = []
    for temperature in plan.temperatures:
        chosen, loops = _choose(pair, prompts, plan, temperature)
        say(f"temperature {temperature:g}: {len(chosen)} prompts, {loops} of them loops")
        for way in _ways(pair, chosen, plan, temperature, say):
            row = measure(pair, plan, way, temperature, chosen)
            rows.append(row | {"loops_kept": loops})
            say(
                f"  {way.growth}, {way.choice}: {row['tokens_per_round']} tokens a round, "
                f"{row['tokens_per_s']} tokens/s"
            )
    return {
        "benchmark": "ablate",
        "time": "virtual: forwards take what a device table says and host work nothing; "
        "not a measurement of any device",
        "plan": asdict(plan),
        "table": pair.table.told(),
        "plain_tokens_per_s": round(1 / pair.table.target.seconds(Forward.of_one(1, 512)), 1),
        "results": rows,
    }


def measure(
    pair: Pair, plan: Plan, way: Way, temperature: float, prompts: Sequence[Prompt]
) -> dict[str, object]:
    """Figures of one way over these prompts, after one of them that is not counted."""
    run = Run(pair, plan, way, temperature)
    run.text(prompts[0], plan.prompt_tokens)
    texts: list[Decoded] = []
    ready: list[int] = []
    steps = draft_rows = 0
    for prompt in prompts:
        texts.append(run.text(prompt, plan.prompt_tokens))
        ready += run.ready
        steps += run.draft_steps
        draft_rows += run.draft_rows - len(prompt.tokens)
    rounds = max(1, sum(text.figures.rounds for text in texts))
    return {
        "temperature": temperature,
        "growth": way.growth,
        "choice": way.choice,
        "shape": way.shape,
        "prompts": len(texts),
        "tokens": sum(text.decoded for text in texts),
        "rounds": rounds,
        "hit_rate": round(sum(depth > 0 for depth in ready) / max(1, len(ready)), 4),
        "ready_depth": round(statistics.mean(ready), 3) if ready else 0.0,
        "tokens_per_round": round(sum(text.decoded for text in texts) / rounds, 3),
        "tokens_per_s": round(_speed(texts), 2),
        "verified_per_round": round(sum(text.figures.drafted for text in texts) / rounds, 2),
        "draft_steps_per_round": round(steps / rounds, 2),
        "rows_per_draft_step": round(draft_rows / max(1, steps), 2),
    }


def _speed(texts: Sequence[Decoded]) -> float:
    return sum(text.decoded for text in texts) / sum(text.seconds for text in texts)


def _choose(
    pair: Pair, prompts: Sequence[Prompt], plan: Plan, temperature: float
) -> tuple[list[Prompt], int]:
    """Prompts whose continuation is no loop, the least repetitive others where these are too few; how many of
    those."""
    clock = Clock()
    plain, _ = pair.engine(clock, Never(), plan.width)
    parameters = SamplingParameters(temperature=temperature, max_tokens=plan.prompt_tokens, ignore_eos=True)
    tried: list[tuple[float, Prompt]] = []
    fine = 0
    for number, prompt in enumerate(prompts):
        share = repeated_share(decode(plain, clock, number, prompt, parameters).tokens)
        tried.append((share, prompt))
        fine += share <= MAX_REPEATED
        if fine >= plan.prompts:
            break
    kept = sorted(tried, key=lambda item: max(item[0], MAX_REPEATED))[: plan.prompts]
    return [prompt for _, prompt in kept], sum(share > MAX_REPEATED for share, _ in kept)


def _ways(
    pair: Pair, prompts: Sequence[Prompt], plan: Plan, temperature: float, say: Callable[[str], None]
) -> list[Way]:
    """All ways of a temperature, those with a shape in their best one. At temperature 0 nothing is drawn, and
    rejection sampling accepts what shared noise accepts."""
    ways: list[Way] = []
    for choice in (SHARED, REJECTION) if temperature > 0 else (SHARED,):
        shaped = [
            [Way(UNIFORM_TREE, choice, fan_out=fan, levels=levels) for fan, levels in plan.trees],
            *(
                [Way(growth, choice, length=length, fallback=fallback) for length, fallback in plan.tables]
                for growth in (UNIFORM_TABLE, GEOMETRIC_TABLE)
            ),
        ]
        ways.append(Way(BEST_FIRST, choice))
        ways += [_best(pair, prompts, plan, temperature, each, say) for each in shaped]
    return ways


def _best(
    pair: Pair,
    prompts: Sequence[Prompt],
    plan: Plan,
    temperature: float,
    ways: Sequence[Way],
    say: Callable[[str], None],
) -> Way:
    """The fastest of these on a few of the prompts."""
    speeds: dict[Way, float] = {}
    for way in ways:
        run = Run(pair, plan, way, temperature)
        speeds[way] = _speed(
            [run.text(prompt, plan.tuning_tokens) for prompt in prompts[: plan.tuning_prompts]]
        )
    say("  " + ", ".join(f"{way.growth} {way.shape}: {speed:.1f}" for way, speed in speeds.items()))
    return max(speeds, key=speeds.__getitem__)
