"""An EAGLE-3 head as the draft of a real target, in this process and in another; what does not fit."""

from pathlib import Path
from typing import Any

import pytest

from ssd_serve import LLM, SamplingParams
from ssd_serve.errors import CheckpointError
from ssd_serve.models.hub import resolve_model
from ssd_serve.settings import EMBEDDED
from tests.end_to_end.tiny_pair import write_head

SETTINGS: dict[str, Any] = {
    "dtype": "fp32",
    "native_kernels": False,
    "kv_memory_mb": 32,
    "draft_kv_memory_mb": 16,
    "speculation_may_stop": False,
}
PROMPTS = ["def read_lines(path):\n", "import os\n", "class Node:\n    def __init__(self"]
PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one, which reads the target's embedding and proposes every fourth token."""
    target = resolve_model(EMBEDDED, "target")
    return write_head(tmp_path_factory.mktemp("heads") / "head", target, range(0, 4096, 4))


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_it_drafts_and_the_texts_are_those_of_plain_decoding(head: Path, mode: str, tmp_path: Path) -> None:
    with LLM(mode="ar", cache_dir=tmp_path, **SETTINGS) as plain:
        expected = [each.token_ids for each in plain.generate(PROMPTS, PARAMS)]
    drafts = f"{head},ngram" if mode == "sd" else str(head)
    with LLM(draft=drafts, eagle_layers="0,2,4", mode=mode, cache_dir=tmp_path, **SETTINGS) as llm:
        found = llm.generate(PROMPTS, PARAMS)
    assert [each.token_ids for each in found] == expected
    assert sum(each.figures.drafted for each in found) > 0


@pytest.mark.parametrize(
    ("layers", "message"),
    [(None, "of a target of 5 .*name them with SSD_EAGLE_LAYERS"), ("0,2,5", "the target has 5")],
)
def test_layers_that_the_target_does_not_have(head: Path, layers: str | None, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        LLM(draft=str(head), eagle_layers=layers, mode="sd", **SETTINGS)
