"""Deterministic test doubles, such as a model with logits that depend only on the attended tokens."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace

from ssd_serve.base.devices import Device
from ssd_serve.base.draft_messages import NOISE_SCHEME, PROTOCOL_VERSION, Hello
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.messages import (
    Committed,
    Figures,
    Finished,
    SamplingParameters,
    Submit,
)
from ssd_serve.bench.lossless.rig import FixedCost
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.sources.contract import Candidates, DraftSource, NodeRequest, Scales
from ssd_serve.drafter.sources.whole_model import DraftModel
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.interface import ForwardResult, ModelFacts
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.verifier.assembly import EngineParts, build_engine
from ssd_serve.verifier.control.planner import Cores, ModeConfig, RoundPlanner
from ssd_serve.verifier.control.wait import CostBasedWait, WaitPolicy
from ssd_serve.verifier.drafters.pool import DrafterPool, SpeculationMode
from ssd_serve.verifier.engine import Engine

VOCABULARY = 40
EOS = 0


class FakeClock:
    """Clock in seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeModel:
    def __init__(self, slots: int, blur: float = 0.0, memory: int = 3) -> None:
        self.slots = slots
        self._blur = blur
        self._memory = memory
        self._written: dict[int, tuple[int, int]] = {}
        self.forwards = 0
        self.rows = 0
        self.positions: list[int] = []

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts("fake", VOCABULARY, 4096, 1, 8, (EOS,), 1, 1, "cpu", "fp32")

    def forward(self, batch: Batch) -> ForwardResult:
        self.forwards += 1
        self.rows += batch.rows
        self.positions.extend(batch.positions.tolist())
        for slot, token, position in zip(batch.write_slots, batch.tokens, batch.positions, strict=True):
            self._written[int(slot)] = (int(token), int(position))
        contexts = [self._context(batch, int(row)) for row in batch.rows_wanted]
        logits = (
            np.stack([self._logits(context) for context in contexts])
            if contexts
            else np.zeros((0, VOCABULARY))
        )
        return ForwardResult(torch.from_numpy(logits.astype(np.float32)))

    def release(self, spans: Sequence[range]) -> None:
        for span in spans:
            for slot in span:
                self._written.pop(slot, None)

    def _context(self, batch: Batch, row: int) -> tuple[int, ...]:
        request = int(np.searchsorted(batch.request_offsets, row, side="right")) - 1
        prefix = batch.prefix_slots[batch.prefix_offsets[request] : batch.prefix_offsets[request + 1]]
        tree = batch.tree_slots[batch.tree_offsets[request] : batch.tree_offsets[request + 1]]
        slots = [int(slot) for slot in prefix]
        if [self._written[slot][1] for slot in slots] != list(range(len(slots))):
            raise AssertionError("the committed prefix is not in order of position")
        for index, slot in enumerate(tree):
            if (int(batch.ancestry[row, index // 64]) >> (index % 64)) & 1:
                slots.append(int(slot))
                positions = batch.tree_positions[batch.tree_offsets[request] :]
                if self._written[slots[-1]][1] != positions[index]:
                    raise AssertionError("a tree slot is said to hold another position than it does")
        entries = sorted(self._written[slot][::-1] for slot in slots)
        if [position for position, _ in entries] != list(range(int(batch.positions[row]) + 1)):
            raise AssertionError(
                f"row at {batch.positions[row]} attends to positions {[p for p, _ in entries]}"
            )
        return tuple(token for _, token in entries)

    def _logits(self, context: tuple[int, ...]) -> np.ndarray:
        key = context[-self._memory :]
        logits = _normal(("target", key)) * 2.0
        logits[EOS] -= 2.0
        return logits if self._blur == 0 else logits + self._blur * _normal(("draft", key))


def _normal(key: object) -> np.ndarray:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(size=VOCABULARY)


HELLO = Hello(
    protocol=PROTOCOL_VERSION,
    noise=NOISE_SCHEME,
    tokenizer="fake",
    vocabulary=VOCABULARY,
    context=4096,
    name="d0",
    step_ms=1.0,
)
GROWTH = GrowthLimits(width=4, fan_out=3, depth=8, nodes=96)


@dataclass
class Case:
    slots: int = 512
    drafter: str = "inline"  # 'none', 'inline', 'memory'
    blur: float = 0.6
    budget: int | None = None
    prefix: bool = True
    max_running: int = 16
    max_waiting: int = 1000
    prefill_chunk: int = 32
    draft_slots: int = 4096
    growth: GrowthLimits = GROWTH
    policy: Callable[[], WaitPolicy] = CostBasedWait


class ScriptedSource:
    """Draft source without a model: the candidates depend on the node's name, and its results are recorded."""

    is_warmup_step = False

    def __init__(self) -> None:
        self.made: dict[int, list[int]] = {}
        self.candidates: list[int] = []
        """The candidates of every node, if set."""
        self.committed: dict[int, list[int]] = {}

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        self.committed[request] = list(tokens)
        self.made.clear()  # the tree starts again

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        self.committed[request].extend(tokens)

    def expand(
        self, requests: Sequence[NodeRequest], scales: Sequence[Scales]
    ) -> Sequence[Candidates | None]:
        found: list[Candidates | None] = []
        for pick in requests:
            tokens = self.made[pick.node] = self.candidates or self.tokens_of(pick.node)
            scores = -0.3 - np.arange(len(tokens), dtype=np.float32) * (1 + pick.node % 3)
            found.append(Candidates(np.array(tokens, dtype=np.int32), scores, scores, -1.0))
        return found

    def close(self, request: int) -> None:
        self.committed.pop(request, None)

    @staticmethod
    def tokens_of(node: int) -> list[int]:
        return [(node + 7 * rank) % VOCABULARY for rank in range(3)]


def make_core(case: Case) -> DrafterCore:
    model = FakeModel(case.draft_slots, case.blur)
    return core_of(DraftModel(model, case.draft_slots, NoiseRows(VOCABULARY, 256)), case.growth)


def core_of(
    guesses: DraftModel | DraftSource, limits: GrowthLimits, ends: tuple[int, ...] = (EOS,)
) -> DrafterCore:
    """Return a drafter's core without channels."""
    return DrafterCore(
        guesses.source(limits.fan_out) if isinstance(guesses, DraftModel) else guesses, limits, ends, "d0"
    )


def make_engine(case: Case) -> tuple[Engine, FakeModel]:
    """Return an engine without drafters."""
    model = FakeModel(case.slots)
    engine = build_engine(
        EngineParts(
            model=model,
            # Drafters have a constant clock and fixed costs, so that no test depends on the load of the machine.
            drafters=DrafterPool(HELLO, clock=lambda: 0.0),
            cost=FixedCost(),
            slots=case.slots,
            config=EngineConfig(
                max_running=case.max_running,
                max_waiting=case.max_waiting,
                prefill_chunk=case.prefill_chunk,
                prefix_cache=case.prefix,
                budget=case.budget,
                draft_width=case.growth.width,
                tree_nodes=case.growth.nodes,
            ),
            policy=case.policy(),
            noise=NoiseRows(VOCABULARY, 4096),
        )
    )
    return engine, model


def plan_by(engine: Engine, config: ModeConfig) -> None:
    """Let a mode controller choose the modes of an engine."""
    mode, cost = next(iter(config.controller.costs.items()))
    engine.planner = RoundPlanner(
        engine.drafters, cost, config.policies[mode], engine.planner.bounds, mode_config=config
    )


@dataclass(frozen=True)
class Output:
    tokens: tuple[int, ...]
    reason: str
    figures: Figures


def run(
    engine: Engine, submits: Sequence[Submit], each_step: Callable[[int], None] = lambda step: None
) -> dict[int, Output]:
    """Submit all requests, and step until these and earlier ones are done."""
    for submit in submits:
        refused = engine.submit(submit)
        if refused is not None:
            raise AssertionError(refused.message)
    tokens = defaultdict[int, list[int]](list)
    done: dict[int, Output] = {}
    step = 0
    while engine.busy:
        each_step(step)
        step += 1
        for report in engine.step():
            if isinstance(report, Committed):
                tokens[report.request].extend(report.tokens)
            elif isinstance(report, Finished):
                done[report.request] = Output(tuple(tokens[report.request]), report.reason, report.figures)
        if step > 100_000:
            raise AssertionError("the engine does not finish")
    return done


def mixed_requests(count: int, max_tokens: int = 40) -> list[Submit]:
    """Return requests with mixed parameters: temperatures, penalties, truncation, bias, stops, minimum lengths."""
    variants = (
        SamplingParameters(temperature=0.0),
        SamplingParameters(temperature=0.7, top_p=0.9),
        SamplingParameters(temperature=1.0),
        SamplingParameters(temperature=1.5, top_k=12, min_p=0.02),
        SamplingParameters(temperature=1.0, presence_penalty=0.8, frequency_penalty=0.3),
        SamplingParameters(temperature=0.0, repetition_penalty=1.3),
        SamplingParameters(temperature=0.7, logit_bias={5: 3.0, 7: -100.0}, min_tokens=10),
        SamplingParameters(temperature=1.0, stop_token_ids=(3, 9), ignore_eos=True),
    )
    source = np.random.default_rng(7)
    submits: list[Submit] = []
    for number in range(count):
        parameters = replace(variants[number % len(variants)], max_tokens=max_tokens - number % 5)
        prompt = tuple(int(t) for t in source.integers(1, VOCABULARY, size=3 + 7 * (number % 6)))
        submits.append(Submit(number, prompt, parameters, 1000 + number))
    return submits


class StillCores(Cores):
    def __init__(self) -> None:
        super().__init__(Device("cpu", (0,)), Device("cpu", (0, 1)))
        self.entered: list[SpeculationMode] = []

    def enter(self, mode: SpeculationMode) -> None:
        self.entered.append(mode)
