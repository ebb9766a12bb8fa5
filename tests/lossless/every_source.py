"""A random target, every kind of draft for it, and requests of several parameters that share prefixes."""

from collections.abc import Callable
from pathlib import Path

from ssd_serve.base.messages import SamplingParameters, Submit
from ssd_serve.base.seeds import mix
from ssd_serve.base.settings import Settings
from ssd_serve.bench.lossless.drafters import MemoryDrafter, RigDraft
from ssd_serve.bench.lossless.rig import Case, LoadedTarget, Outputs, load_named, run_case
from ssd_serve.bench.options import Devices
from ssd_serve.verifier.engine import Engine
from tests.end_to_end.tiny_pair import (
    write_dflash,
    write_first_head,
    write_gumiho,
    write_head,
    write_hydra,
    write_medusa,
    write_pair,
    write_pard,
    write_peagle,
)

MakeDrafter = Callable[[RigDraft, Engine], MemoryDrafter]
LAYERS = 3
PARAMETERS = (
    SamplingParameters(temperature=0.0, max_tokens=18),
    SamplingParameters(temperature=0.8, max_tokens=18, ignore_eos=True),
    SamplingParameters(temperature=0.8, top_p=0.9, max_tokens=16, allowed_token_ids=tuple(range(60, 70))),
    SamplingParameters(
        temperature=0.8,
        max_tokens=14,
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
    "first head": "{first}",
    "pard": "{pard}",
    "pard2": "{pard2}",
    "medusa": "{medusa}",
    "hydra": "{hydra}",
    "gumiho": "{gumiho}",
    "peagle": "{peagle}",
    "dflash": "{dflash}",
    "dspark": "{dspark}",
    "ngram": "ngram",
    "suffix": "suffix",
    "shared texts": "suffix",
    "installed": "prompt-lookup",
    "model and lookup": "{draft},ngram",
    "head and lookup": "{head},suffix",
    "self and lookup": "self:1,ngram",
    "both heads": "{head},{first}",
    "all": "{draft},{head},{first},{pard},{pard2},{medusa},{hydra},{gumiho},{peagle},{dflash},{dspark},self:1,"
    "prompt-lookup,ngram,suffix",
}


def requests() -> list[Submit]:
    """Each set of parameters with two prompts that share a prefix, and some of them twice."""
    alike = tuple(60 + mix(1, place) % 20 for place in range(20))
    prompts = [(*alike, *(60 + mix(text, place) % 20 for place in range(6 + text))) for text in range(2)]
    kinds = [(prompt, each) for prompt in prompts for each in PARAMETERS]
    return [
        Submit(number, prompt, each, 7 + number % len(kinds))
        for number, (prompt, each) in enumerate([*kinds, *kinds[1:5]])
    ]


class EverySource:
    """A random target, its plain outputs, and all its drafts, loaded on demand."""

    def __init__(self, folder: Path) -> None:
        self._target, draft = write_pair(folder, layers=LAYERS)
        self._drafts = {
            "draft": draft,
            "head": write_head(folder / "head", self._target, range(60, 80)),
            "first": write_first_head(folder / "first", self._target),
            "pard": write_pard(folder / "pard", draft),
            "pard2": write_pard(folder / "pard2", draft, outputs=2),
            "medusa": write_medusa(folder / "medusa", self._target),
            "hydra": write_hydra(folder / "hydra", self._target),
            "gumiho": write_gumiho(folder / "gumiho", self._target),
            "peagle": write_peagle(folder / "peagle", self._target),
            "dflash": write_dflash(folder / "dflash", self._target),
            "dspark": write_dflash(folder / "dspark", self._target, dspark=True),
        }
        self._loaded: dict[str, LoadedTarget] = {}
        self.requests = requests()
        self.plain = run_case(self.of("ngram"), Case("ar", 1), self.requests)

    def of(self, name: str) -> LoadedTarget:
        if name not in self._loaded:
            settings = Settings(
                target=str(self._target),
                draft=DRAFTS[name].format(**self._drafts),
                dtype="fp32",
                eagle_layers="0,1,2",
                suffix_shared=4096 if name == "shared texts" else 0,
            )
            self._loaded[name] = load_named(settings, Devices(), None)
        return self._loaded[name]

    def check(
        self, name: str, case: Case, make_drafter: MakeDrafter = MemoryDrafter, count: int = 100
    ) -> Outputs:
        """Assert that the case gives the plain outputs of the first `count` requests. `make_drafter`
        makes remote ones."""
        found = run_case(self.of(name), case, self.requests[:count], make_drafter)
        assert found.tokens == {number: self.plain.tokens[number] for number in found.tokens}
        return found
