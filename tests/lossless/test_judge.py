"""The judge of first differences: a float64 decoder of its own, and the gap between two tokens' scores."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ssd_serve.base.errors import CheckpointError
from ssd_serve.bench.lossless.judge import Float64Decoder, Judge, compared
from ssd_serve.bench.lossless.proof import requests
from ssd_serve.bench.lossless.random_pair import RANDOM_PAIRS, write_random_pair
from ssd_serve.bench.lossless.rig import Case, LoadedPair, Outputs, run_case
from ssd_serve.kernels.batch import RequestRows, build_batch
from tests.models import checkpoints
from tests.models.fp8_checkpoints import FORMS, write


@pytest.fixture(params=RANDOM_PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedPair:
    name: str = request.param
    return LoadedPair(name, *write_random_pair(name, tmp_path))


def test_float64_judge_equals_the_decoder(pair: LoadedPair) -> None:
    tokens = [(7 * place + 3) % pair.vocabulary for place in range(40)]
    rows = RequestRows(tokens, range(40), range(40), np.zeros(0, dtype=np.int32), [39])
    engines = pair.target.forward(build_batch([rows])).logits[0].double()
    judges = Float64Decoder(pair.folder).last_logits(tokens)
    assert judges.dtype == torch.float64
    assert torch.allclose(engines, judges, atol=1e-4)


def test_wrong_token_is_not_a_near_tie(pair: LoadedPair) -> None:
    submits = requests(pair.vocabulary, 10)[:8]
    plain = run_case(pair, Case("ar", 1), submits)
    judge = Judge(pair)
    assert judge.differences(submits, plain, plain) == []
    wrong = {
        number: (*tokens[:4], (tokens[4] + 1) % pair.vocabulary, *tokens[5:])
        for number, tokens in plain.tokens.items()
    }
    differences = judge.differences(submits, plain, Outputs(wrong, 0, 0))
    assert [(each.request, each.index) for each in differences] == [(number, 4) for number in range(8)]
    assert not any(each.near_tie for each in differences)
    assert compared(submits, plain, differences) == 5 * 8


def test_early_end_is_not_a_near_tie(pair: LoadedPair) -> None:
    submits = requests(pair.vocabulary, 6)[:1]
    plain = run_case(pair, Case("ar", 1), submits)
    short = Outputs({0: plain.tokens[0][:-1]}, 0, 0)
    (difference,) = Judge(pair).differences(submits, plain, short)
    assert not difference.near_tie


def test_float64_decoder_refuses_fp8_weights(tmp_path: Path) -> None:
    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    checkpoints.save(checkpoints.make("llama-linear-biases"), wide)
    assert Float64Decoder(wide).last_logits([1, 2, 3]).shape == (199,)
    write(FORMS["quark-tensor-static"], narrow)
    with pytest.raises(
        CheckpointError, match=r"holds fp8 weights.* use a model that is not quantised"
    ) as error:
        Float64Decoder(narrow)
    assert "\n" not in str(error.value)
