"""Tests of target features for drafters: order, and arrival before the outcome of the same tokens."""

import re
from dataclasses import replace as changed

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ssd_serve.base.draft_messages import (
    FINAL,
    Close,
    Features,
    Message,
    Open,
    Outcome,
    Resync,
)
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import PairMismatchError
from ssd_serve.base.messages import Committed, SamplingParameters, Submit
from ssd_serve.bench.lossless.rig import FixedCost
from ssd_serve.bench.memory_channel import MemoryChannel, memory_pair
from ssd_serve.cache.slots import SlotTable
from ssd_serve.cache.vectors import from_bytes
from ssd_serve.drafter.inline import InlineChannel
from ssd_serve.kernels.batch import Batch
from ssd_serve.models.interface import ForwardResult, feature_name
from ssd_serve.verifier.assembly import EngineParts, build_engine
from ssd_serve.verifier.control.wait import FixedSteps
from ssd_serve.verifier.drafters.admission import DrafterAuthorizer
from ssd_serve.verifier.drafters.features import FeatureStore
from ssd_serve.verifier.drafters.pool import DrafterPool, SpeculationMode
from ssd_serve.verifier.engine import Engine
from tests.examples import examples
from tests.fakes import HELLO, Case, FakeModel, make_core
from tests.verifier.drafter_factory import connect_inline

LAYERS = (0, 2, FINAL)
READS = replace(HELLO, features=LAYERS, name="reader", source="reader")
PROMPT = tuple(1 + 7 * place % 30 for place in range(40))


class PositionModel(FakeModel):
    """Model with features that contain token, position and layer of each row."""

    def forward(self, batch: Batch) -> ForwardResult:
        result = super().forward(batch)
        rows = torch.stack((torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions)), dim=1)
        features = {feature_name(layer): torch.cat((rows, rows * 0 + layer), dim=1) for layer in LAYERS}
        return changed(result, features=features)


def make(limit: int = 1 << 20, chunk: int = 16, slots: int = 512) -> Engine:
    return build_engine(
        EngineParts(
            model=PositionModel(slots),
            drafters=DrafterPool(HELLO, clock=lambda: 0.0),
            cost=FixedCost(),
            slots=slots,
            config=EngineConfig(max_running=8, max_waiting=100, prefill_chunk=chunk),
            policy=FixedSteps(3),
            features=FeatureStore(LAYERS, limit, slots),
        )
    )


class Reader:
    def __init__(self, engine: Engine, layers: tuple[int, ...] = LAYERS) -> None:
        mine, self.its = memory_pair()
        engine.drafters.connect(mine)
        self.its.send(replace(READS, features=layers, name=str(layers), source=str(layers)))
        engine.drain()
        self.messages: list[Message] = []

    def receive(self) -> None:
        self.messages += self.its.receive()

    def rows(self, request: int = 1) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for message in self.messages:
            if isinstance(message, Open) and message.request == request:
                found.clear()
            if isinstance(message, Features) and message.request == request:
                for place, row in enumerate(from_bytes(message.data, message.width).tolist()):
                    assert message.position + place not in found
                    found[message.position + place] = row
        return found


def submitted(engine: Engine, number: int = 1, most: int = 30) -> None:
    parameters = SamplingParameters(temperature=0.7, max_tokens=most, ignore_eos=True)
    assert engine.submit(Submit(number, PROMPT, parameters, 7)) is None


def expected(tokens: list[int]) -> dict[int, list[float]]:
    return {
        position: [float(value) for layer in LAYERS for value in (token, position, layer, layer)]
        for position, token in enumerate(tokens)
    }


def test_features_of_each_token_are_sent_once_before_its_outcome() -> None:
    engine = make()
    reader = Reader(engine)
    connect_inline(engine, Case())
    submitted(engine)
    known, committed = 0, len(PROMPT)
    text = list(PROMPT)
    while engine.busy:
        engine.step()
        before = len(reader.messages)
        reader.receive()
        for message in reader.messages[before:]:
            if isinstance(message, Features):
                assert message.position == known
                known += len(message.data) // (2 * message.width)
            elif isinstance(message, Outcome):
                assert known == message.position + len(message.tokens) - 1  # the last token has none yet
                text += message.tokens
                committed = len(text)
    assert committed > len(PROMPT) + 10
    assert any(isinstance(message, Open) for message in reader.messages)
    read = reader.rows()
    assert read == {position: row for position, row in expected(text).items() if position < len(read)}


class InlineReader(InlineChannel):
    """Receives features as they are; pauses now and then."""

    def __init__(self) -> None:
        super().__init__(make_core(Case()), replace(READS, name="inline", source="inline"))
        self.found: dict[int, list[float]] = {}

    def give(self, message: Features, features: torch.Tensor) -> bool:
        assert message.position == len(self.found)
        assert features.dtype is torch.bfloat16
        self.found.update(enumerate(features.tolist(), message.position))
        return True


@pytest.mark.parametrize("pauses", [False, True])
def test_drafters_of_this_process_get_the_rows_themselves(pauses: bool) -> None:
    engine, reader = make(slots=2048), InlineReader()
    engine.drafters.connect(reader, synchronous=True)
    engine.drain()
    submitted(engine, most=200)
    text, rounds = list(PROMPT), 0
    while engine.busy:
        if pauses and rounds in (5, 60):
            engine.drafters.set_mode(SpeculationMode.PLAIN if rounds == 5 else SpeculationMode.SYNC)
        rounds += 1
        text += [token for each in engine.step() if isinstance(each, Committed) for token in each.tokens]
    assert len(reader.found) > len(PROMPT) + 190
    known = expected(text)
    assert reader.found == {position: known[position] for position in reader.found}


def test_late_drafter_receives_features_from_the_beginning_and_again_after_resync() -> None:
    engine = make()
    submitted(engine)
    for _ in range(12):
        engine.step()
    reader = Reader(engine)
    engine.step()
    reader.receive()
    opened = next(message for message in reader.messages if isinstance(message, Open))
    count = len(reader.rows())
    assert count >= len(opened.prompt) + len(opened.output) - 1
    assert list(reader.rows()) == list(range(count))
    reader.messages.clear()
    reader.its.send(Resync(1, opened.epoch))
    engine.step()
    reader.receive()
    assert list(reader.rows())[:count] == list(range(count))


@pytest.mark.parametrize("late", [False, True])
def test_features_of_cached_prefixes_are_sent(late: bool) -> None:
    engine = make()
    reader = None if late else Reader(engine)
    submitted(engine, 1)
    while engine.busy:
        engine.step()
    reader = reader or Reader(engine)
    submitted(engine, 2)
    while engine.busy and not engine.totals.figures.rounds:
        engine.step()
    engine.step()
    reader.receive()
    rows = reader.rows(2)
    assert list(rows) == list(range(len(rows)))
    assert len(rows) >= len(PROMPT)
    assert {place: row for place, row in rows.items() if place < len(PROMPT)} == expected([*PROMPT])


@pytest.mark.parametrize("limit", [0, 200])
def test_small_feature_store_keeps_the_current_round(limit: int) -> None:
    engine = make(limit=limit, chunk=16)
    reader = Reader(engine)
    text = list(PROMPT)
    submitted(engine)
    while engine.busy:
        text += [token for each in engine.step() if isinstance(each, Committed) for token in each.tokens]
        reader.receive()
    rows = reader.rows()
    assert list(rows) == list(range(len(rows)))
    assert len(rows) > len(PROMPT)
    assert rows == {position: row for position, row in expected(text).items() if position < len(rows)}


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 40), st.lists(st.lists(st.integers(0, 30), unique=True, max_size=12), max_size=12))
def test_feature_store_has_the_last_row_of_a_slot_or_none(room: int, rounds: list[list[int]]) -> None:
    store, last = FeatureStore((0,), 2 * room, 31), dict[int, int]()
    for number, slots in enumerate(rounds, 1):
        rows = torch.full((len(slots), 1), number, dtype=torch.bfloat16)
        store.keep(np.array(slots, dtype=np.int64), rows)
        last |= dict.fromkeys(slots, number)
    table = SlotTable(range(31))
    found = store.first(table, 0)
    assert store.first(table, found) == found
    kept = store.rows(table.view()[found:], (0,))[:, 0].tolist() if found < 31 else []
    assert kept == [last[slot] for slot in range(found, 31)]
    newest = rounds[-1] if rounds else []  # rows of the newest round are always kept
    for slot in newest:
        one = SlotTable([slot])
        assert store.first(one, 0) == 0
        assert store.rows(one.view(), (0,)).item() == last[slot]


def test_each_drafter_receives_its_layers_in_its_order() -> None:
    engine = make()
    readers = {layers: Reader(engine, layers) for layers in ((FINAL,), (2, 0), LAYERS)}
    submitted(engine, most=4)
    while engine.busy:
        engine.step()
        for reader in readers.values():
            reader.receive()
    for layers, reader in readers.items():
        rows = reader.rows()
        assert len(rows) >= len(PROMPT)
        for position, token in enumerate(PROMPT):
            values = (value for layer in layers for value in (token, position, layer, layer))
            assert rows[position] == [float(value) for value in values]


def test_drafter_of_other_layers_is_refused() -> None:
    admission = DrafterAuthorizer(HELLO, lambda: 0.0)
    admission.features = LAYERS
    admission.check(READS, remote=False, sources=())
    for layers, wanted in (((1, FINAL), "[1, final]"), ((2, 2), "[2, 2]")):
        message = re.escape(f"reads outputs of layers {wanted}, this server gives [0, 2, final]:")
        with pytest.raises(PairMismatchError, match=message):
            admission.check(replace(READS, features=layers), remote=False, sources=())
    engine = make()
    mine, its = memory_pair()
    engine.drafters.connect(mine)
    its.send(HELLO)
    engine.drafters.drain({})
    submitted(engine, most=3)
    received: list[Message] = []
    while engine.busy:
        engine.step()
        received += its.receive()
    assert any(isinstance(message, Close) for message in received)
    assert not any(isinstance(message, Features) for message in received)
    assert isinstance(its, MemoryChannel)
