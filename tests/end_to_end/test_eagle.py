"""EAGLE heads as drafts of a real target, in modes sd and ssd."""

from pathlib import Path
from typing import Any

import pytest

from ssd_serve import LLM, SamplingParams
from ssd_serve.base.engine_config import EMBEDDED
from ssd_serve.base.errors import CheckpointError
from ssd_serve.models.hub import resolve_model
from tests.end_to_end.tiny_pair import write_first_head, write_head

SETTINGS: dict[str, Any] = {
    "dtype": "fp32",
    "native_kernels": False,
    "kv_memory_mb": 32,
    "draft_kv_memory_mb": 16,
    "speculation_may_stop": False,
}
PROMPTS = ["def read_lines(path):\n", "import os\n", "class Node:\n    def __init__(self"]
PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=32, ignore_eos=True)
_TRIES = 20
"""On busy cores a drafter can be late for all rounds of a short text."""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random EAGLE-3 one, which reads the target's embedding and proposes every fourth token."""
    target = resolve_model(EMBEDDED, "target")
    return write_head(tmp_path_factory.mktemp("heads") / "head", target, range(0, 4096, 4))


@pytest.fixture(scope="module")
def first_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_first_head(tmp_path_factory.mktemp("heads") / "first", resolve_model(EMBEDDED, "target"))


@pytest.fixture(scope="module")
def expected(cache_dir: Path) -> list[tuple[int, ...]]:
    with LLM(mode="ar", cache_dir=cache_dir, **SETTINGS) as plain:
        return [tuple(each.token_ids) for each in plain.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize(("kind", "layers"), [("head", "0,2,4"), ("first_head", None)])
def test_eagle_head_drafts_and_texts_equal_plain_decoding(
    kind: str,
    layers: str | None,
    mode: str,
    expected: list[tuple[int, ...]],
    cache_dir: Path,
    request: pytest.FixtureRequest,
) -> None:
    folder = request.getfixturevalue(kind)
    drafts = f"{folder},ngram" if mode == "sd" else str(folder)
    with LLM(draft=drafts, eagle_layers=layers, mode=mode, cache_dir=cache_dir, **SETTINGS) as llm:
        for _ in range(_TRIES):
            found = llm.generate(PROMPTS, PARAMS)
            assert [tuple(each.token_ids) for each in found] == expected
            if sum(each.figures.drafted for each in found):
                return
    pytest.fail("nothing was drafted")


def test_embedded_head_drafts_are_accepted(expected: list[tuple[int, ...]], cache_dir: Path) -> None:
    # A chain, because on some processors the step of this head costs more than its tokens are worth.
    with LLM(
        draft="embedded-head", mode="sd", num_speculative_tokens=3, cache_dir=cache_dir, **SETTINGS
    ) as llm:
        found = llm.generate(PROMPTS, PARAMS)
    assert [tuple(each.token_ids) for each in found] == expected
    assert sum(each.figures.accepted for each in found) > 16


@pytest.mark.parametrize(
    ("layers", "message"),
    [(None, "of a target of 5 .*name them with SSD_EAGLE_LAYERS"), ("0,2,5", "the target has 5")],
)
def test_eagle_layers_outside_the_target_are_refused(head: Path, layers: str | None, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        LLM(draft=str(head), eagle_layers=layers, mode="sd", **SETTINGS)
