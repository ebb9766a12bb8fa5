"""EAGLE-3 heads: training-time test, training on a tiny library, export, and the served head."""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.batch import build_batch
from ssd_serve.models.heads.eagle import OWN
from ssd_serve.models.heads.load import head_sizes, load_head
from ssd_serve.models.load import ModelOptions
from ssd_serve.recipes.checkpoint import read_checkpoint
from ssd_serve.recipes.data import Workspace
from ssd_serve.recipes.decoder import Decoder, Shape, rotary_tables
from ssd_serve.recipes.distil import read_draft
from ssd_serve.recipes.eagle3 import EagleHead, EagleRecipe, attend, split
from ssd_serve.recipes.heads import Head, export_head, frequent_tokens, head_shape, train_head
from ssd_serve.recipes.training import Lesson, Teacher
from tests.models import checkpoints
from tests.models.test_decoder import chunk

SHAPE = Shape(300, 32, layers=3, heads=4, kv_heads=2, head=8, intermediate=48, context=256)
RECIPE = EagleRecipe(
    layers=(0, 1),
    proposed=100,
    depths=2,
    tokens=20_000,
    rows=4,
    length=48,
    compiled=False,
    checkpoint_seconds=2.0,
)


@torch.no_grad()
def read_target(target: Decoder, tokens: torch.Tensor, layers: Sequence[int]) -> Lesson:
    """Compute a teacher's lesson of tokens [texts, length] by the training decoder."""
    cos, sin = rotary_tables(target.shape, tokens.shape[1], tokens.device)
    x: torch.Tensor = target.model.embed_tokens(tokens)
    kept: list[torch.Tensor] = []
    for index, layer in enumerate(target.model.layers):
        x = layer(x, cos, sin)
        if index in layers:
            kept.append(x)
    logits: torch.Tensor = target.lm_head(target.model.norm(x))
    return Lesson(logits, torch.cat(kept, dim=-1))


def features_of(target: Decoder, tokens: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """Return the features of a text [length]: [length, layers * hidden]."""
    features = read_target(target, tokens[None], layers).features
    assert features is not None
    return features[0]


def random_pair(steps: int = 3) -> tuple[EagleHead, Decoder]:
    torch.manual_seed(1)
    target = Decoder(SHAPE)
    ids = torch.arange(0, 300, 7)
    return EagleHead(dataclasses.replace(SHAPE, layers=1), ids, (0, 1), steps).eval(), target.eval()


@torch.no_grad()
def guesses_of(
    head: Head, embedding: torch.Tensor, tokens: torch.Tensor, lesson: Lesson
) -> list[torch.Tensor]:
    """The logits of each depth, [texts, n, proposed], as training computes them."""
    assert lesson.features is not None
    anchors = head.anchors(torch.ones_like(tokens, dtype=torch.bool))
    vectors = head(torch.nn.functional.embedding(tokens, embedding), lesson.features, anchors)
    return [
        torch.nn.functional.linear(each, matrix, bias)
        for each, (matrix, bias) in zip(vectors, head.matrices(), strict=True)
    ]


@torch.no_grad()
def by_hand(
    head: EagleHead, target: Decoder, tokens: torch.Tensor, place: int, steps: int
) -> list[torch.Tensor]:
    """The head's logits after each step from one place: it reads true features up to there, then its own
    words, the text a causal chunk each time."""
    features = features_of(target, tokens, (0, 1))
    embedded = target.model.embed_tokens(tokens)
    found: list[torch.Tensor] = []
    given = head.fc(features[: place + 1])
    for step in range(steps):
        rows = embedded[1 : place + 2 + step]
        outputs = _chunk(head, rows, given)
        found.append(head.lm_head(head.norm(outputs[-1])))
        given = torch.cat((given, outputs[-1:]))
    return found


def _chunk(head: EagleHead, tokens: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Run a causal pass over rows of tokens and vectors, as the engine does."""
    layer, width = head.midlayer, head.shape.head
    tables = rotary_tables(head.shape, len(tokens), tokens.device)
    both = torch.cat((layer.input_layernorm(tokens), layer.hidden_norm(vectors)), -1)[None]
    query, key = (split(getattr(layer.self_attn, f"{each}_proj")(both), width, tables) for each in ("q", "k"))
    mixed = attend(query, [key], [split(layer.self_attn.v_proj(both), width)])
    hidden = vectors + layer.self_attn.o_proj(mixed)[0]
    result: torch.Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return result


@pytest.mark.parametrize("architecture", ["llama", "qwen3-qk-norm"])
def test_teacher_logits_and_features_equal_transformers(architecture: str, tmp_path: Path) -> None:
    model = checkpoints.make(architecture)
    teacher = Teacher(checkpoints.save(model, tmp_path / "target"), 40, (0, 2), dtype="fp32")
    texts = torch.randint(3, 199, (2, 18), generator=torch.Generator().manual_seed(4))
    lesson = teacher.read(texts)
    with torch.no_grad():
        outputs = model(texts, output_hidden_states=True)
    torch.testing.assert_close(lesson.logits, outputs.logits, atol=1e-3, rtol=1e-3)
    first = outputs.hidden_states[1]
    assert lesson.features is not None
    torch.testing.assert_close(lesson.features[..., : first.shape[-1]], first, atol=1e-3, rtol=1e-3)
    weight = torch.nn.Parameter(torch.ones(1))
    torch.autograd.backward([(lesson.features * weight).sum() + (lesson.logits * weight).sum()])
    assert weight.grad is not None


def test_training_time_test_sees_what_drafting_sees() -> None:
    head, target = random_pair()
    tokens = torch.randint(0, 300, (20,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        lesson = read_target(target, tokens[None], (0, 1))
        steps = guesses_of(head, target.model.embed_tokens.weight, tokens[None], lesson)
    for place in (0, 5, 12):
        for logits, expected in zip(steps, by_hand(head, target, tokens, place, 3), strict=True):
            torch.testing.assert_close(logits[0, place], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (dataclasses.replace(RECIPE, layers=(0, 2)), "name some of 0 to 1"),
        (dataclasses.replace(RECIPE, layers=(1, 0)), "ascending"),
        (dataclasses.replace(RECIPE, proposed=100_000), "1 to [0-9]+ tokens"),
        (dataclasses.replace(RECIPE, depths=48), "1 to 47 tokens, not 48"),
        (dataclasses.replace(RECIPE, length=100_000), "context of [0-9]+ tokens"),
    ],
)
def test_recipe_that_does_not_fit_the_target_is_refused(
    recipe: EagleRecipe, message: str, workspace: Workspace, target: Path
) -> None:
    with pytest.raises(UserError, match=message):
        train_head(recipe, workspace, target, print)


@pytest.mark.slow
def test_head_learns_resumes_and_is_served(workspace: Workspace, target: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    training = train_head(RECIPE, workspace, target, lines.append)
    head = training.model
    assert isinstance(head, EagleHead)
    (done,) = (json.loads(line.removeprefix("done ")) for line in lines if line.startswith("done "))
    first = json.loads(lines[1].partition(" ")[2])
    assert done["agreement_0"] > first["agreement_0"] + 0.1
    again: list[str] = []
    copy = Workspace(tmp_path / "copy")
    shutil.copytree(workspace.folder, copy.folder)
    train_head(RECIPE, copy, target, again.append)
    assert len(again) == 1  # the training was complete
    copy.checkpoint("head").write_bytes(b"half a checkpoint")
    with pytest.raises(UserError, match="remove it to begin anew"):
        train_head(RECIPE, copy, target, again.append)
    vocabulary = head_shape(target).vocabulary
    counts = np.bincount(workspace.stream(), minlength=vocabulary)
    assert torch.equal(head.ids, frequent_tokens(counts, RECIPE.proposed))
    export_head(head, tmp_path / "head", training.history)
    history = json.loads((tmp_path / "head" / "training.json").read_text())
    assert history[-1]["agreement_1"] == pytest.approx(done["agreement_1"], abs=1e-3)

    served = load_head(
        tmp_path / "head",
        ModelOptions(device="cpu", dtype="fp32", slots=64, context=None),
        head_sizes(tmp_path / "head", target, device="cpu", dtype="fp32"),
    )
    teacher = read_draft(read_checkpoint(target), target).eval()
    assert head_shape(target) == dataclasses.replace(teacher.shape, layers=1)
    tokens = torch.from_numpy(workspace.stream()[:24].astype("int64"))
    with torch.no_grad():
        features = features_of(teacher, tokens, RECIPE.layers)
    part = chunk(tokens[1:].tolist(), 0, 23, range(23))
    batch = dataclasses.replace(build_batch([part]), vectors=served.fuse(features[:23]))
    found = served.forward(batch)
    with torch.no_grad():
        outputs = _chunk(head, teacher.model.embed_tokens(tokens[1:]), head.fc(features[:23]))
        expected = head.lm_head(head.norm(outputs))
    torch.testing.assert_close(served.spread(found.logits)[:, head.ids], expected, atol=0.1, rtol=0.05)
    assert found.features[OWN].shape == (23, head.shape.hidden)
