"""Families of heads in training: each place by hand as drafting computes it, the loss, figures, layouts, learning."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ssd_serve.base.draft_messages import FINAL
from ssd_serve.models.heads.load import target_head
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.recipes.chats import ChatLessons
from ssd_serve.recipes.checkpoint import read_checkpoint
from ssd_serve.recipes.data import Workspace
from ssd_serve.recipes.decoder import Shape
from ssd_serve.recipes.dflash import BlockRecipe, spread_layers
from ssd_serve.recipes.gumiho import GumihoRecipe
from ssd_serve.recipes.heads import (
    Anchors,
    Head,
    HeadRecipe,
    TargetParts,
    export_head,
    head_loss,
    held_out_figures,
    train_head,
)
from ssd_serve.recipes.medusa import HydraRecipe, MedusaRecipe
from ssd_serve.recipes.training import Lesson, Teacher
from tests.recipes.test_chats import chat_target, prepared
from tests.recipes.test_eagle3 import guesses_of

__all__ = ["chat_target", "prepared"]

SHAPE = Shape(300, 32, layers=1, heads=4, kv_heads=2, head=8, intermediate=48, context=256)
SIZES: dict[str, Any] = {
    "proposed": 43,
    "tokens": 12_000,
    "rows": 4,
    "length": 48,
    "compiled": False,
    "chats": True,
}
RECIPES: dict[str, HeadRecipe] = {
    "dflash": BlockRecipe(layers=(0, 1), depths=3, depth=2, anchors=16, gap=2, given=1, **SIZES),
    "medusa": MedusaRecipe(depths=3, **SIZES),
    "hydra": HydraRecipe(depths=3, **SIZES),
    "gumiho": GumihoRecipe(depths=4, **SIZES),
}


def made(family: str) -> tuple[Head, Tensor, Tensor, Tensor]:
    """A head with random weights, the embedding, and tokens and features of a text."""
    torch.manual_seed(3)
    embedding, ids = torch.randn(300, 32), torch.arange(0, 300, 7)
    parts = TargetParts(SHAPE, 2, ids, torch.randn(len(ids), 32), torch.ones(32), 5, embedding[5])
    head = RECIPES[family].make(parts).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    width = 64 if family == "dflash" else 32
    return head, embedding, torch.randint(0, 300, (20,)), torch.randn(20, width)


def guesses_at(head: Head, embedding: Tensor, tokens: Tensor, features: Tensor, place: int) -> list[Tensor]:
    """The logits of each depth below one place, as training computes them among other places."""
    lesson = Lesson(torch.zeros(1, len(tokens), 300), features[None])
    anchors = head.anchors(torch.ones(1, len(tokens), dtype=torch.bool))
    row = int((anchors.places[0] == place).nonzero()[0, 0])
    return [each[0, row] for each in guesses_of(head, embedding, tokens[None], lesson)]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + SHAPE.epsilon).sqrt() * weight


def turned(x: Tensor, place: int) -> Tensor:
    """Rotate one head's vector [8] to a place, pair by pair."""
    result = x.clone()
    for pair in range(4):
        angle = place / SHAPE.rope_theta ** (2 * pair / 8)
        a, b = x[pair], x[pair + 4]
        result[pair], result[pair + 4] = (
            a * math.cos(angle) - b * math.sin(angle),
            b * math.cos(angle) + a * math.sin(angle),
        )
    return result


def block_by_hand(weights: dict[str, Tensor], rows: Tensor, context: Tensor, at: int) -> Tensor:
    """Run a block's rows from a place on through two layers, one head and one row at a time."""
    for index in range(2):
        w = {name.removeprefix(f"layers.{index}."): value for name, value in weights.items()}
        own = normed(rows, w["input_layernorm.weight"])
        places = [*range(len(context)), *range(at, at + len(rows))]
        mixed = torch.zeros(len(rows), 32)
        for head in range(4):
            part, shared = slice(8 * head, 8 * head + 8), slice(8 * (head // 2), 8 * (head // 2) + 8)
            read = torch.cat((context, own))
            keys = normed(read @ w["self_attn.k_proj.weight"][shared].T, w["self_attn.k_norm.weight"])
            keys = torch.stack([turned(key, place) for key, place in zip(keys, places, strict=True)])
            values = read @ w["self_attn.v_proj.weight"][shared].T
            for row in range(len(rows)):
                query = normed(own[row] @ w["self_attn.q_proj.weight"][part].T, w["self_attn.q_norm.weight"])
                shares = (keys @ turned(query, at + row) / 8**0.5).softmax(0)
                mixed[row, part] = shares @ values
        rows = rows + mixed @ w["self_attn.o_proj.weight"].T
        read = normed(rows, w["post_attention_layernorm.weight"])
        gate = functional.silu(read @ w["mlp.gate_proj.weight"].T) * (read @ w["mlp.up_proj.weight"].T)
        rows = rows + gate @ w["mlp.down_proj.weight"].T
    return rows


@torch.no_grad()
@pytest.mark.parametrize(("gap", "given"), [(0, 0), (2, 0), (0, 2)])
def test_block_is_what_drafting_computes(gap: int, given: int) -> None:
    head, embedding, tokens, features = made("dflash")
    weights, anchors = head.state_dict(), torch.tensor([[3, 9, 15]])
    known = Anchors(anchors, anchors - gap, torch.full_like(anchors, given))
    vectors = head(embedding[tokens][None], features[None], known)
    for row, place in enumerate(anchors[0].tolist()):
        context = normed(features[: place - gap] @ weights["fc.weight"].T, weights["hidden_norm.weight"])
        words = embedding[tokens[place : place + 1 + given]]
        rows = torch.cat((words, embedding[5].expand(3 - given, -1)))
        expected = normed(block_by_hand(weights, rows, context, place), weights["norm.weight"])
        for depth in range(3):
            torch.testing.assert_close(vectors[depth][0, row], expected[1 + depth], atol=1e-4, rtol=1e-4)


def test_anchors_are_drawn_among_answers() -> None:
    head, *_ = made("dflash")
    counted = torch.zeros(4, 64, dtype=torch.bool)
    counted[:, 20:50] = True
    places, context, given = head.anchors(counted, torch.Generator().manual_seed(1))
    assert counted.gather(1, places).all()
    assert all(len(set(row)) == 16 for row in places.tolist())
    gaps = (places - context).flatten()
    assert set(gaps.tolist()) == {0, 1, 2}
    assert set(given.flatten().tolist()) == {0, 1}
    assert 0 < int((gaps > 0).sum()) < 32
    again = head.anchors(counted, torch.Generator().manual_seed(1))
    assert torch.equal(again.places, places)
    assert not torch.equal(head.anchors(counted, torch.Generator().manual_seed(2)).places, places)
    first = torch.zeros(1, 8, dtype=torch.bool)
    first[:, :2] = True  # no feature is known before the first token
    assert 0 not in head.anchors(first, torch.Generator().manual_seed(1)).places


def test_layers_of_a_block_head_are_spread_as_published() -> None:
    assert spread_layers(36) == [1, 9, 17, 25, 33]


@torch.no_grad()
def test_medusa_reads_the_feature_before_the_last_token() -> None:
    head, embedding, tokens, features = made("medusa")
    w = head.state_dict()
    for depth, found in enumerate(guesses_at(head, embedding, tokens, features, 7)):
        x = features[6] + functional.silu(w[f"blocks.{depth}.layers.0.weight"] @ features[6])
        torch.testing.assert_close(found, w[f"lm_heads.{depth}.weight"] @ x, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_hydra_reads_the_tokens_since() -> None:
    head, embedding, tokens, features = made("hydra")
    w = head.state_dict()
    for depth, found in enumerate(guesses_at(head, embedding, tokens, features, 7)):
        read = torch.cat((features[6], embedding[tokens[7 : 8 + depth]].flatten()))
        name = f"hydra_mlp.{depth}.0"
        x = w[f"{name}.res_connection.weight"] @ read + w[f"{name}.res_connection.bias"]
        x = x + functional.silu(w[f"{name}.linear.weight"] @ read + w[f"{name}.linear.bias"])
        expected = w[f"hydra_lm_head.{depth}.weight"] @ x + w[f"hydra_lm_head.{depth}.bias"]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def serial_by_hand(w: dict[str, Tensor], joined: Tensor) -> Tensor:
    """Run Gumiho's two layers causally over joined rows [rows, 32] at places from 0: the last vector."""
    x = joined
    for layer in range(2):
        name = f"layers.{layer}"
        read = x if layer == 0 else normed(x, w[f"{name}.input_layernorm.weight"])
        mixed = torch.zeros_like(x)
        for head, row in itertools.product(range(4), range(len(x))):
            part, shared = slice(8 * head, 8 * head + 8), slice(8 * (head // 2), 8 * (head // 2) + 8)
            keys = read[: row + 1] @ w[f"{name}.self_attn.k_proj.weight"][shared].T
            keys = torch.stack([turned(key, place) for place, key in enumerate(keys)])
            query = turned(w[f"{name}.self_attn.q_proj.weight"][part] @ read[row], row)
            values = read[: row + 1] @ w[f"{name}.self_attn.v_proj.weight"][shared].T
            mixed[row, part] = (keys @ query / 8**0.5).softmax(0) @ values
        x = x + mixed @ w[f"{name}.self_attn.o_proj.weight"].T
        read = normed(x, w[f"{name}.post_attention_layernorm.weight"])
        gate = functional.silu(read @ w[f"{name}.mlp.gate_proj.weight"].T)
        x = x + (gate * (read @ w[f"{name}.mlp.up_proj.weight"].T)) @ w[f"{name}.mlp.down_proj.weight"].T
    return x[-1]


@torch.no_grad()
def test_gumiho_runs_its_layers_twice_then_the_parallel_heads() -> None:
    head, embedding, tokens, features = made("gumiho")
    for parameter in head.parameters():  # deep stacks of large weights would only amplify rounding
        parameter.mul_(0.5)
    w, place = head.state_dict(), 7
    words = embedding[tokens]
    joined = torch.cat((words[1 : place + 1], features[:place]), -1) @ w["fc.weight"].T + w["fc.bias"]
    first = serial_by_hand(w, joined)
    second_row = w["fc.weight"] @ torch.cat((words[place + 1], first)) + w["fc.bias"]
    second = serial_by_hand(w, torch.cat((joined, second_row[None])))
    third_row = w["fc.weight"] @ torch.cat((words[place + 2], second)) + w["fc.bias"]
    expected = [first, second]
    for index in range(2):
        x = torch.cat((second_row, third_row))
        for block in range(6):
            name = f"mlp.mlp.{index}.{block}.linear"
            added = functional.silu(w[f"{name}.weight"] @ x + w[f"{name}.bias"])
            x = added if block == 0 else x + added
        expected.append(x)
    ((matrix, _), *_) = head.matrices()
    for found, vector in zip(guesses_at(head, embedding, tokens, features, place), expected, strict=True):
        torch.testing.assert_close(found, matrix @ vector, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", RECIPES)
def test_loss_is_the_weighted_mean_of_every_depth(family: str) -> None:
    head, embedding, tokens, features = made(family)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(0.3)  # small logits: products of 16 bits are close
    logits, counted = torch.randn(2, 20, 43), torch.rand(2, 20) < 0.6
    texts, both = torch.stack((tokens, tokens.flip(0))), torch.stack((features, features.flip(0)))
    lesson = Lesson(logits, both, counted)
    anchors = head.anchors(counted, torch.Generator().manual_seed(1))
    found = head_loss(head, embedding, texts, lesson, anchors)
    torch.autograd.backward([found])
    slopes = [parameter.grad.clone() for parameter in head.parameters() if parameter.grad is not None]
    head.zero_grad()
    total = torch.zeros(())
    vectors = head(embedding[texts], both, anchors)
    for depth, (matrix, bias) in enumerate(head.matrices()):
        costs, distances = list[Tensor](), list[Tensor]()
        for text, row in itertools.product(range(2), range(anchors.places.shape[1])):
            at = int(anchors.places[text, row]) + depth
            if at < 20 and counted[text, at] and depth >= anchors.given[text, row]:
                own = vectors[depth][text, row]
                guesses = functional.linear(own, matrix, bias)
                costs.append(functional.cross_entropy(guesses, logits[text, at].softmax(-1)))
                if family == "gumiho":
                    distances.append(functional.smooth_l1_loss(own, both[text, at]))
        total = total + head.weights[depth] * torch.stack(costs).mean()
        if distances:
            total = total + head.regressions[depth] * torch.stack(distances).mean()
    torch.testing.assert_close(found, total, atol=2e-2, rtol=2e-2)
    torch.autograd.backward([total])
    expected = [parameter.grad for parameter in head.parameters() if parameter.grad is not None]
    assert len(slopes) == len(expected)
    for slope, each in zip(slopes, expected, strict=True):
        assert (slope - each).norm() <= 0.05 * each.norm() + 1e-4


def test_figures_follow_the_chain_of_right_guesses() -> None:
    head, embedding, tokens, features = made("medusa")
    anchors = head.anchors(torch.ones(1, 20, dtype=torch.bool))
    lesson = Lesson(torch.zeros(1, 20, 300), features[None])
    guesses = torch.stack(
        [head.ids[each[0].argmax(-1)] for each in guesses_of(head, embedding, tokens[None], lesson)]
    )
    truth = torch.randint(0, 300, (20,))
    truth[1:18:2] = guesses[0, ::2]  # every second first guess is right
    text = tokens.clone()
    text[2] = truth[1]  # of which the text has two
    text[4] = truth[3]
    guesses = torch.stack(
        [head.ids[each[0].argmax(-1)] for each in guesses_of(head, embedding, text[None], lesson)]
    )
    truth[2] = guesses[1, 0]
    logits = functional.one_hot(truth, 300).float()[None]
    found = held_out_figures(head, embedding, text[None], Lesson(logits, features[None]), anchors)
    right = [int((guesses[depth] == truth[1 + depth : 18 + depth]).sum()) for depth in range(3)]
    assert [found[f"agreement_{depth}"] for depth in range(3)] == [(each, 17) for each in right]
    alive = [row for row in range(17) if guesses[0, row] == truth[1 + row] == text[2 + row]]
    assert alive == [0, 2]
    assert found["accepted_1"] == (sum(int(guesses[1, row] == truth[2 + row]) for row in alive), 2)
    assert found["accepted_1"][0] >= 1


NAMES = {
    "dflash": {
        "fc.weight": (32, 64),
        "hidden_norm.weight": (32,),
        "layers.1.self_attn.q_norm.weight": (8,),
        "layers.1.self_attn.k_proj.weight": (16, 32),
        "lm_head.weight": (43, 32),
        "d2t": (43,),
    },
    "medusa": {"blocks.2.layers.0.weight": (32, 32), "lm_heads.2.weight": (43, 32), "token_map": (43,)},
    "hydra": {
        "hydra_mlp.1.0.linear.weight": (32, 96),
        "hydra_mlp.1.0.res_connection.bias": (32,),
        "hydra_lm_head.2.bias": (43,),
        "d2t": (43,),
    },
    "gumiho": {
        "fc.bias": (32,),
        "lm_head.weight": (43, 32),
        "d2t": (43,),
        "layers.1.input_layernorm.weight": (32,),
        "mlp.mlp.1.0.linear.weight": (32, 64),
    },
}
CONFIGS: dict[str, dict[str, object]] = {
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "block_size": 4,
        "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 5, "context_gap": True},
    },
    "medusa": {"num_heads": 3, "truncated_vocab_size": 43, "vocab_size": 300},
    "hydra": {"hydra_num_heads": 3, "hydra_num_layers": 1, "hydra_head_arch": "mlp"},
    "gumiho": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize("family", RECIPES)
def test_exported_layout_is_the_published_one(family: str, tmp_path: Path) -> None:
    head, *_ = made(family)
    export_head(head, tmp_path / "head", [{"step": 1.0}])
    written = read_checkpoint(tmp_path / "head")
    assert (
        NAMES[family].items() <= {name: tuple(each.shape) for name, each in written.weights.items()}.items()
    )
    assert CONFIGS[family].items() <= written.config.items()
    ids = torch.arange(0, 300, 7)
    if "d2t" in NAMES[family]:
        assert torch.equal(written.weights["d2t"] + torch.arange(43), ids)
    assert torch.equal(written.weights.get("token_map", ids), ids)
    unnormed = "layers.0.input_layernorm.weight" not in written.weights
    assert unnormed == (family != "dflash")
    assert json.loads((tmp_path / "head" / "training.json").read_text()) == [{"step": 1.0}]


def test_outputs_kept_for_another_head_are_used(prepared: Workspace, chat_target: Path) -> None:
    matrix = target_head(chat_target, Tokenizer(chat_target).vocabulary, 32)

    def lessons(features: tuple[int, ...]) -> ChatLessons:
        named = tuple(each for each in features if each != FINAL)
        return ChatLessons(
            prepared, Teacher(chat_target, 160, (*named, FINAL), dtype="fp32"), matrix, features
        )

    places = torch.arange(50)[None]
    both = lessons((0, 1)).read(places)[1]
    (file,) = prepared.folder.glob("outputs-*.bin")
    for features in ((1,), (FINAL,), (1, FINAL)):
        lesson = lessons(features).read(places)[1]
        assert list(prepared.folder.glob("outputs-*.bin")) == [file]
        assert both.features is not None
        assert lesson.features is not None
        assert torch.equal(lesson.logits, both.logits)
        if features[0] == 1:
            assert torch.equal(lesson.features[..., :32], both.features[..., 32:])
        if features[-1] == FINAL:
            logits = lesson.features[..., -32:].to(matrix.dtype) @ matrix.T
            assert torch.equal(logits.float(), lesson.logits)


@pytest.mark.slow
@pytest.mark.parametrize("family", RECIPES)
def test_heads_learn_and_resume(family: str, prepared: Workspace, chat_target: Path) -> None:
    recipe = dataclasses.replace(RECIPES[family], proposed=100)
    whole = train_head(recipe, prepared, chat_target, lambda _line: None)
    losses = [each["train_loss"] for each in whole.history[:-1]]
    assert losses[-1] < 0.9 * losses[0]
    prepared.checkpoint(family).unlink()
    seen = list[str]()

    def stop(line: str) -> None:
        seen.append(line)
        if '"step": 10,' in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_head(dataclasses.replace(recipe, checkpoint_seconds=0.0), prepared, chat_target, stop)
    again = train_head(recipe, prepared, chat_target, seen.append)
    assert f"{family}: 1,728 of 12,000 tokens" in seen  # nine steps of 192 tokens
    assert again.step == whole.step
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
