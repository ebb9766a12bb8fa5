"""Sampled functions: which count as whole, what became of the others, and that sampling is exact."""

import ast
import inspect
import textwrap
from collections.abc import Iterator

import pytest
import torch

from ssd_serve.recipes import corpus
from ssd_serve.recipes.checkpoint import write_decoder
from ssd_serve.recipes.decoder import Decoder, Shape, initialise
from ssd_serve.recipes.functions import (
    Counts,
    FunctionSampler,
    choose,
    counted,
    cut_function,
    is_hopeless,
)
from ssd_serve.recipes.tokenizer import save_tokenizer, train_tokenizer


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("def f():\n    return 1\n\nx = 2\n", "def f():\n    return 1"),
        ("def f(\n):\n    return '''\na\n'''\n\n\nclass A:\n", "def f(\n):\n    return '''\na\n'''"),
        ("def f():\n    return (1\n\nx = 2\n", None),
        ("def f():\n    return 1\n", None),
        ("def f(self):\n        return 1\n\n    def g(self):\n", "def f(self):\n        return 1"),
        ("def f(self):\n        return (1\n\n    def g(self):\n", None),
        ("def f(): return 1\nx = 2\n", "def f(): return 1"),
        ("def f(self): return 1\n\n    def g(self):\n", "def f(self): return 1"),
        ("def f(self): return (1,\n 2)\n    def g(self):\n", "def f(self): return (1,\n 2)"),
        (
            "def f(self):  # why\n        return 1\n\n    def g(self):\n",
            "def f(self):  # why\n        return 1",
        ),
        (
            "def f():\n    x = 1\n# more:\n    return x\n\ny = (\n",
            "def f():\n    x = 1\n# more:\n    return x",
        ),
        ("def f():\n    x = 1\n# more:\n    return x)\n\ny = 2\n", None),
        ("def f():\n        # far\n    x = 1\n    y = (\n\nz = 1\n", None),
        ("def f():\n    # nothing else\n\nx = 1\n", None),
        ("def f():\n\nx = 1\n", None),
        ("def \u00a7():\n    return 1\nx = 1\n", None),
    ],
)
def test_a_function_ends_where_its_body_does(text: str, function: str | None) -> None:
    assert cut_function(text) == function


def test_what_became_of_samples() -> None:
    endings = [
        "f():\n    pass\nx\n",
        "f():\n    pass\ny\n",  # the same function
        "g():\n    '''text'''\n    ...\nx\n",
        "h(a):\n" + "    a.b()\n" * 5 + "x\n",
        "h(a):\n    return a)\n",
        "h(a):\n" + "    a.b()\n" * 5,
        "_a_a_a_a",
    ]
    prompts = ["def "] * len(endings)
    texts = [prompt + ending for prompt, ending in zip(prompts, endings, strict=True)]
    assert counted(prompts, texts) == Counts(
        samples=7, parsed=4, broken=1, unfinished=2, empty=3, repetitive=1, distinct=3, median_lines=2.5
    )
    assert counted([], []).median_lines == 0.0


def test_beginnings_of_functions_are_never_hopeless() -> None:
    functions = [
        textwrap.dedent(inspect.getsource(value))
        for value in vars(corpus).values()
        if inspect.isfunction(value)
    ]
    assert len(functions) > 5
    for function in functions:
        assert not [end for end in range(len(function)) if is_hopeless(function[:end])]
        assert cut_function(function + "x\n") == function.rstrip()
        ast.parse(function)


@pytest.mark.parametrize(
    "text", ["def f(:\n", "def f():\n    x = 'a\n", "def f():\n    return)\n", "def f\n"]
)
def test_a_syntax_error_is_hopeless(text: str) -> None:
    assert is_hopeless(text)
    assert not is_hopeless(text.rstrip())  # the line may go on


def test_an_argument_named_twice_parses() -> None:
    assert not is_hopeless("def f(a, a):\n    return a\n")


def test_choices_follow_the_softmax_of_the_likeliest() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf])
    rows = torch.arange(0, 20_000, 2)
    for temperature, top_p, kept in ((0.5, 0.95, 2), (1.0, 0.95, 3), (1.0, 0.9, 2)):  # 0.984 and 0.91 in two
        generator = torch.Generator().manual_seed(0)
        chosen = choose(logits.expand(len(rows), 4), temperature, top_p, rows, 20_000, generator)
        shares = torch.bincount(chosen, minlength=4) / len(rows)
        wanted = (logits / temperature).masked_fill(torch.arange(4) < 3 - kept, -torch.inf)
        assert torch.allclose(shares, wanted.softmax(-1), atol=0.02)
        assert bool((shares[: 3 - kept] == 0).all())


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FunctionSampler]:
    """A random tiny checkpoint."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("target")
    tokenizer = train_tokenizer(["def function(a):\n    return a\n" * 9], 300)
    decoder = Decoder(Shape(tokenizer.get_vocab_size(), 32, 2, 4, 2, 8, 48, 256))
    initialise(decoder, 0)
    torch.nn.init.normal_(decoder.get_parameter("lm_head.weight"), generator=torch.Generator().manual_seed(1))
    write_decoder(decoder.eval(), folder)
    save_tokenizer(tokenizer, folder, 256)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield FunctionSampler(folder)
    torch.set_num_threads(threads)


def test_sampling_is_greedy_where_the_temperature_is_tiny(sampler: FunctionSampler) -> None:
    prompts = ["def f", "def", "def function(a):\n    return"]
    for prompt, text in zip(prompts, sampler.continued(prompts, 1e-6, 0.95, 0, new_tokens=7), strict=True):
        ids = sampler.tokenizer(prompt, return_tensors="pt").input_ids
        length = ids.shape[1]
        for _ in range(7):
            with torch.no_grad():
                ids = torch.cat([ids, sampler.model(ids).logits[:, -1:].argmax(-1)], dim=-1)
        assert text == sampler.text(prompt, ids[0, length:].tolist())


def test_samples_repeat_and_decided_ones_stop(sampler: FunctionSampler) -> None:
    prompts = ["def f(:\n", "def f(a):\n    return a\n\nx", 'def f(a):\n    """']
    texts = sampler.continued(prompts, 1.0, 0.95, 3, new_tokens=64)
    assert texts == sampler.continued(prompts, 1.0, 0.95, 3, new_tokens=64)
    lengths = [
        len(sampler.tokenizer(text[len(prompt) :], add_special_tokens=False).input_ids)
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    assert max(lengths[:2]) < 32 < lengths[2]
    counts = counted(prompts, texts)
    assert (counts.parsed, counts.broken, counts.unfinished) == (1, 1, 1)
