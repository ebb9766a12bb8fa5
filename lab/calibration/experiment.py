"""`python -m lab.calibration`: is reach true? Of the nodes given a reach of 0.3, did three in ten happen?

The real engine, drafter and trees run in virtual time (see `lab.virtual`), so that what is measured does not
depend on the machine. In every round the best candidates below the root are written down with their reach
and their source; when the text is complete, a candidate happened if the text continued along its path.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from lab.calibration.figures import Reliability, reliability
from lab.virtual.rig import DRAFT_SLOTS, TREE_NODES, TimedModel, TimedPair, decode
from ssd_serve.bench.prompts import LOOP, Prompt, repeated_share
from ssd_serve.cache.expansions import unpack
from ssd_serve.draft_messages import Growth, Hello, Message
from ssd_serve.drafter.build import CoreParts, build_core
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.sources.whole_model import DraftModel
from ssd_serve.messages import SamplingParameters
from ssd_serve.plan.virtual_time import Clock, VirtualChannel
from ssd_serve.seeds import mix
from ssd_serve.verifier.engine import Engine
from ssd_serve.verifier.planning.growth import WhenItPays
from ssd_serve.verifier.planning.ranking import RankedNode
from ssd_serve.verifier.scheduler import ScheduledChunk

CANDIDATES = 64
"""Best candidates of a round that are written down."""
LIKELY = 0.05
SOURCE = "draft-model"


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """What to run: `warm_up` tokens are decoded before any is counted, then at least `tokens`."""

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    tokens: int = 2000
    warm_up: int = 2000
    prompt_tokens: int = 64
    """New tokens of each prompt."""
    width: int = 16
    fan_out: int = 16
    depth: int = 16


@dataclass(frozen=True, slots=True)
class Guess:
    """A candidate of one round: the text has `start` tokens, and the candidate says how it goes on."""

    start: int
    path: tuple[int, ...]
    reach: float
    verified: bool
    source: str

    def judge(self, text: Sequence[int]) -> bool | None:
        """Whether it happened; None where the text ends before one can know."""
        end = self.start + len(self.path)
        return None if end > len(text) else tuple(text[self.start : end]) == self.path


@dataclass(slots=True)
class _Judged:
    """Guesses whose truth is known, in columns."""

    reach: list[float] = field(default_factory=list)
    happened: list[bool] = field(default_factory=list)
    verified: list[bool] = field(default_factory=list)

    def add(self, guess: Guess, happened: bool) -> None:
        """One more."""
        self.reach.append(guess.reach)
        self.happened.append(happened)
        self.verified.append(guess.verified)

    def figures(self) -> dict[str, Reliability]:
        """Figures of all guesses, of those of some reach, and of those that rounds verified."""
        reach, happened = np.array(self.reach, float), np.array(self.happened, float)
        which = {
            "all": np.ones(len(reach), bool),
            "likely": reach >= LIKELY,
            "verified": np.array(self.verified, bool),
        }
        return {name: reliability(reach[mask], happened[mask]) for name, mask in which.items()}


class _Heard(VirtualChannel):
    """A channel that remembers which source grew each expanded node first."""

    def __init__(self, clock: Clock, core: DrafterCore, model: TimedModel, hello: Hello) -> None:
        super().__init__(clock, core, model, hello)
        self.sources: dict[int, str] = {}
        self._vocabulary = hello.vocabulary

    def receive(self) -> list[Message]:
        messages = super().receive()
        for message in messages:
            if isinstance(message, Growth):
                for expansion in unpack(message, self._vocabulary) or ():
                    self.sources.setdefault(expansion.name, message.source)
        return messages


class _Watched:
    """An engine with its drafter, whose candidates are written down round by round."""

    def __init__(self, pair: TimedPair, plan: CalibrationPlan) -> None:
        self._clock = Clock()
        self._engine: Engine
        self._engine, planner = pair.engine(self._clock, WhenItPays(concurrent=True), plan.width)
        planner.after = self._write_down
        draft = pair.timed_draft()
        limits = GrowthLimits(plan.width, plan.fan_out, plan.depth, TREE_NODES)
        model, ends = DraftModel(draft, DRAFT_SLOTS, pair.noise()), pair.target.facts.eos_token_ids
        core = build_core(CoreParts(guesses=model, limits=limits, ends=ends, name=SOURCE))
        self._channel = _Heard(self._clock, core, draft, pair.hello())
        self._engine.drafters.connect(self._channel)
        self._engine.drafters.drain({})
        self._guesses: list[Guess] = []
        self._number = 0

    def text(self, prompt: Prompt, parameters: SamplingParameters) -> tuple[tuple[int, ...], list[Guess]]:
        """The continuation of a prompt, and the guesses of all its rounds."""
        self._number += 1
        self._guesses = []
        self._channel.sources.clear()
        text = decode(self._engine, self._clock, self._number, prompt, parameters).tokens
        return text, self._guesses

    def _write_down(self, parts: Sequence[ScheduledChunk], chosen: Sequence[RankedNode]) -> None:
        for index, part in enumerate(parts):
            request = part.request
            if not request.decoding or request.replica is None:
                continue
            tree = request.replica.tree
            names = [tree.root.name]
            for _, of, token, parent in chosen:
                if of == index:
                    names.append(mix(names[1 + parent], token))
            for node in tree.best(CANDIDATES, request.left):
                above = tree.root.name if node.parent is None else node.parent.name
                self._guesses.append(
                    Guess(
                        request.generated,
                        tuple(each.token for each in tree.path(node)),
                        tree.reach(node),
                        node.name in names,
                        self._channel.sources.get(above, ""),
                    )
                )


def run_calibration(
    pair: TimedPair, prompts: Sequence[Prompt], plan: CalibrationPlan, say: Callable[[str], None]
) -> dict[str, object]:
    """`{"benchmark", "plan", "results", ...}`: a row for each temperature and source."""
    rows: list[dict[str, object]] = []
    for temperature in plan.temperatures:
        for row in _temperature(pair, prompts, plan, temperature):
            rows.append(row)
            say(f"temperature {temperature:g}: {row['tokens']} tokens, {row['source']}")
    return {
        "benchmark": "calibration",
        "time": "virtual: forwards take what a device table says; not a measurement of any device",
        "plan": asdict(plan),
        "results": rows,
    }


def _temperature(
    pair: TimedPair, prompts: Sequence[Prompt], plan: CalibrationPlan, temperature: float
) -> Iterator[dict[str, object]]:
    """Rows of one temperature. Looping texts warm up, but are not counted: any drafter guesses them."""
    watched = _Watched(pair, plan)
    parameters = SamplingParameters(temperature=temperature, max_tokens=plan.prompt_tokens, ignore_eos=True)
    warm, tokens, texts, loops = 0, 0, 0, 0
    judged: dict[str, _Judged] = {}
    for prompt in prompts:
        if tokens >= plan.tokens:
            break
        text, guesses = watched.text(prompt, parameters)
        if warm < plan.warm_up:
            warm += len(text)
            continue
        if repeated_share(text) > LOOP:
            loops += 1
            continue
        tokens, texts = tokens + len(text), texts + 1
        for guess in guesses:
            happened = guess.judge(text)
            if happened is not None:
                judged.setdefault(guess.source, _Judged()).add(guess, happened)
    for source, each in judged.items():
        yield {
            "temperature": temperature,
            "source": source,
            "warm_up_tokens": warm,
            "tokens": tokens,
            "texts": texts,
            "loops_left_out": loops,
            **{name: asdict(figures) for name, figures in each.figures().items()},
        }
