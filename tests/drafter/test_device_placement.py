"""A draft model on a pretended GPU, put together from settings: its candidates are those of the CPU."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest

from ssd_serve.base.draft_messages import Open
from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.errors import CheckpointError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.base.settings import Settings
from ssd_serve.cache.node import Node
from ssd_serve.cache.slots import SlotPool
from ssd_serve.drafter.assembly import assemble_drafter
from ssd_serve.drafter.sources import whole_model
from ssd_serve.drafter.sources.contract import Candidates, NodeRequest
from ssd_serve.drafter.sources.draft_model import ModelSource
from ssd_serve.kernels.attention import backends
from ssd_serve.kernels.attention.backends import AttentionOptions
from ssd_serve.models.interface import Model
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.sampling.noise_rows import NoiseRows
from tests.end_to_end.tiny_pair import write_model
from tests.pretended_device import DEVICE, pretended_device

PROMPT = tuple(range(5, 40))
SDPA = AttentionOptions("sdpa")
There = Callable[[], AbstractContextManager[object]]
PLACES: tuple[tuple[str, There], ...] = (("cpu", nullcontext), (DEVICE, pretended_device))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(backends, "failure_of", lambda *_: "")  # tried elsewhere
    write_model(tmp_path / "draft", seed=1, noise=0.0)
    return tmp_path / "draft"


@pytest.mark.parametrize("temperatures", [(0.0, 0.0), (0.7, 0.0), (1.0, 1.3)])
def test_candidates_on_a_device_equal_the_cpus(temperatures: tuple[float, ...], folder: Path) -> None:
    def candidates(device: str) -> Sequence[Candidates | None]:
        model = load_model(
            folder, ModelOptions(device=device, dtype="fp32", slots=128, context=None, attention=SDPA)
        )
        source = ModelSource(model, SlotPool(128), NoiseRows(model.facts.vocabulary, 64, device), 4)
        for request, temperature in enumerate(temperatures):
            source.open(request, PROMPT, SamplingParameters(temperature=temperature), 11)
        roots = [Node(100 + request, -1, None, 0.0) for request in range(len(temperatures))]
        source.expand([NodeRequest(request, root) for request, root in enumerate(roots)], [[1.0], [0.7]])
        child = Node(7, 50, roots[0], 0.0)
        grandchild = Node(9, 52, Node(8, 51, roots[1], 0.0), 0.0)
        return source.expand([NodeRequest(0, child), NodeRequest(1, grandchild)], [[1.0], [0.7]])

    expected = candidates("cpu")
    with pretended_device():
        found = candidates(DEVICE)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        np.testing.assert_allclose(ours.log_probabilities, theirs.log_probabilities, atol=1e-4)
        np.testing.assert_allclose(ours.scores, theirs.scores, atol=1e-4)


def test_the_drafter_is_built_on_its_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSD_TARGET")
    settings = Settings(
        draft=str(folder), dtype="fp32", context=160, max_running=2, tree_decode_backend="sdpa"
    )
    parameters = SamplingParameters(temperature=1.0)
    grown: list[bytes] = []
    for device, there in PLACES:
        with there():
            core = assemble_drafter(settings.engine_config(), "drafter", device, None).core
            core.handle(Open(1, 0, PROMPT, (), parameters, 3, 17))
            (growth,) = core.step()
            grown.append(growth.tokens)
    assert grown[0] == grown[1]


def test_draft_kv_slots_follow_the_device_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[int] = []

    def load(
        _config: EngineConfig, _path: Path, _device: str, slots: int, *_: object, layers: int | None
    ) -> Model:
        assert layers is None
        requested.append(slots)
        raise CheckpointError("seen")

    monkeypatch.setattr(whole_model, "load_served", load)
    settings = Settings(draft=str(folder), dtype="fp32", context=500_000)
    named = settings.model_copy(update={"draft_kv_memory_mb": 64})
    shared = settings.model_copy(update={"target_device": DEVICE})
    for wish, device, memory in (
        (named, "cpu", 0),
        (settings, "cpu", 0),
        (settings, DEVICE, 10 << 30),
        (shared, DEVICE, 10 << 30),  # of which a target takes its share at the same time
    ):
        with pytest.raises(CheckpointError), pretended_device(memory) if memory else nullcontext():
            assemble_drafter(wish.engine_config(), "drafter", device, None)
    assert requested[1] == 4 * requested[0]
    # A tenth of what the weights leave.
    assert 3.9 < requested[2] / requested[1] < 4.0
    assert requested[3] == requested[1]
