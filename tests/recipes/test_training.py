"""Training end to end on a tiny library: schedule by the clock, resume, export, evaluation."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ssd_serve.recipes.data import Sampler
from ssd_serve.recipes.decoder import Decoder, Shape, initialise
from ssd_serve.recipes.evaluation import evaluate_pair, scored_windows
from ssd_serve.recipes.export import export_pair, read_trained
from ssd_serve.recipes.optimiser import Schedule, orthogonalise
from ssd_serve.recipes.training import Phase, Recipe, Training, run, stored_schedule
from ssd_serve.recipes.workspace import Workspace

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")
TARGET = Shape(300, 32, layers=2, heads=4, kv_heads=2, head=8, intermediate=48, context=256)
DRAFT = Shape(300, 16, layers=1, heads=2, kv_heads=1, head=8, intermediate=32, context=256)
RECIPE = Recipe(
    target=TARGET,
    draft=DRAFT,
    phases=(Phase(0.0, 4, 32), Phase(0.5, 2, 64)),
    compiled=False,
    report_seconds=20.0,
    checkpoint_seconds=10.0,
)


class Clock:
    """One second passes whenever somebody looks."""

    def __init__(self, start: float) -> None:
        self.now = start

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are fastest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(workspace: Workspace, schedule: Schedule, start: float, resume: bool = False) -> Training:
    training = Training(RECIPE, workspace, schedule)
    if resume:
        training.load()
    run(training, Clock(start), say=lambda line: None)
    return training


def test_the_rate_follows_the_clock() -> None:
    schedule = Schedule(start=1000.0, deadline=2000.0, warm_up=0.02, decay=0.5)
    assert schedule.rate(1010.0) == pytest.approx(0.5)
    assert schedule.rate(1300.0) == 1.0
    assert schedule.rate(1750.0) == pytest.approx(0.5)
    assert schedule.rate(2000.0) == schedule.rate(5000.0) == 0.0


def test_training_learns_and_ends_at_its_deadline(workspace: Workspace) -> None:
    schedule = Schedule(0.0, 200.0)
    training = train(workspace, schedule, 0.0)
    last = training.history[-1]
    assert last["held_out_loss"] < 4.5 < training.history[0]["held_out_loss"]
    assert training.target_schedule().rate(190.0) == 0.0
    assert set(training.sampler.taken) == {32, 64}


def test_resume_continues_schedule_and_data(workspace: Workspace) -> None:
    schedule = Schedule(0.0, 120.0)
    first = Training(RECIPE, workspace, schedule)
    clock = Clock(0.0)
    for _ in range(20):
        first.train_step(clock())
    first.save()
    resumed = Training(RECIPE, workspace, stored_schedule(workspace))
    resumed.load()
    assert resumed.schedule == schedule
    assert (resumed.step, resumed.tokens) == (first.step, first.tokens)
    for training in (first, resumed):
        training.train_step(60.0)
    for name, weight in first.target.state_dict().items():
        assert torch.equal(weight, resumed.target.state_dict()[name]), name


def test_every_window_comes_once_an_epoch(workspace: Workspace) -> None:
    sampler = Sampler(workspace.stream(), seed=3)
    windows = (len(sampler.stream) - 1) // 32 - 1
    rows = [sampler.batch(1, 32)[0] for _ in range(windows)]
    order = sampler.order(0, 32)[1]
    assert sorted(order.tolist()) == list(range(windows))
    assert all(len(row) == 33 for row in rows)


def test_export_equals_transformers_and_evaluates(
    workspace: Workspace, library: Path, tmp_path: Path
) -> None:
    train(workspace, Schedule(0.0, 60.0), 0.0)
    target, draft = tmp_path / "pair" / "target", tmp_path / "pair" / "draft"
    export_pair(workspace, target, draft)
    export_pair(workspace, target, draft)  # replaces what is there
    tokens = torch.randint(0, 300, (2, 50), generator=torch.Generator().manual_seed(0))
    for folder, decoder in ((target, read_trained(workspace.checkpoint).target), (draft, None)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            theirs = model(tokens).logits
            if decoder is not None:
                rounded = {name: weight.bfloat16().float() for name, weight in decoder.state_dict().items()}
                decoder.load_state_dict(rounded)
                assert torch.allclose(decoder(tokens), theirs, atol=1e-4)
        assert "Not measured yet" in (folder / "README.md").read_text()
    figures = evaluate_pair(target, draft, library, samples=2, temperatures=(0.5, 1.0))
    assert isinstance(figures["agreement"], float)
    assert figures["held_out_files_missing"] == 0
    export_pair(workspace, target, draft, figures)
    card = (target / "README.md").read_text()
    assert f"{figures['agreement']:.3f}" in card
    assert [line.split("|")[2:4] for line in card.splitlines() if line.startswith("| a held-out")] == [
        [" 0.5 ", " 0 of 2 "],
        [" 1 ", " 0 of 2 "],
    ]
    json.dumps(figures)


def test_evaluation_scores_every_position_once(workspace: Workspace) -> None:
    for document in workspace.held_out():
        scored = [end for ids, first in scored_windows(document, 16) for end in ids[1 + first :].tolist()]
        assert scored == document.ids[1:].tolist()


def test_muon_orthogonalises() -> None:
    matrices = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert 0.5 < values.min() < values.max() < 1.3


def test_decoder_counts_its_parameters() -> None:
    decoder = Decoder(TARGET)
    initialise(decoder, 0)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == TARGET.parameters
    assert dataclasses.replace(TARGET, vocabulary=600).body_parameters == TARGET.body_parameters
