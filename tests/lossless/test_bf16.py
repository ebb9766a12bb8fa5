"""bf16: where a row does not depend on its batch, every mode and batch gives the plain output."""

import pytest

from ssd_serve.base.engine_config import EMBEDDED
from ssd_serve.bench.lossless.proof import requests
from ssd_serve.bench.lossless.rig import Case, LoadedPair, run_case
from ssd_serve.kernels.native.library import NativeLibrary
from ssd_serve.kernels.native.products import has_bf16_products
from ssd_serve.models.hub import resolve_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(native: NativeLibrary) -> LoadedPair:
    """The embedded pair with the compiled kernels."""
    if not has_bf16_products(native):
        pytest.skip("this processor has neither AVX-512 BF16 nor AVX2: its bf16 products are torch's")
    folders = resolve_model(EMBEDDED, "target"), resolve_model(EMBEDDED, "draft")
    return LoadedPair(EMBEDDED, *folders, "bf16", native)


def test_bf16_native_kernels_are_lossless(pair: LoadedPair) -> None:
    check(pair, Case("ssd", 1, 8), Case("ssd", 4, 32), Case("sd", 16, 8), Case("ar", 16))


@pytest.fixture(scope="module")
def invariant_pair() -> LoadedPair:
    """The embedded pair with torch's kernels, which depend on the batch unless they are kept from it."""
    folders = resolve_model(EMBEDDED, "target"), resolve_model(EMBEDDED, "draft")
    return LoadedPair(EMBEDDED, *folders, "bf16", None, batch_invariant=True)


def test_bf16_batch_invariant_target_is_lossless(invariant_pair: LoadedPair) -> None:
    assert not invariant_pair.draft.facts.batch_invariant
    check(invariant_pair, Case("ssd", 4, 32), Case("ar", 16))


def check(pair: LoadedPair, *cases: Case) -> None:
    """The cases give the texts of plain decoding, one request at a time."""
    submits = requests(pair.vocabulary, 24)
    plain = run_case(pair, Case("ar", 1), submits)
    for case in cases:
        found = run_case(pair, case, submits)
        assert found.tokens == plain.tokens, case
        assert case.mode == "ar" or found.accepted > 0, case
