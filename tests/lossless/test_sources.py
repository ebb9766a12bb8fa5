"""Losslessness of every draft source, alone and combined, in both modes that draft.

In mode sync the engine has memory to spare; in mode async so few KV slots that some requests are preempted.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ssd_serve.bench.lossless.rig import Case
from tests.adding_page import install
from tests.lossless.every_source import DRAFTS, EverySource


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EverySource]:
    folder = tmp_path_factory.mktemp("sources")
    with pytest.MonkeyPatch.context() as patch:
        install("A draft source", folder, patch)
        yield EverySource(folder)


ROOMY, SHORT = Case("sd", 4, 12), Case("ssd", 4, 12, slots=80)
INLINE = {"head", "pard2", "hydra", "dflash", "shared texts", "self and lookup"}
BESIDE = {
    "first head",
    "pard",
    "medusa",
    "gumiho",
    "peagle",
    "dspark",
    "ngram",
    "model and lookup",
    "head and lookup",
}


def names(quick: set[str]) -> list[object]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in DRAFTS]


@pytest.mark.parametrize("name", names(INLINE))
def test_sync_mode_is_lossless_for_every_draft_source(sources: EverySource, name: str) -> None:
    found = sources.check(name, ROOMY)
    assert found.accepted > 5
    assert found.cached > 0


@pytest.mark.parametrize("name", names(BESIDE))
def test_async_mode_is_lossless_under_memory_pressure(sources: EverySource, name: str) -> None:
    found = sources.check(name, SHORT)
    assert found.accepted > 0
    assert found.cached > 0
    assert found.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "model",
        "first head",
        "pard",
        "pard2",
        "medusa",
        "hydra",
        "gumiho",
        "peagle",
        "dflash",
        "dspark",
        "installed",
        "shared texts",
        "all",
    ],
)
def test_other_cases_and_killed_drafters_are_lossless(sources: EverySource, name: str) -> None:
    for case in (replace(ROOMY, slots=SHORT.slots), replace(SHORT, slots=ROOMY.slots)):
        assert sources.check(name, case).accepted > 0
    for drafter in ("killed", "garbage"):
        for case in (ROOMY, SHORT):
            assert sources.check(name, replace(case, mode="ssd", drafter=drafter)).drafted > 0
