"""Ballast for EAGLE heads: with a target with ballast, a head drafts what the small one drafts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.kernels.batch import build_batch
from ssd_serve.models.heads.eagle import OWN
from ssd_serve.models.heads.load import head_config
from ssd_serve.models.interface import feature_name
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.recipes.ballast import add_ballast, add_head_ballast, is_head
from ssd_serve.recipes.commands import run_ballast
from tests.models.heads import FLAT, NESTED, VOCABULARY, FirstOracle, Oracle
from tests.models.test_decoder import chunk
from tests.models.test_heads import loaded, target
from tests.recipes.test_commands import parse

LAYERS, PROMPT, STEPS, WIDE = (1, 3, 4), 12, 3, 80
CASES: dict[str, tuple[type[Oracle | FirstOracle], str, dict[str, Any]]] = {
    "flat": (Oracle, FLAT, {}),
    "targets-embedding": (Oracle, FLAT, {"own_embedding": False}),
    "speculators": (Oracle, NESTED, {"residual_is_normed": True, "norms": "one"}),
    "eagle-3.1": (Oracle, NESTED, {"norms": "each", "feed_normed": True}),
    "eagle-1": (FirstOracle, FLAT, {"bias": True}),
    "eagle-1-targets-embedding": (FirstOracle, FLAT, {"own_embedding": False}),
    "eagle-1-speculators": (FirstOracle, NESTED, {"norms": True, "own_head": True}),
}


def written(oracle: Oracle | FirstOracle, folder: Path, layout: str) -> Path:
    """A head that names its layers."""
    oracle.save(folder, layout)
    if layout == FLAT and isinstance(oracle, Oracle):
        changed(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": list(LAYERS)})
    return folder


def changed(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drafted(head: Path, theirs: Path) -> tuple[torch.Tensor, list[int]]:
    """A prompt read by the target and the head, which then goes on from its own words: its logits, and the
    tokens that it chose."""
    read = head_config(head, theirs).features
    assert read is not None
    model = load_model(
        theirs, ModelOptions(device="cpu", dtype="fp32", slots=64, context=None, features=read)
    )
    reader = loaded(head, theirs)
    tokens = torch.randint(0, VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(3)).tolist()
    features = model.forward(build_batch([chunk(tokens, 0, PROMPT, range(PROMPT))])).features
    vectors = reader.fuse(torch.cat([features[feature_name(each)] for each in read], -1))
    start, tokens, outputs = 0, tokens[1:], list[torch.Tensor]()
    for _ in range(STEPS):
        part = chunk(tokens, start, len(tokens), range(len(tokens)))
        start = len(tokens)
        found = reader.forward(replace(build_batch([part]), vectors=vectors[-len(part.tokens) :]))
        outputs.append(found.logits)
        tokens.append(int(found.logits[-1].argmax()))
        vectors = found.features[OWN][-1:]
    return torch.cat(outputs), tokens[PROMPT:]


@pytest.mark.parametrize("case", CASES)
def test_the_pair_with_ballast_drafts_what_the_small_one_drafts(case: str, tmp_path: Path) -> None:
    kind, layout, options = CASES[case]
    theirs, head = target(tmp_path / "target"), written(kind(**options), tmp_path / "head", layout)
    add_ballast(theirs, tmp_path / "large", hidden=WIDE, layers=11)
    sizes = add_head_ballast(head, tmp_path / "large_head", hidden=WIDE)
    assert (sizes.hidden, sizes.layers, sizes.intermediate) == (WIDE, 1, 220)
    expected, wanted = drafted(head, theirs)
    found, chosen = drafted(tmp_path / "large_head", tmp_path / "large")
    assert chosen == wanted
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)


def test_the_cost_is_real(tmp_path: Path) -> None:
    head = written(Oracle(), tmp_path / "head", FLAT)
    assert is_head(head)
    assert not is_head(target(tmp_path / "target"))
    run_ballast(parse("ballast", str(head), str(tmp_path / "large"), "--hidden", "64", "--heads", "16"))
    add_ballast(tmp_path / "target", tmp_path / "wide", hidden=64, layers=8)
    facts = loaded(tmp_path / "large", tmp_path / "wide").facts
    small = loaded(head, tmp_path / "target").facts
    assert facts.hidden == 64
    assert facts.weight_bytes > 2.5 * small.weight_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eagle_config": None}, "does not name the layers"),
        ({"model_type": "qwen3"}, "family llama, not qwen3"),
        ({"target_hidden_size": 48}, "as wide as their target"),
        ({"attention_bias": True}, "no biases"),
    ],
)
def test_heads_that_cannot_be_copied_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    head = written(Oracle(), tmp_path / "head", FLAT)
    changed(head, **changes)
    with pytest.raises(UserError, match=message):
        add_head_ballast(head, tmp_path / "large", hidden=64)
    with pytest.raises(UserError, match="has one layer"):
        run_ballast(parse("ballast", str(head), str(tmp_path / "large"), "--layers", "3"))
