"""A draft learns the target's distribution over the user's text."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd_serve.base.errors import UserError
from ssd_serve.recipes.checkpoint import read_checkpoint
from ssd_serve.recipes.data import Workspace, load_tokenizer, read_texts, split_texts
from ssd_serve.recipes.distil import (
    Distilled,
    DistilRecipe,
    check_tokenizers,
    distil,
    export_distilled,
    read_draft,
)
from tests.end_to_end.tiny_pair import write_model
from tests.models import checkpoints
from tests.recipes.test_commands import parse

RECIPE = DistilRecipe(tokens=8_000, rows=4, length=48, rate=10.0, compiled=False, checkpoint_seconds=0.5)
WORDS = ("the", "draft", "reads", "what", "its", "target", "says", "of", "a", "text", "and", "learns")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    chosen = random.Random(5)
    lines = [" ".join(chosen.choices(WORDS, k=8)) for _ in range(300)]
    (tmp_path / "notes.txt").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "notes.txt"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A random target, and a draft that is it with noise."""
    write_model(tmp_path / "target", seed=1, noise=0.0)
    write_model(tmp_path / "draft", seed=1, noise=0.08)
    return tmp_path / "target", tmp_path / "draft"


def prepare(workspace: Workspace, draft: Path, text: Path) -> None:
    workspace.prepare(split_texts(read_texts([text])), load_tokenizer(draft), RECIPE.min_tokens)


def taught(
    folder: Path, pair: tuple[Path, Path], text: Path, lines: list[str], recipe: DistilRecipe = RECIPE
) -> Distilled:
    workspace = Workspace(folder)
    prepare(workspace, pair[1], text)
    return distil(recipe, workspace, *pair, lines.append)


@pytest.mark.slow
def test_agreement_on_held_out_text_rises_and_config_stays(
    pair: tuple[Path, Path], text: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    distilled = taught(tmp_path / "work", pair, text, lines)
    assert distilled.training.tokens >= RECIPE.tokens
    assert distilled.after["agreement"] > distilled.before["agreement"] + 0.2
    assert f"agreement {distilled.after['agreement']:.3f}" in lines[-1]
    export_distilled(distilled, pair[1], tmp_path / "out")
    assert read_checkpoint(tmp_path / "out").config == read_checkpoint(pair[1]).config
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (pair[1] / "tokenizer.json").read_bytes()
    exported = read_draft(read_checkpoint(tmp_path / "out"), tmp_path / "out")
    for name, weight in exported.state_dict().items():
        assert torch.equal(weight, distilled.training.model.state_dict()[name]), name
    history = json.loads((tmp_path / "out" / "training.json").read_text())
    assert history[0] == {"step": 0, "tokens": 0, **distilled.before}


@pytest.mark.slow
def test_resumed_training_ends_with_the_same_weights(
    pair: tuple[Path, Path], text: Path, tmp_path: Path
) -> None:
    class StoppedError(Exception):
        pass

    class Stopping(list[str]):
        def append(self, line: str) -> None:
            if '"step": 10,' in line:
                raise StoppedError

    whole = taught(tmp_path / "whole", pair, text, [])
    often = dataclasses.replace(RECIPE, checkpoint_seconds=0.0)
    with pytest.raises(StoppedError):
        taught(tmp_path / "parts", pair, text, Stopping(), often)
    lines: list[str] = []
    resumed = taught(tmp_path / "parts", pair, text, lines)
    assert not lines[0].startswith("draft: 0 of")
    assert resumed.before == whole.before
    for name, weight in resumed.training.model.state_dict().items():
        assert torch.equal(weight, whole.training.model.state_dict()[name]), name


def test_too_little_text_and_other_texts_are_refused(
    pair: tuple[Path, Path], text: Path, tmp_path: Path
) -> None:
    workspace = Workspace(tmp_path / "work")
    (tmp_path / "short").write_text("a few words")
    with pytest.raises(UserError, match=r"too little text: \d+ tokens to learn from, and at least 192"):
        prepare(workspace, pair[1], tmp_path / "short")
    prepare(workspace, pair[1], text)
    prepare(workspace, pair[1], text)
    text.write_text("something else " * 1000)
    with pytest.raises(UserError, match="was made of other texts"):
        prepare(workspace, pair[1], text)


def changed(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_drafts_that_cannot_be_trained_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = pair
    check_tokenizers(target, draft)
    file = draft / "tokenizer.json"
    file.write_text(file.read_text().replace("<end>", "<other>"))
    with pytest.raises(UserError, match="has another tokenizer than"):
        check_tokenizers(target, draft)
    weights = load_file(draft / "model.safetensors")
    save_file({**weights, "model.layers.0.extra": torch.ones(2)}, draft / "model.safetensors")
    with pytest.raises(UserError, match=r"no plain Llama model: its weights model\.layers\.0\.extra"):
        read_draft(read_checkpoint(draft), draft)
    for changes, message in (
        ({"attention_bias": True}, "Biases"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised"),
        ({"architectures": ["Qwen3ForCausalLM"], "quantization_config": None}, "Only LlamaForCausalLM"),
    ):
        changed(draft, **changes)
        with pytest.raises(UserError, match=message):
            read_draft(read_checkpoint(draft), draft)


@pytest.mark.parametrize("name", ["llama3-gqa-tied", "llama"])
def test_training_decoder_computes_logits_of_transformers(name: str, tmp_path: Path) -> None:
    model = checkpoints.make(name)
    folder = checkpoints.save(model, tmp_path / "draft")
    tokens = torch.randint(3, 199, (60,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = read_draft(read_checkpoint(folder), folder)(tokens[None])[0]
    torch.testing.assert_close(found, checkpoints.logits(model, tokens.tolist()), atol=1e-3, rtol=1e-3)


def test_output_folder_that_is_an_input_is_refused(
    pair: tuple[Path, Path], text: Path, tmp_path: Path
) -> None:
    for written in pair:
        args = parse("distil", *map(str, (*pair, text)), "--out", str(written), "--work", str(tmp_path / "w"))
        with pytest.raises(UserError, match="choose another folder for --out"):
            args.run(args)
    head = parse(
        "eagle3", str(pair[0]), "--layers", "0", "--head", str(pair[0]), "--work", str(tmp_path / "w")
    )
    with pytest.raises(UserError, match="choose another folder for --head"):
        head.run(head)
    assert not (tmp_path / "w").exists()


def test_tied_embeddings_stay_tied(text: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = pair
    weights = load_file(draft / "model.safetensors")
    del weights["lm_head.weight"]
    save_file({name: value.bfloat16() for name, value in weights.items()}, draft / "model.safetensors")
    changed(draft, tie_word_embeddings=True)
    short = dataclasses.replace(RECIPE, tokens=1000)
    distilled = taught(tmp_path / "work", (target, draft), text, [], short)
    export_distilled(distilled, draft, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: value.dtype for name, value in written.items()} == dict.fromkeys(weights, torch.bfloat16)
    assert not torch.equal(written["model.embed_tokens.weight"], weights["model.embed_tokens.weight"])
