"""Speculation in simulated time: what a pair should give, from step times and an assumed acceptance.

The engine, its decisions, the drafter and their messages are the real ones; only the models and the clock are
not: a guess is right with a given probability, and a step takes what a cost table says. Knows no weights, no
text and no processes, and leaves out what only a real run shows: guesses whose quality varies along a text,
devices that disturb each other.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

from ssd_serve.app.plan.guesses import DraftQuality, GuessedTarget, GuessSource
from ssd_serve.app.plan.virtual_time import MESSAGE_S, Clock, StepTimes, VirtualChannel, VirtualRounds
from ssd_serve.base.cost import MAX_ROWS, POINTS, CostTable, HostCost, Reading, Timing
from ssd_serve.base.draft_messages import NOISE_SCHEME, PROTOCOL_VERSION, Hello
from ssd_serve.base.errors import SsdError
from ssd_serve.base.logs import get_logger
from ssd_serve.base.messages import Committed, SamplingParameters, Submit
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.inline import InlineChannel
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.verifier.build import EngineParts, build_engine
from ssd_serve.verifier.control.budget import CostBasedWait, NoWait
from ssd_serve.verifier.control.decision import SpeculationMode
from ssd_serve.verifier.drafts.drafters import Drafters
from ssd_serve.verifier.engine import Engine
from ssd_serve.verifier.scheduler import SchedulerLimits

_PRICED = 8
"""The price of a node is the mean of the first so many."""
_WARM_UP = 0.2
"""Share of the rounds that is not counted: the rate and the growth's gain settle."""
_NOISE_ROWS = 1 << 15
_NAME = "simulated"


def measured_host() -> HostCost:
    """The verifier's host as `python -m lab.host` has measured it on one core of an AMD EPYC: 0.33 ms a round
    of one request with 8 nodes, 3.64 ms of 32 such. That a node takes 6 us of a request's 107 is assumed."""
    return HostCost(node_s=6e-6, request_s=59e-6, round_s=221e-6)


@dataclass(frozen=True, slots=True)
class Costs:
    """What steps take. `draft_s`: seconds of a draft step of `limits.width` nodes, without its message, of
    which the drafter's host takes `draft_host_s`; `context`: tokens of each request; `message_s`: a message's
    way, there or back."""

    target: CostTable
    host: HostCost
    draft_s: float
    limits: GrowthLimits
    context: int = 512
    draft_host_s: float = 0.0
    message_s: float = MESSAGE_S

    def table(self, requests: int) -> CostTable:
        """Of the target's forwards for so many requests that have their context already."""
        each = self.context
        seconds = self.target.span(0, POINTS[-1], Reading(requests * each, 0), each)
        return CostTable([Timing(rows, 0, float(seconds[rows])) for rows in POINTS])

    def node_s(self, requests: int) -> float:
        """What one more node adds to a round of so many requests, as the mean of the first eight."""
        seconds = self.table(requests).span(requests, requests + _PRICED)
        return float(seconds[-1] - seconds[0]) / _PRICED + self.host.node_s


@dataclass(frozen=True, slots=True)
class RoundSplit:
    """Where the time of a mean round goes, in seconds. The first three make up the round; what the drafter
    does beside the target, and messages on their way, go on meanwhile."""

    target_s: float
    """The target's device."""
    verifier_host_s: float
    waited_s: float
    """Before the round, for growth and its messages; of a drafter in turns all of its steps."""
    draft_steps: float
    draft_device_s: float
    draft_host_s: float
    messages: float
    messages_s: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came out, over all requests. `rounds` are (tokens, seconds) of each."""

    tokens_per_s: float
    tokens_per_round: float
    """Of one request."""
    nodes_per_round: float
    hit_rate: float
    waited_steps: float
    """Time that was waited before a round, in draft steps."""
    node_price: float
    """Tokens that the time of one more node is worth: the reach from which on it is verified."""
    step_price: float
    """Tokens that the time of a draft step is worth."""
    rounds: tuple[tuple[int, float], ...]
    split: RoundSplit


def simulate(
    layout: SpeculationMode,
    guesses: DraftQuality,
    costs: Costs,
    requests: int,
    rounds: int = 400,
    seed: int = 0,
) -> Simulated:
    """Run `rounds` rounds of `requests` requests that decode together."""
    pair = _Pair(layout, guesses, costs, requests, rounds, seed)
    played = [pair.round() for _ in range(rounds)][int(_WARM_UP * rounds) :]
    tokens, seconds = sum(each.tokens for each in played), sum(each.seconds for each in played)
    count, rate = len(played), tokens / seconds
    waited_s = sum(each.waited_s for each in played) / count
    return Simulated(
        tokens_per_s=rate,
        tokens_per_round=tokens / count / requests,
        nodes_per_round=sum(each.nodes for each in played) / count,
        hit_rate=sum(each.hits for each in played) / count / requests,
        waited_steps=waited_s / costs.draft_s if waited_s else 0.0,
        node_price=costs.node_s(requests) * rate,
        step_price=costs.draft_s * rate,
        rounds=tuple((each.tokens, each.seconds) for each in played),
        split=_split(played, costs),
    )


def _split(played: Sequence["_Played"], costs: Costs) -> RoundSplit:
    count = len(played)
    waited_s, forward_s = sum(each.waited_s for each in played), sum(each.forward_s for each in played)
    steps = sum(each.steps for each in played) / count
    messages = sum(each.messages for each in played) / count
    return RoundSplit(
        target_s=forward_s / count,
        verifier_host_s=(sum(each.seconds for each in played) - waited_s - forward_s) / count,
        waited_s=waited_s / count,
        draft_steps=steps,
        draft_device_s=steps * (costs.draft_s - costs.draft_host_s),
        draft_host_s=steps * costs.draft_host_s,
        messages=messages,
        messages_s=messages * costs.message_s,
    )


@dataclass(frozen=True, slots=True)
class _Played:
    tokens: int
    seconds: float
    nodes: int
    hits: int
    waited_s: float
    forward_s: float
    steps: int
    messages: int


class _Pair:
    """An engine in virtual time, with requests that never end."""

    def __init__(
        self,
        layout: SpeculationMode,
        guesses: DraftQuality,
        costs: Costs,
        requests: int,
        rounds: int,
        seed: int,
    ) -> None:
        self._clock, self._steps = Clock(), 0
        self._beside: VirtualChannel | None = None
        probabilities = guesses.probabilities(costs.limits.fan_out)
        most = rounds * (costs.limits.depth + 1)
        target = GuessedTarget(probabilities, requests * (most + 2) + MAX_ROWS)
        self._engine = _engine(layout, target, costs, requests, self._clock)
        if layout is not SpeculationMode.PLAIN:
            self._draft(probabilities, costs, _hello(target, costs), layout is SpeculationMode.ASYNC)
        parameters = SamplingParameters(temperature=1.0, max_tokens=most, ignore_eos=True)
        for number in range(requests):
            refused = self._engine.submit(Submit(number, (0,), parameters, seed * requests + number))
            if refused is not None:
                raise SsdError(f"the simulation's own request was refused: {refused}")

    def _draft(self, probabilities: list[float], costs: Costs, hello: Hello, beside: bool) -> None:
        """Let a drafter join, `beside` the target or in turns with it."""
        clock, step_s = self._clock, costs.draft_s
        steps = StepTimes(step_s)

        def stepped() -> None:
            self._steps += 1
            if beside:
                steps.add()
            else:
                clock.advance(clock.now + step_s)

        source = GuessSource(probabilities, stepped)
        core = DrafterCore(source, costs.limits, (), _NAME)
        if beside:
            self._beside = VirtualChannel(clock, core, steps, hello, costs.message_s)
        channel = self._beside or InlineChannel(core, hello, clock)
        self._engine.drafters.connect(channel, synchronous=not beside)

    def round(self) -> _Played:
        """One step of the engine."""
        engine, started, hits = self._engine, self._clock.now, self._engine.totals.figures.hits
        forward_s, steps, messages = engine.clocked.forward_s, self._steps, self._messages()
        reports = engine.step()
        tokens = sum(len(each.tokens) for each in reports if isinstance(each, Committed))
        decision = engine.decision
        nodes, waited_s = (decision.nodes, decision.waited_s) if decision is not None else (0, 0.0)
        hits = engine.totals.figures.hits - hits
        forward_s, steps = engine.clocked.forward_s - forward_s, self._steps - steps
        messages = self._messages() - messages
        seconds = self._clock.now - started
        return _Played(tokens, seconds, nodes, hits, waited_s, forward_s, steps, messages)

    def _messages(self) -> int:
        return self._beside.messages if self._beside is not None else 0


def _engine(
    layout: SpeculationMode, target: GuessedTarget, costs: Costs, requests: int, clock: Clock
) -> Engine:
    table, noise = costs.table(requests), NoiseRows(target.facts.vocabulary, _NOISE_ROWS)
    return build_engine(
        EngineParts(
            model=target,
            drafters=Drafters(_hello(target, costs), clock, get_logger("plan", "warning")),
            cost=costs.table(requests),
            host=deepcopy(costs.host),  # both learn while the engine runs
            slots=target.slots,
            limits=SchedulerLimits(requests, requests, requests),
            prefix_cache=False,
            draft_width=costs.limits.width,
            tree_nodes=costs.limits.nodes,
            policy=NoWait()
            if layout is SpeculationMode.PLAIN
            else CostBasedWait(concurrent=layout is SpeculationMode.ASYNC),
            clock=clock,
            rounds=VirtualRounds(
                target, noise, (), clock, lambda forward: table.seconds(forward.rows), costs.host.seconds
            ),
        )
    )


def _hello(target: GuessedTarget, costs: Costs) -> Hello:
    """What both sides agree on."""
    return Hello(
        protocol=PROTOCOL_VERSION,
        noise=NOISE_SCHEME,
        tokenizer=_NAME,
        vocabulary=target.facts.vocabulary,
        context=target.facts.context,
        name=_NAME,
        step_ms=1e3 * costs.draft_s,
    )
