"""One run of `ssd bench peers`, or a slice of one: the pair, the prompts and the journal in one folder.

Knows files, not what is measured.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ssd_serve.base.devices import Device
from ssd_serve.base.engine_settings import EMBEDDED, Mode
from ssd_serve.base.settings import Settings
from ssd_serve.bench.journal import Journal, TimeGiven, work_folder
from ssd_serve.bench.peers.builds import peer_builds
from ssd_serve.bench.peers.client import Ask, Sample
from ssd_serve.bench.peers.comparison import measure, told
from ssd_serve.bench.peers.engines import launched
from ssd_serve.bench.peers.fleet import Fleet
from ssd_serve.bench.peers.gguf_file import write_gguf
from ssd_serve.bench.peers.result import Plan
from ssd_serve.bench.peers.session import Session
from ssd_serve.bench.peers.ways import BF16, Q8_0, Pair, Peers, Place, gguf_of
from ssd_serve.bench.rig import use_cores
from ssd_serve.bench.workload import ballast_pair, choose_prompts
from ssd_serve.models.hub import Role, resolve_model
from ssd_serve.models.text.tokenizer import Tokenizer

_ROLES: tuple[Role, ...] = ("target", "draft")


def run_peers(
    plan: Plan,
    peers: Peers,
    cores: tuple[int, ...],
    say: Callable[[str], None],
    *,
    code: str,
    work: Path | None = None,
    minutes: float | None = None,
    at_once: int = 12,
) -> dict[str, object]:
    """Everything, or what there is time for; the result names each failure, and each peer that is not there.

    `code` names what is measured: answers in `work` of another one are refused.
    """
    use_cores(str(Device("cpu", cores)))
    with work_folder(work) as folder:
        journal = Journal(folder / "answers.jsonl", f"{code} {_embedded()}", Sample)
        if journal.earlier:
            say(f"{journal.earlier} answers are known from before")
        pair = write_pair(folder, say)
        place = Place(peers, pair, cores, folder)
        say("choosing prompts")
        chosen = choose_prompts(
            Settings(mode=Mode.AR, target=str(pair.target), draft=str(pair.draft)),
            plan.temperatures,
            plan.prompts,
            say,
            tuning=plan.tuning_prompts,
            tokens=plan.tokens,
        )
        warm_ups = {
            when: Ask(some.tuning[0].tokens, plan.tokens, when, some.tuning[0].seed)
            for when, some in chosen.items()
        }
        words = Tokenizer(resolve_model(EMBEDDED, "target")).encode
        fleet = Fleet.of(partial(launched, place=place), at_once)
        session = Session(fleet, journal, words, warm_ups, say, TimeGiven(minutes))
        found = measure(session, plan, peers, chosen)
        return {**told(session, plan, peers, found), "builds": peer_builds(place)}


def write_pair(folder: Path, say: Callable[[str], None]) -> Pair:
    """The embedded pair with ballast, for everybody: as Hugging Face folders and as GGUF files, which are
    written once."""
    pair = Pair(*(folder / role for role in _ROLES))
    files = [(each, gguf_of(each, kind), kind) for each in (pair.target, pair.draft) for kind in (BF16, Q8_0)]
    if not files[-1][1].exists():
        say("writing the checkpoint")
        ballast_pair(folder)
        for checkpoint, file, kind in files:
            unfinished = file.with_suffix(".part")
            write_gguf(checkpoint, unfinished, kind)
            unfinished.rename(file)
    return pair


def _embedded() -> str:
    """A name for the embedded pair's weights."""
    found = hashlib.sha256()
    for role in _ROLES:
        for file in sorted(resolve_model(EMBEDDED, role).glob("*.safetensors")):
            found.update(file.read_bytes())
    return found.hexdigest()[:16]
