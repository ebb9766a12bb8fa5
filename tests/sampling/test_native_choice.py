"""The compiled choice against the torch one: the same tokens, alone and in any batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_parameters

from ssd_serve.base.messages import SamplingParameters
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.sampling.choice import Sampled, sample
from ssd_serve.sampling.native_choice import NativeChoice
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.processors import TokenCounts
from ssd_serve.sampling.rows import SamplingRows
from tests.examples import examples

VOCABULARY = 37
TOKENS = st.integers(0, VOCABULARY - 1)
PARAMETERS = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 36, 37, 50]),
    top_p=st.sampled_from([1.0, 0.97, 0.6, 0.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.25]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    logit_bias=st.just({}) | st.dictionaries(TOKENS, st.sampled_from([-100.0, 2.5]), max_size=3),
    min_tokens=st.sampled_from([0, 0, 3]),
    allowed_token_ids=st.none() | st.lists(TOKENS, min_size=1, max_size=9).map(tuple),
    bad_words=st.just(())
    | st.lists(st.lists(TOKENS, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
    logprobs=st.sampled_from([None, None, 0, 3]),
)


@st.composite
def requests(draw: st.DrawFn) -> SamplingRows:
    number = draw(st.integers(0, 5))
    parents = [draw(st.integers(-1, index - 1)) for index in range(number)]
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    prompt, output = draw(st.lists(TOKENS, max_size=5)), draw(st.lists(TOKENS, max_size=3))
    return SamplingRows(
        draw(PARAMETERS),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 5)),
        TokenCounts(prompt, output),
        draw(st.lists(TOKENS, max_size=2).map(tuple)),
        draw(st.integers(0, 4)),
        (0,),
        None,
        [draw(TOKENS) for _ in range(number)],
        parents,
        depths,
    )


def awkward_logits(rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    """Many ties, some masked and some that are not numbers."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-8, 8, (rows, vocabulary), generator=generator).float() / 2
    strange = torch.rand((rows, vocabulary), generator=generator)
    logits[strange < 0.04] = math.nan
    return torch.where(strange > 0.94, -torch.inf, logits)


@pytest.mark.slow
@given(st.lists(requests(), min_size=1, max_size=4), st.integers(0, 1000), st.integers(1, 9))
@settings(max_examples=examples(400))
def test_native_choice_equals_torch_alone_and_in_batches(
    native: NativeLibrary, trees: list[SamplingRows], seed: int, capacity: int
) -> None:
    logits = awkward_logits(sum(each.rows for each in trees), VOCABULARY, seed)
    noise, choice = NoiseRows(VOCABULARY, capacity, native=native), NativeChoice(native)
    expected = sample(logits, trees, noise)
    together = sample(logits, trees, noise, choice)
    assert repr(together) == repr(expected)
    alone = [row for each in trees for row in each.split()]
    for index, row in enumerate(alone):
        found = sample(logits[index : index + 1], [row], noise, choice)
        assert found.choices == [together.choices[index]]
        assert repr(found) == repr(Sampled(found.choices, [together.logprobs[index]]))


def chosen_path(tree: SamplingRows, choices: list[int]) -> list[int]:
    """Rows along the path of the choices, the first row included."""
    path = [0]
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent + 1 == path[-1] and choices[path[-1]] == token:
            path.append(node + 1)
    return path


@given(requests(), st.sets(st.integers(0, 4)), st.integers(0, 1000))
@settings(max_examples=examples(40), deadline=None)
def test_native_walk_equals_the_choices_along_the_path(
    native: NativeLibrary, tree: SamplingRows, right: set[int], seed: int
) -> None:
    logits, noise = awkward_logits(tree.rows, VOCABULARY, seed), NoiseRows(VOCABULARY, 64, native=native)
    choice, tokens = NativeChoice(native), list(tree.tokens)
    for node in sorted(right & set(range(len(tokens)))):  # its own token is what is chosen above it
        tree = tree._replace(tokens=list(tokens))
        tokens[node] = sample(logits, [tree], noise, choice).choices[1 + tree.parents[node]]
    tree = tree._replace(tokens=tokens)
    every = sample(torch.cat((logits, logits)), [tree, tree], noise, choice)
    walked = sample(torch.cat((logits, logits)), [tree, tree], noise, choice, walk=True)
    path = chosen_path(tree, every.choices)
    on_path = {*path, *(tree.rows + row for row in path)}
    assert walked.choices == [each if row in on_path else -1 for row, each in enumerate(every.choices)]
    logprobs = [each if row in on_path else None for row, each in enumerate(every.logprobs)]
    assert repr(walked) == repr(Sampled(walked.choices, logprobs))


REAL = [
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=0.8),
    SamplingParameters(temperature=1.0, top_k=50, top_p=0.9),
    SamplingParameters(temperature=0.7, top_k=1000),
    SamplingParameters(temperature=1.2, top_p=0.95),
    SamplingParameters(temperature=1.0, top_p=0.999, min_p=0.001),
    SamplingParameters(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1),
    SamplingParameters(temperature=0.0, repetition_penalty=1.1),
]


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 4096])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_native_choice_at_real_vocabulary_sizes(
    native: NativeLibrary, vocabulary: int, spread: float
) -> None:
    rng = np.random.default_rng(vocabulary)
    trees = [
        SamplingRows(
            with_parameters(parameters, logprobs=top),
            number,
            7 * number,
            TokenCounts(rng.integers(0, vocabulary, 300).tolist(), rng.integers(0, vocabulary, 50).tolist()),
            tokens=rng.integers(0, vocabulary, 4).tolist(),
            parents=[-1, 0, 1, 0],
            depths=[1, 2, 3, 2],
        )
        for number, parameters in enumerate(REAL)
        for top in (None, 5)
    ]
    logits = torch.from_numpy(rng.normal(0, spread, (5 * len(trees), vocabulary)).astype(np.float32))
    noise = NoiseRows(vocabulary, 256, native=native)
    before = logits.clone()
    assert sample(logits, trees, noise, NativeChoice(native)) == sample(logits, trees, noise)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_native_choice_of_rows_without_finite_logits(native: NativeLibrary, value: float) -> None:
    noise, choice = NoiseRows(64, 8, native=native), NativeChoice(native)
    logits = torch.full((1, 64), value)
    if value > 0:
        logits[0, :40] = 0.0
    for parameters in REAL:
        row = SamplingRows(parameters, 1, 2, TokenCounts([3]))
        found = sample(logits, [row], noise, choice).choices
        assert found == (sample(logits, [row], noise).choices if value > 0 else [0])


def test_penalties_without_token_counts_are_an_error(native: NativeLibrary) -> None:
    row = SamplingRows(SamplingParameters(presence_penalty=1.0), 1, 2)
    with pytest.raises(ValueError, match="counts"):
        sample(torch.zeros(1, 8), [row], NoiseRows(8, 8), NativeChoice(native))


def test_native_choice_is_independent_of_thread_count(native: NativeLibrary) -> None:
    trees = [SamplingRows(REAL[number % 8], number, 3, TokenCounts([1, 2], [2])) for number in range(24)]
    logits = torch.randn(24, 999, generator=torch.Generator().manual_seed(1))
    noise, choice = NoiseRows(999, 64, native=native), NativeChoice(native)
    expected = sample(logits, trees, noise, choice)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert sample(logits, trees, noise, choice) == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_native_nodes_at_one_position_share_noise(native: NativeLibrary, temperature: float) -> None:
    depths = [1] * 20 + [2] * 3
    tree = SamplingRows(
        SamplingParameters(temperature=temperature),
        3,
        11,
        tokens=[5] * 23,
        parents=[-1] * 20 + [4] * 3,
        depths=depths,
    )
    logits = torch.randn(24, 500, generator=torch.Generator().manual_seed(2))
    noise = NoiseRows(500, 64, native=native)
    expected = sample(logits, [tree], noise).choices
    assert sample(logits, [tree], noise, NativeChoice(native)).choices == expected
    assert len(set(expected[1:21])) > 1


@pytest.mark.parametrize("temperature", [1e-4, 0.8, 1e6])
@pytest.mark.parametrize("kind", ["flat", "equal", "steep", "huge", "one infinite", "masked"])
def test_native_choice_skips_no_possible_winner(native: NativeLibrary, temperature: float, kind: str) -> None:
    """The kernel computes logarithms only for words that could matter: 200 rows of each kind."""
    number, vocabulary = 200, 1003
    logits = torch.randn(number, vocabulary, generator=torch.Generator().manual_seed(9))
    if kind == "equal":
        logits = torch.zeros_like(logits)
    elif kind == "steep":
        logits *= 12
    elif kind == "huge":
        logits = (logits * 8).round() * 1e30
    elif kind == "one infinite":
        logits[:, 777] = torch.inf
    elif kind == "masked":
        logits[:, 3:] = -torch.inf
    parameters = SamplingParameters(temperature=temperature)
    trees = [SamplingRows(parameters, 2**63 + 5, position) for position in range(number)]
    noise = NoiseRows(vocabulary, number, native=native)
    expected = sample(logits, trees, noise).choices
    assert sample(logits, trees, noise, NativeChoice(native)).choices == expected
    if kind in ("flat", "equal"):
        assert len(set(expected)) > 1
