"""What the host adds to a draft step, part by part, and what it takes to publish one.

Processor time of this thread, so that others on the machine lengthen it as little as can be. The trees are
made to be wide: a step always has as many nodes to expand as it may. Knows the core's parts, not what its
steps are used for.
"""

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from ssd_serve.bench.prompts import Prompt
from ssd_serve.bench.rig import Rig
from ssd_serve.cache.slots import SlotPool
from ssd_serve.cluster.channels.channel import SocketChannel
from ssd_serve.draft_messages import Growth, Open
from ssd_serve.drafter.core import DrafterCore
from ssd_serve.drafter.frontier import GrowthLimits
from ssd_serve.drafter.sources.contract import Candidates, DraftSource, Found, NodeRequest
from ssd_serve.drafter.sources.draft_model import ModelSource, RowsToRank
from ssd_serve.kernels.batch import Batch
from ssd_serve.messages import SamplingParameters
from ssd_serve.models.interface import ForwardResult, Model, ModelFacts
from ssd_serve.models.wrapped import WrappedModel
from ssd_serve.sampling.noise_rows import NoiseRows, capacity_for
from ssd_serve.sampling.ranking import trusted_ranking

_SLOTS, _NODES, _FAN_OUT, _DEPTH = 16384, 16384, 16, 16
_EVERYTHING = 1e-12
"""The least reach that grows."""
_STEPS, _WIDE_STEPS, _A_TREE = 180, 48, 6
PARTS = ("pick", "arrange", "rank", "grow", "publish")
"""Choose nodes; put rows, slots and the batch together; rank candidates; append them and write the message;
encode and send it."""

T = TypeVar("T")


class Spent:
    """Processor seconds of a step, by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, part: str, work: Callable[[], T]) -> T:
        """Do it, as this part."""
        started = time.thread_time()
        result = work()
        self.seconds[part] = self.seconds.get(part, 0.0) + time.thread_time() - started
        return result


class WideModel(WrappedModel):
    """A model that knows `times` as many tokens: each of its own stands for some that differ a little."""

    def __init__(self, model: Model, times: int) -> None:
        super().__init__(model)
        self._times = times
        own = model.facts.vocabulary
        generator = torch.Generator().manual_seed(0)
        self._differences = torch.randn(times * own, generator=generator) - 3.0

    @property
    def facts(self) -> ModelFacts:
        return replace(self._model.facts, vocabulary=self._times * self._model.facts.vocabulary)

    def forward(self, batch: Batch) -> ForwardResult:
        own = self._model.facts.vocabulary
        result = self._model.forward(replace(batch, tokens=batch.tokens % own))
        return replace(result, logits=result.logits.repeat(1, self._times) + self._differences)


class _Timed(WrappedModel):
    def __init__(self, model: Model, spent: Spent) -> None:
        super().__init__(model)
        self._spent = spent

    def forward(self, batch: Batch) -> ForwardResult:
        return self._spent.time("forward", lambda: self._model.forward(batch))


class _TimedSource(ModelSource):
    spent = Spent()

    def expand(self, picks: Sequence[NodeRequest], scales: Sequence[float]) -> Sequence[Candidates | None]:
        return self.spent.time("expand", lambda: super(_TimedSource, self).expand(picks, scales))

    def _rank(self, logits: torch.Tensor, wish: RowsToRank) -> Sequence[Candidates]:
        return self.spent.time("rank", lambda: super(_TimedSource, self)._rank(logits, wish))


class _TimedCore(DrafterCore):
    spent = Spent()

    def _pick(self) -> list[NodeRequest]:
        return self.spent.time("pick", super()._pick)

    def _grow(self, picked: Sequence[NodeRequest], found: Sequence[Found]) -> list[Growth]:
        return self.spent.time("grow", lambda: super(_TimedCore, self)._grow(picked, found))


def measure_drafter(
    rig: Rig, prompt: Prompt, temperature: float, width: int, times: int = 1
) -> dict[str, object]:
    """Steps of full width, in milliseconds: medians, and what the quickest tenth of the steps did not exceed,
    which says more where others use the machine; `times` the draft's vocabulary."""
    spent = Spent()
    draft = rig.draft if times == 1 else WideModel(rig.draft, times)
    core = _core(draft, rig, width, spent)
    parameters = SamplingParameters(temperature=temperature, max_tokens=1000, ignore_eos=True)
    ours, theirs = (SocketChannel(end) for end in socket.socketpair())
    steps: list[dict[str, float]] = []
    for epoch in range(1, 1 + (_STEPS if times == 1 else _WIDE_STEPS) // _A_TREE):
        core.handle(Open(1, epoch, prompt.tokens, (), parameters, prompt.seed, root=epoch))
        core.step()
        for _ in range(_A_TREE):
            found = _step(core, spent, width, ours)
            theirs.receive()
            if found is not None:
                steps.append(found)
    for channel in (ours, theirs):
        channel.close()
    row: dict[str, object] = {"temperature": temperature, "width": width, "steps": len(steps)}
    row["vocabulary"] = draft.facts.vocabulary
    for part in ("forward", "host", *PARTS):
        values = sorted(1e3 * step[part] for step in steps)
        row[f"{part}_ms"] = round(statistics.median(values), 3)
        row[f"{part}_least_ms"] = round(values[len(values) // 10], 3)
    return row


def _core(draft: Model, rig: Rig, width: int, spent: Spent) -> DrafterCore:
    facts = draft.facts
    noise = NoiseRows(facts.vocabulary, capacity_for(facts.vocabulary), facts.device, rig.native)
    ranking = trusted_ranking(rig.native) if facts.device == "cpu" else None
    timed = _TimedSource(_Timed(draft, spent), SlotPool(_SLOTS), noise, _FAN_OUT, ranking)
    source: DraftSource = timed
    core = _TimedCore(
        source, GrowthLimits(width, _FAN_OUT, _DEPTH, _NODES, _EVERYTHING), frozenset(), "measured"
    )
    timed.spent = core.spent = spent
    return core


def _step(core: DrafterCore, spent: Spent, width: int, channel: SocketChannel) -> dict[str, float] | None:
    """The seconds of one step by part; None where it was not as wide as it should be."""
    spent.seconds = {}
    growth = spent.time("step", core.step)
    if sum(len(each.parents) // 8 for each in growth) != width:
        return None
    spent.time("publish", lambda: [channel.send(each) for each in growth])
    seconds = spent.seconds
    seconds["arrange"] = seconds["expand"] - seconds["forward"] - seconds["rank"]
    seconds["host"] = seconds["step"] - seconds["forward"]
    return seconds
