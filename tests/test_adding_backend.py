"""Following docs/adding.md gives a tree attention that is right, and that can be asked for by its name."""

from pathlib import Path

import pytest

from tests.adding_clone import Clone

pytestmark = pytest.mark.slow

NAME = "masked"
RIGHT = """
import torch
from ssd_serve.kernels.attention.masked import MaskedAttention
from ssd_serve.kernels.attention.self_test import first_failure, self_test


class Inflated(MaskedAttention):
    def run(self, layer, queries, plan):
        return super().run(layer, queries, plan) / 1.01


print([str(each) for each in self_test(MaskedAttention, torch.float32, 16, "cpu") if each.right])
print(first_failure(Inflated, torch.float32, 16, "cpu", ((4, 4),)))
"""
CHOSEN = """
from pathlib import Path
import torch
from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention.backends import AttentionOptions, attention_for, candidates
from ssd_serve.base.attention_backends import names
from ssd_serve.base.settings import Settings

cache = KVCache(KVLayout((LayerKV(2, 16), LayerKV(2, 16, 9)), torch.float32), 16, "cpu")
asked = Settings(tree_decode_backend="masked").tree_decode_backend
found = attention_for(AttentionOptions(asked, Path("unused")), cache, 4, None)
print(found.name, type(found.backend).__name__, asked in names())
told = Settings.model_fields["tree_decode_backend"].description or ""
print(asked in told, attention_for(AttentionOptions(folder=Path("unused")), cache, 4, None).name)
"""
SERVES = """
from ssd_serve import LLM, SamplingParams

texts = []
for backend in ("sdpa", "masked"):
    asked = {"tree_decode_backend": backend, "native_kernels": False, "dtype": "fp32", "context": 256}
    with LLM(**asked, kv_memory_mb=16, cache_dir=FOLDER) as llm:
        texts.append(llm.generate("def f(x):\\n", SamplingParams(seed=3, max_tokens=12))[0].token_ids)
print(texts[0] == texts[1])
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return Clone("An attention backend", tmp_path_factory.mktemp("clone"))


def test_it_passes_the_self_test_which_compares_it_with_the_reference(clone: Clone) -> None:
    right, wrong = clone.run("-c", RIGHT).splitlines()
    assert all(f"{ratio} heads of 16 in float32: off by" in right for ratio in ("4/4", "16/4", "32/4"))
    assert "4/4 heads of 16 in float32: off by 0.0" in wrong


def test_it_can_be_asked_for_by_its_name_everywhere(clone: Clone) -> None:
    """Under `auto` what stands before it in the table is taken."""
    assert clone.run("-c", CHOSEN).split() == [NAME, "MaskedAttention", "True", "True", "sdpa"]


def test_the_tests_of_the_table_know_it(clone: Clone) -> None:
    said = clone.run(
        "-m", "pytest", "-q", "tests/kernels/test_registry.py", "-k", f"{NAME} or candidate or auto"
    )
    assert "5 passed" in said


def test_a_model_speculates_with_it(clone: Clone, tmp_path: Path) -> None:
    assert clone.run("-c", f"FOLDER = {str(tmp_path)!r}\n{SERVES}").split()[-1] == "True"
