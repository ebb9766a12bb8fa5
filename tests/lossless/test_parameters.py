"""Every two kinds of sampling restriction meet under speculation, and the text is the plain one."""

from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from ssd_serve.base.messages import SamplingParameters, Submit
from ssd_serve.bench.lossless.judge import Judge
from ssd_serve.bench.lossless.random_pair import write_random_pair
from ssd_serve.bench.lossless.rig import Case, LoadedPair, run_case
from tests.lossless.covering import parameter_design

MAX_TOKENS = 40
ALLOWED = tuple(range(1, 60))
STOPS = tuple(range(5, 199, 41))


def submits(parameters: list[SamplingParameters]) -> list[Submit]:
    return [Submit(number, (7, 8, 9 + number), each, number) for number, each in enumerate(parameters)]


def contains(tokens: tuple[int, ...], word: tuple[int, ...]) -> bool:
    return any(tokens[start : start + len(word)] == word for start in range(len(tokens)))


@pytest.mark.slow
def test_restrictions_are_lossless_and_respected(tmp_path: Path) -> None:
    pair = LoadedPair("random-llama", *write_random_pair("random-llama", tmp_path))
    free = [replace(each, bad_words=()) for each in parameter_design([(1, 2)], ALLOWED, STOPS, MAX_TOKENS)]
    unbanned = run_case(pair, Case("ar", 4), submits(free)).tokens
    # Sequences of two and three tokens of these texts are banned next.
    words: list[tuple[int, ...]] = []
    for tokens in unbanned.values():
        words += [*list(pairwise(tokens))[4::11], *([tokens[8:11]] if len(tokens) > 10 else [])]
    requests = submits(parameter_design(words, ALLOWED, STOPS, MAX_TOKENS))
    plain = run_case(pair, Case("ar", 1), requests)
    for case in (Case("sd", 4, 8), Case("ssd", 1, 4)):
        found = run_case(pair, case, requests)
        assert found.accepted > 50
        assert all(each.near_tie for each in Judge(pair).differences(requests, plain, found))
        for submit in requests:
            tokens, parameters = found.tokens[submit.request], submit.parameters
            assert not any(contains(tokens, word) for word in parameters.bad_words)
            assert parameters.allowed_token_ids is None or {*tokens} <= {*ALLOWED}
    assert any(
        plain.tokens[each.request] != unbanned[each.request] for each in requests if each.parameters.bad_words
    )
