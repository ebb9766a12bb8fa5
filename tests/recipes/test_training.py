"""Training end to end on a tiny library: schedule by tokens, going on after a stop, export, evaluation."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.data import Sampler
from ssd_serve.recipes.decoder import Decoder, Shape, initialise
from ssd_serve.recipes.evaluation import evaluate_pair, scored_windows
from ssd_serve.recipes.export import best_sampling, export_pair, read_trained
from ssd_serve.recipes.optimiser import Schedule, orthogonalise
from ssd_serve.recipes.pair import PairRecipe, train_pair
from ssd_serve.recipes.tokenizer import load_tokenizer, train_tokenizer
from ssd_serve.recipes.training import Phase, Recipe
from ssd_serve.recipes.workspace import Workspace

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")
SMALL = Recipe(
    Shape(300, 32, layers=2, heads=4, kv_heads=2, head=8, intermediate=48, context=256),
    tokens=12_000,
    phases=(Phase(0.0, 4, 32), Phase(0.5, 2, 64)),
    compiled=False,
    report_seconds=5.0,
    checkpoint_seconds=3.0,
)
SMALLER = dataclasses.replace(
    SMALL, shape=Shape(300, 16, layers=1, heads=2, kv_heads=1, head=8, intermediate=32, context=256)
)
PAIR = PairRecipe(SMALL, SMALLER)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are fastest on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def told(workspace: Workspace, recipe: PairRecipe) -> list[str]:
    lines: list[str] = []
    train_pair(recipe, workspace, lines.append)
    return lines


def trained(workspace: Workspace, role: str) -> dict[str, torch.Tensor]:
    return read_trained(workspace.checkpoint(role)).decoder.state_dict()


def test_the_rate_follows_the_tokens() -> None:
    schedule = Schedule(1000, warm_up=0.02, decay=0.5)
    assert schedule.rate(10) == pytest.approx(0.5)
    assert schedule.rate(300) == 1.0
    assert schedule.rate(750) == pytest.approx(0.5)
    assert schedule.rate(1000) == schedule.rate(5000) == 0.0


def test_the_target_learns_the_text_and_the_draft_what_the_target_says(workspace: Workspace) -> None:
    lines = told(workspace, PAIR)
    target, draft = (json.loads(line.removeprefix("done ")) for line in lines if line.startswith("done "))
    first = json.loads(lines[1].partition(" ")[2])
    assert target["held_out_loss"] < 4.5 < first["held_out_loss"]
    assert target["tokens"] >= 12_000
    assert draft["agreement"] > 0.5


def test_a_stopped_training_ends_as_if_it_had_not_stopped(workspace: Workspace, tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def until_stopped(line: str) -> None:
        if '"step": 50,' in line:
            raise StoppedError

    told(workspace, PAIR)
    wanted = trained(workspace, "target")
    stopped = Workspace(tmp_path / "stopped")
    shutil.copytree(workspace.folder, stopped.folder)
    stopped.checkpoint("target").unlink()
    often = dataclasses.replace(SMALL, checkpoint_seconds=0.0)
    with pytest.raises(StoppedError):
        train_pair(PairRecipe(often, SMALLER), stopped, until_stopped)
    assert 0 < read_trained(stopped.checkpoint("target")).tokens < 12_000
    told(stopped, PAIR)
    for name, weight in trained(stopped, "target").items():
        assert torch.equal(weight, wanted[name]), name


def test_a_pair_begins_with_the_weights_of_another(workspace: Workspace, tmp_path: Path) -> None:
    told(workspace, PAIR)
    folders = (tmp_path / "target", tmp_path / "draft")
    export_pair(workspace, *folders)
    again = Workspace(tmp_path / "again")
    shutil.copytree(workspace.folder, again.folder)
    for role in ("target", "draft"):
        again.checkpoint(role).unlink()
    lines = told(again, PairRecipe(SMALL, SMALLER, start=folders))
    first = json.loads(lines[1].partition(" ")[2])
    assert first["held_out_loss"] < 4.5
    with pytest.raises(UserError, match="other sizes"):
        told(again, PairRecipe(SMALLER, SMALLER, start=folders))


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
    told(workspace, PAIR)
    target, draft = tmp_path / "pair" / "target", tmp_path / "pair" / "draft"
    export_pair(workspace, target, draft)
    export_pair(workspace, target, draft)  # replaces what is there
    tokens = torch.randint(0, 300, (2, 50), generator=torch.Generator().manual_seed(0))
    for folder, decoder in ((target, read_trained(workspace.checkpoint("target")).decoder), (draft, None)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            theirs = model(tokens).logits
            if decoder is not None:
                rounded = {name: weight.bfloat16().float() for name, weight in decoder.state_dict().items()}
                decoder.load_state_dict(rounded)
                assert torch.allclose(decoder(tokens), theirs, atol=1e-4)
        assert "Not measured yet" in (folder / "README.md").read_text()
    figures: dict[str, Any] = evaluate_pair(target, draft, library, samples=2, temperatures=(0.5, 1.0))
    assert isinstance(figures["agreement"], float)
    assert figures["held_out_files_missing"] == 0
    export_pair(workspace, target, draft, figures)
    card = (target / "README.md").read_text()
    assert f"{figures['agreement']:.3f}" in card
    assert [line.split("|")[1:4] for line in card.splitlines() if " of 2 " in line] == [
        [f" {entry['temperature']:g} ", f" {entry['top_p']:g} ", f" {entry['parsed']} of 2 "]
        for entry in figures["sampled"]
    ]
    json.dumps(figures)
    usual = json.loads((target / "generation_config.json").read_text())
    assert usual == {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "do_sample": True,
        **best_sampling(figures),
    }


def test_sampling_is_that_by_which_most_functions_parse_that_say_something() -> None:
    def sampled(temperature: float, top_p: float, parsed: int, empty: int = 0) -> dict[str, object]:
        return {"temperature": temperature, "top_p": top_p, "parsed": parsed, "empty": empty}

    entries = [
        sampled(0.2, 0.9, 3),
        sampled(0.6, 0.9, 7),
        sampled(0.6, 0.95, 6),
        sampled(1.0, 0.95, 9, empty=4),
    ]
    assert best_sampling({"sampled": entries}) == {"temperature": 0.6, "top_p": 0.9}
    assert best_sampling({}) == best_sampling(None) == {}


def test_evaluation_scores_every_position_once(workspace: Workspace) -> None:
    for document in workspace.held_out():
        scored = [end for ids, first in scored_windows(document, 16) for end in ids[1 + first :].tolist()]
        assert scored == document.ids[1:].tolist()


def test_muon_orthogonalises() -> None:
    matrices = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert 0.5 < values.min() < values.max() < 1.3


def test_decoder_counts_its_parameters() -> None:
    shape = SMALL.shape
    decoder = Decoder(shape)
    initialise(decoder, 0)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == shape.parameters
    assert dataclasses.replace(shape, vocabulary=600).body_parameters == shape.body_parameters


def test_what_cannot_be_trained_on_or_gone_on_with_is_named(
    workspace: Workspace, library: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="too few Python sources"):
        Workspace(tmp_path / "new").prepare(tmp_path, 300, 256)
    assert not (tmp_path / "new").exists()
    other = train_tokenizer(["something else entirely"], 280)
    with pytest.raises(UserError, match="another tokenizer"):
        workspace.prepare(library, 300, 256, tokenizer=other)
    workspace.prepare(library, 300, 256, tokenizer=workspace.tokenizer())
    workspace.checkpoint("target").write_bytes(b"half a checkpoint")
    with pytest.raises(UserError, match="remove it to begin anew"):
        told(workspace, PAIR)
