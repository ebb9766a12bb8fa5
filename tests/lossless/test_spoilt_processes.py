"""A real drafter process whose head computes nonsense, hears nothing or reads something else: the plain text.

The head is spoilt in a source of an installed package, which reads the layers that the settings name.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from ssd_serve import LLM, SamplingParams
from tests.end_to_end.tiny_pair import write_head, write_pair

pytestmark = pytest.mark.slow

PROMPTS = ["one two one two", "abcabcabc", "x"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.8, repetition_penalty=1.2, seed=4, max_tokens=32, ignore_eos=True),
]
PACKAGE = '''
"""An EAGLE-3 head, spoilt in a way that its name tells."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ssd_serve.drafter.sources.contract import Candidates
from ssd_serve.drafter.sources.eagle import EagleSource
from ssd_serve.drafter.sources.eagle import load_eagle
from ssd_serve.models.heads.eagle import OWN, EagleHead

run, read, expand = EagleHead.run, EagleSource.read, EagleSource.expand


def no_numbers(head, inputs):
    logits, features = run(head, inputs)
    return logits * torch.nan, {OWN: features[OWN] * torch.nan}


def anything(head, inputs):
    logits, features = run(head, inputs)
    return 9 * torch.randn_like(logits), {OWN: torch.randn_like(features[OWN])}


def deaf(source, request, position, features):
    pass


def elsewhere(source, request, position, features):
    read(source, request, position, 1e3 * torch.randn(features.shape))


def of_any_width(source, picks, scales):
    found = []
    for each in expand(source, picks, scales):
        if each is not None:
            tokens = np.random.randint(0, 257, np.random.randint(0, 60), dtype=np.int32)
            values = np.random.choice([-1.0, 0.0, 3.0, -90.0, np.inf, np.nan], len(tokens)).astype(np.float32)
            each = Candidates(tokens, values, values, 0.0)
        found.append(each)
    return found


def load(order):
    name = order.settings.draft
    if name in ("no_numbers", "anything"):
        EagleHead.run = globals()[name]
    elif name in ("deaf", "elsewhere"):
        EagleSource.read = globals()[name]
    loaded = load_eagle(replace(order, folder=Path(__file__).parent / "head"))
    if name == "of_any_width":
        EagleSource.expand = of_any_width
    return loaded
'''
DRAFTING = {"no_numbers": False, "anything": True, "deaf": False, "elsewhere": True, "of_any_width": True}
"""Whether any guesses come."""
MOST_TIMES = 20
"""A busy machine may be over with the texts before any guess comes."""


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a target, and of the package with its head."""
    folder = tmp_path_factory.mktemp("spoilt")
    target, _ = write_pair(folder / "pair", layers=3)
    write_head(folder / "head", target, range(60, 80))
    (folder / "spoilt_head.py").write_text(PACKAGE, encoding="utf-8")
    described = folder / "spoilt_head-1.0.dist-info"
    described.mkdir()
    lines = "\n".join(f"{name} = spoilt_head:load" for name in DRAFTING)
    (described / "METADATA").write_text("Metadata-Version: 2.4\nName: spoilt-head\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[ssd_serve.draft_sources]\n{lines}\n")
    return folder


@pytest.fixture(scope="module")
def settings(spoilt: Path) -> dict[str, Any]:
    return {
        "target": spoilt / "pair" / "target",
        "dtype": "fp32",
        "native_kernels": False,
        "kv_memory_mb": 16,
        "draft_kv_memory_mb": 16,
        "context": 128,
        "speculation_may_stop": False,
        "eagle_layers": "0,1,2",
        "cache_dir": spoilt / "cache",
    }


@pytest.fixture(scope="module")
def plain(settings: dict[str, Any]) -> list[tuple[int, ...]]:
    with LLM(**settings, mode="ar") as llm:
        return [tuple(each.token_ids) for each in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("name", DRAFTING)
def test_faulty_drafter_process_is_lossless(
    settings: dict[str, Any],
    spoilt: Path,
    plain: list[tuple[int, ...]],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(spoilt))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(spoilt), os.environ.get("PYTHONPATH", "")]))
    guessed = 0
    with LLM(**settings, draft=name, mode="ssd") as llm:
        for _ in range(MOST_TIMES if DRAFTING[name] else 2):
            found = llm.generate(PROMPTS, PARAMS)
            assert [tuple(each.token_ids) for each in found] == plain
            guessed += sum(each.figures.drafted + each.figures.ready_nodes for each in found)
            if guessed:
                break
    assert (guessed > 0) == DRAFTING[name]
