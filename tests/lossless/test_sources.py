"""Losslessness of every kind of draft, alone and beside others, in both modes that draft: the plain text.

Each case runs requests of several parameters with prompts that begin alike, in an engine with so few KV slots
that some of them have to wait for others and begin again.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ssd_serve.bench.devices import Devices
from ssd_serve.bench.lossless.named import load_named
from ssd_serve.bench.lossless.rig import Case, LoadedTarget, Outputs, run_case
from ssd_serve.messages import SamplingParameters, Submit
from ssd_serve.seeds import mix
from ssd_serve.settings import Settings
from tests.adding_page import install
from tests.end_to_end.tiny_pair import write_head, write_pair

LAYERS = 3
PARAMETERS = (
    SamplingParameters(temperature=0.0, max_tokens=24),
    SamplingParameters(temperature=0.8, max_tokens=24, ignore_eos=True),
    SamplingParameters(temperature=0.8, top_p=0.9, max_tokens=22, allowed_token_ids=tuple(range(60, 70))),
    SamplingParameters(
        temperature=0.8,
        max_tokens=20,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        allowed_token_ids=tuple(range(65, 80)),
    ),
)
DRAFTS = {
    "model": "{draft}",
    "self": "self:2",
    "head": "{head}",
    "ngram": "ngram",
    "suffix": "suffix",
    "shared texts": "suffix",
    "installed": "prompt-lookup",
    "model and lookup": "{draft},ngram",
    "head and lookup": "{head},suffix",
    "self and lookup": "self:1,ngram",
    "all": "{draft},{head},self:1,prompt-lookup,ngram,suffix",
}
SLOW = ("suffix", "installed", "self and lookup", "all")


def requests() -> list[Submit]:
    """Each set of parameters with two prompts that begin alike, and some of them a second time."""
    alike = tuple(60 + mix(1, place) % 20 for place in range(20))
    prompts = [(*alike, *(60 + mix(text, place) % 20 for place in range(6 + text))) for text in range(2)]
    kinds = [(prompt, each) for prompt in prompts for each in PARAMETERS]
    return [
        Submit(number, prompt, each, 7 + number % len(kinds))
        for number, (prompt, each) in enumerate([*kinds, *kinds[1:5]])
    ]


class Sources:
    """A random target, its plain texts, and whatever can draft for it, loaded when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._target, self._draft = write_pair(folder, layers=LAYERS)
        self._head = write_head(folder / "head", self._target, range(60, 80))
        self._loaded: dict[str, LoadedTarget] = {}
        self.requests = requests()
        self.plain = run_case(self.of("ngram"), Case("ar", 1), self.requests)

    def of(self, name: str) -> LoadedTarget:
        """The target with these drafts."""
        if name not in self._loaded:
            settings = Settings(
                target=str(self._target),
                draft=DRAFTS[name].format(draft=self._draft, head=self._head),
                dtype="fp32",
                eagle_layers="0,1,2",
                suffix_shared=4096 if name == "shared texts" else 0,
            )
            self._loaded[name] = load_named(settings, Devices(), None)
        return self._loaded[name]

    def check(self, name: str, case: Case) -> Outputs:
        """The case gives the plain texts."""
        found = run_case(self.of(name), case, self.requests)
        assert found.tokens == self.plain.tokens
        return found


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sources]:
    folder = tmp_path_factory.mktemp("sources")
    install("A draft source", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield Sources(folder)


ROOMY, SHORT = Case("sd", 4, 12), Case("ssd", 4, 12, slots=100)
QUICK = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in DRAFTS]


@pytest.mark.parametrize("name", QUICK)
def test_inline_it_gives_the_plain_text(sources: Sources, name: str) -> None:
    found = sources.check(name, ROOMY)
    assert found.accepted > 5
    assert found.cached > 0


@pytest.mark.parametrize("name", QUICK)
def test_beside_a_target_that_is_short_of_memory_it_gives_the_plain_text(sources: Sources, name: str) -> None:
    found = sources.check(name, SHORT)
    assert found.accepted > 0
    assert found.cached > 0
    assert found.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTS)
def test_so_it_does_the_other_way_round_and_when_it_dies_or_talks_nonsense(
    sources: Sources, name: str
) -> None:
    for case in (replace(ROOMY, slots=SHORT.slots), replace(SHORT, slots=ROOMY.slots)):
        assert sources.check(name, case).accepted > 0
    for drafter in ("killed", "garbage"):
        for case in (ROOMY, SHORT):
            assert sources.check(name, replace(case, mode="ssd", drafter=drafter)).drafted > 0
