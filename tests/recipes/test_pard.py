"""A draft learns to guess several positions at once from the target's answers."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from ssd_serve.base.errors import UserError
from ssd_serve.drafter.sources.registry import registered_source
from ssd_serve.models.weights.formats import read_config
from ssd_serve.recipes.checkpoint import read_checkpoint
from ssd_serve.recipes.decoder import Decoder, Shape
from ssd_serve.recipes.distil import read_draft
from ssd_serve.recipes.pard import TEXT_WEIGHT, first_draft, masked_rows, masked_vectors, pard_loss
from ssd_serve.recipes.training import Lesson
from tests.recipes.test_chats import chat_target, chats_file
from tests.recipes.test_commands import parse

__all__ = ["chat_target"]
SHAPE = Shape(vocabulary=61, hidden=32, layers=2, heads=4, kv_heads=2, head=8, intermediate=48)
LENGTH, MASK, POSITIONS = 30, 60, 4


def random_window() -> tuple[Decoder, torch.Tensor, Lesson]:
    torch.manual_seed(1)
    window = torch.randint(0, MASK, (LENGTH,))
    counted = torch.arange(LENGTH) % 10 > 3
    return Decoder(SHAPE), window, Lesson(3 * torch.randn(1, LENGTH, 61), counted=counted[None])


def causal_logits(model: Decoder, window: torch.Tensor, place: int, masks: int) -> torch.Tensor:
    """Logits of a row as the draft computes them when it is served: a text with masks at its end."""
    text = [*window[: place - masks + 1].tolist(), *[MASK] * masks]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits: torch.Tensor = model(torch.tensor([text]))[0, -1]
    return logits.float()


def test_rows_of_a_window_are_those_of_texts_with_masks_at_their_end() -> None:
    model, window, lesson = random_window()
    assert lesson.counted is not None
    found, masks, places = masked_vectors(model, window, lesson.counted[0], MASK, POSITIONS, seed=5)
    assert set(masks.tolist()) == set(range(POSITIONS))
    assert bool(lesson.counted[0][places].all())
    for row, mask, place in zip(model.lm_head(found.float()), masks.tolist(), places.tolist(), strict=True):
        torch.testing.assert_close(row, causal_logits(model, window, place, mask), atol=0.03, rtol=0.03)


def test_each_position_keeps_fewer_places_with_all_masks_before() -> None:
    counted = torch.ones(1000, dtype=torch.bool)
    counted[:200] = False
    masks, places = masked_rows(counted, 12, seed=3)
    rows = set(zip(masks.tolist(), places.tolist(), strict=True))
    assert {(mask - 1, place - 1) for mask, place in rows if mask} <= rows
    counts = torch.bincount(masks).tolist()
    assert counts[0] == 1000
    for mask, count in enumerate(counts[1:], 1):
        assert 0 <= int(800 * max(0.7**mask, 0.1)) - count <= mask
    assert min(place - mask for mask, place in rows if mask) >= 200
    assert not torch.equal(masked_rows(counted, 12, seed=4)[1], places)


def test_the_loss_is_the_distance_to_the_target_and_a_little_to_the_text() -> None:
    model, window, lesson = random_window()
    assert lesson.counted is not None
    seed = int(window.sum())
    vectors, _, places = masked_vectors(model, window, lesson.counted[0], MASK, POSITIONS, seed)
    expected = 0.0
    for row, place in zip(model.lm_head(vectors.float()).detach(), places.tolist(), strict=True):
        shares = functional.softmax(lesson.logits[0, place], dim=-1)
        expected -= float((shares * row.log_softmax(-1)).sum())
        expected -= TEXT_WEIGHT * float(row.log_softmax(-1)[window[place + 1]])
    found = pard_loss(model, window[None], lesson, MASK, POSITIONS).item()
    assert found == pytest.approx(expected / len(places) / (1 + TEXT_WEIGHT), rel=1e-2)


def adapt(target: Path, folder: Path, *words: str) -> Path:
    chats = str(chats_file(folder, 120))
    more = ("--tokens", "12000", "--rows", "4", "--length", "48", "--positions", "3", "--rate", "40")
    places = ("--work", str(folder / "work"), "--out", str(folder / "out"))
    args = parse("pard", str(target), "--chats", chats, *places, *more, *words)
    assert args.run(args) == 0
    return folder / "out"


@pytest.mark.slow
def test_agreement_at_all_positions_rises_and_the_draft_is_a_pard_one(
    chat_target: Path, tmp_path: Path
) -> None:
    out = adapt(chat_target, tmp_path, "--layers", "0", "1", "--mask", "5")
    history = json.loads((out / "training.json").read_text())
    before, after = (
        [each[f"agreement_{position}"] for position in range(3)] for each in (history[0], history[-1])
    )
    assert after[0] > 0.2
    assert after[1] + after[2] > before[1] + before[2] + 0.06
    config = read_config(out)
    assert (config["pard_token"], config["pard_k"], config["spd_type"]) == (5, 3, "pard")
    assert registered_source(str(out), out).load.__name__ == "load_pard"
    weights = read_draft(read_checkpoint(out), out).state_dict()
    again = read_draft(read_checkpoint(adapt(chat_target, tmp_path, "--layers", "0", "1")), out).state_dict()
    assert all(torch.equal(weights[name], again[name]) for name in weights), "it was trained to its end"


def test_layers_of_the_target_become_a_draft(target: Path) -> None:
    whole, cut = read_checkpoint(target), first_draft(target, [1])
    assert cut.config == {**whole.config, "num_hidden_layers": 1}
    name = "self_attn.q_proj.weight"
    theirs = whole.weights[f"model.layers.1.{name}"].to(torch.bfloat16)
    assert torch.equal(cut.weights[f"model.layers.0.{name}"], theirs)
    read_draft(cut, target)
    for layers in ([1, 0], [0, 2], [-1]):
        with pytest.raises(UserError, match="name some of 0 to 1, ascending"):
            first_draft(target, layers)


def test_masks_and_windows_that_do_not_fit_are_refused(chat_target: Path, tmp_path: Path) -> None:
    for words in (("--mask", "257"), ("--length", "513")):
        with pytest.raises(UserError, match="the draft has 257 tokens and a context of 512"):
            adapt(chat_target, tmp_path, "--layers", "0", *words)
