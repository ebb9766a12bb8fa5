"""Wrong EAGLE heads, and features that are late, missing, duplicated, in pieces or wrong: plain outputs, no
exception, no closed connection."""

from collections.abc import Callable, Sequence
from itertools import cycle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from msgspec.structs import replace

from ssd_serve.base.draft_messages import Features, Message
from ssd_serve.bench.lossless.drafters import MemoryDrafter, RigDraft
from ssd_serve.bench.lossless.rig import Case
from ssd_serve.cache.vectors import as_bytes, from_bytes
from ssd_serve.models.heads.eagle import OWN, EagleHead
from ssd_serve.models.interface import Inputs
from ssd_serve.verifier.engine import Engine
from tests.examples import examples
from tests.lossless.every_source import EverySource

INLINE, BESIDE = Case("sd", 4, 12), Case("ssd", 4, 12)
REQUESTS = 3

Said = tuple[torch.Tensor, torch.Tensor]
"""Logits [rows, proposed] and the head's own features [rows, hidden]."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> EverySource:
    return EverySource(tmp_path_factory.mktemp("sources"))


class Witnessed(MemoryDrafter):
    """A drafter that asserts that its connection stays open."""

    def work(self) -> None:
        assert not self.disconnected
        super().work()


def no_numbers(logits: torch.Tensor, own: torch.Tensor) -> Said:
    return torch.full_like(logits, torch.nan), own * torch.nan


def vectors_that_are_none(logits: torch.Tensor, own: torch.Tensor) -> Said:
    return logits, own * torch.nan


def nothing(logits: torch.Tensor, own: torch.Tensor) -> Said:
    return torch.full_like(logits, -torch.inf), own


def infinities(logits: torch.Tensor, own: torch.Tensor) -> Said:
    return logits.where(logits < 0, torch.inf), own * 1e38


def hardly_anything(logits: torch.Tensor, own: torch.Tensor) -> Said:
    """Two of the proposed tokens with a finite logit: fewer than a node has candidates."""
    few = torch.full_like(logits, -torch.inf)
    few[:, 5:7] = logits[:, 5:7]
    return few, own


def anything(logits: torch.Tensor, own: torch.Tensor) -> Said:
    return 9 * torch.randn_like(logits), torch.randn_like(own)


@pytest.mark.parametrize("case", [INLINE, BESIDE], ids=["inline", "beside"])
@pytest.mark.parametrize(
    "spoil",
    [
        no_numbers,
        hardly_anything,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (vectors_that_are_none, nothing, infinities, anything)
        ),
    ],
)
def test_eagle_head_with_wrong_outputs_is_lossless(
    sources: EverySource,
    spoil: Callable[[torch.Tensor, torch.Tensor], Said],
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, spoilt = EagleHead.run, 0

    def nonsense(head: EagleHead, inputs: Inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        nonlocal spoilt
        spoilt += 1
        logits, features = run(head, inputs)
        logits, own = spoil(logits, features[OWN])
        return logits, {OWN: own}

    monkeypatch.setattr(EagleHead, "run", nonsense)
    found = sources.check("head", case, Witnessed, REQUESTS)
    assert spoilt > REQUESTS
    assert (found.drafted == 0) == (spoil in (no_numbers, nothing, infinities))


KEPT, LOST, TWICE, LATE, PIECES, BACKWARDS, ELSEWHERE, WRONG, NO_NUMBERS = range(9)
LATE_BY = 3
fates = st.lists(st.integers(KEPT, NO_NUMBERS), min_size=1, max_size=24)


class FaultyFeatures(Witnessed):
    """A drafter that receives features as `fates` define, in turn, and everything else unchanged."""

    def __init__(self, fates: Sequence[int], draft: RigDraft, engine: Engine) -> None:
        self._fates = cycle(fates)
        self._late: list[tuple[int, Message]] = []
        self._turns = 0
        super().__init__(draft, engine)

    def received(self) -> Sequence[Message]:
        self._turns += 1
        messages: list[Message] = [message for when, message in self._late if when <= self._turns]
        self._late = [each for each in self._late if each[0] > self._turns]
        for message in super().received():
            messages += self._delivered(message) if isinstance(message, Features) else [message]
        return messages

    def _delivered(self, message: Features) -> Sequence[Message]:
        fate = next(self._fates)
        rows = from_bytes(message.data, message.width)
        if fate == LOST:
            return []
        if fate == TWICE:
            return [message, message]
        if fate == LATE:
            self._late.append((self._turns + LATE_BY, message))
            return []
        if fate in (PIECES, BACKWARDS):
            pieces = [
                replace(message, position=message.position + place, data=as_bytes(rows[place : place + 3]))
                for place in range(0, len(rows), 3)
            ]
            return pieces if fate == PIECES else pieces[::-1]
        if fate == ELSEWHERE:
            return [replace(message, position=message.position + 2)]
        if fate == WRONG:
            return [replace(message, data=as_bytes(1e30 * torch.randn(rows.shape)))]
        if fate == NO_NUMBERS:
            return [replace(message, data=as_bytes(rows * torch.nan))]
        return [message]


@given(fates)
@settings(max_examples=examples(16), deadline=None)
def test_lost_or_duplicate_features_are_lossless(sources: EverySource, fates: list[int]) -> None:
    sources.check("head", BESIDE, lambda *args: FaultyFeatures(fates, *args), REQUESTS)


@pytest.mark.parametrize("fate", [LOST, PIECES])
def test_drafting_with_and_without_features(sources: EverySource, fate: int) -> None:
    found = sources.check("head", BESIDE, lambda *args: FaultyFeatures([fate], *args), REQUESTS)
    usual = sources.check("head", BESIDE, count=REQUESTS)
    assert usual.drafted > 0
    assert found.drafted == (0 if fate == LOST else usual.drafted)
