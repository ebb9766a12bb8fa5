"""Which drafts are compared, and the command that starts each: servers of ours, and llama.cpp's.

All of them decode one request at a time on the same cores, and few of ours may stop drafting: what it gives
is what is measured. Pure: starts nothing.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ssd_serve.bench.emulated import emulating
from ssd_serve.bench.peers.ways import LLAMA, OURS, PLAIN, Place, Way, command, gguf_of
from ssd_serve.devices import Device

MODEL, HEAD, LAYERS, LOOKUP = "model", "head", "first layers", "lookup"
INLINE, BESIDE = "inline", "beside"
MAY_STOP = ", may stop"
"""A way as users get it: plain decoding where that is faster."""
_DRAFTS = (MODEL, HEAD, LAYERS)
_OWN_LAYERS = "self:2"
_LENGTHS = (1, 2, 4, 8)
_MATCHES, _LOOKED_UP = (2, 3), (4, 8)


@dataclass(frozen=True, slots=True)
class Drafts:
    """What drafts; `head` is None where there is none. `table`: of emulated devices."""

    model: Path
    head: Path | None = None
    table: str | None = None

    def named(self, what: str) -> str:
        """As `SSD_DRAFT` names it."""
        known = {MODEL: str(self.model), HEAD: str(self.head), LAYERS: _OWN_LAYERS, LOOKUP: "ngram"}
        return ",".join(known[each] for each in what.split(" and "))

    def there(self, what: str) -> bool:
        """Whether all of it is there."""
        return self.head is not None or HEAD not in what


def our_ways(drafts: Drafts) -> list[Way]:
    """Plain decoding; every draft inline, and beside the target; lookup alone and beside others."""
    modes = [PLAIN, *(f"{what} {where}" for what in _DRAFTS for where in (INLINE, BESIDE))]
    modes += [f"{what} {INLINE}" for what in (LOOKUP, f"{MODEL} and {LOOKUP}", f"{HEAD} and {LOOKUP}")]
    modes += [f"{what} {INLINE}{MAY_STOP}" for what in (LOOKUP, MODEL, f"{MODEL} and {LOOKUP}")]
    return [Way(OURS, mode) for mode in modes if drafts.there(mode)]


def llama_ways(drafts: Drafts, cores: int) -> dict[str, list[Way]]:
    """Shapes of llama.cpp's ways, by draft: the best of each is what is compared."""
    whole = Way(LLAMA, PLAIN, cores=cores)
    found = {PLAIN: [whole]}
    for what in (MODEL, HEAD):
        if drafts.there(what):
            found[what] = [replace(whole, mode=what, length=each, draft_cores=cores) for each in _LENGTHS]
    found[LOOKUP] = [
        replace(whole, mode=LOOKUP, length=each, match=match) for each in _LOOKED_UP for match in _MATCHES
    ]
    return found


def words(way: Way, place: Place, port: int, drafts: Drafts) -> list[str]:
    """The command that starts a way."""
    return _ours(way, place, port, drafts) if way.engine == OURS else _llama(way, place, port, drafts)


def _ours(way: Way, place: Place, port: int, drafts: Drafts) -> list[str]:
    way_mode = way.mode.removesuffix(MAY_STOP)
    what, _, where = way_mode.rpartition(" ")
    mode = {"": "ar", INLINE: "sd", BESIDE: "ssd"}[where if what else ""]
    asked = ["--draft", drafts.named(what) if what else "none", "--mode", mode]
    if mode == "ssd":
        asked += ["--target-device", str(Device("cpu", place.cores[:1]))]
        asked += ["--draft-device", str(Device("cpu", place.cores[1:]))]
    elif drafts.table is None:
        asked += ["--target-device", str(Device("cpu", place.cores))]
    if drafts.table is not None:
        asked += ["--model-wrapper", emulating(drafts.table)]
    fixed = ["--no-prefix-cache", "--max-running", "1", "--log-level", "warning"]
    fixed += ["--generation-config", "none", "--kv-memory-mb", "256"]
    fixed += ["--no-speculation-may-stop"] * (way_mode == way.mode)
    return [
        *(sys.executable, "-m", "ssd_serve", "serve", str(place.pair.target)),
        *("--port", str(port), *asked, *fixed),
    ]


def _llama(way: Way, place: Place, port: int, drafts: Drafts) -> list[str]:
    """As in the comparison of peers; a head is another kind of draft there."""
    if way.mode == HEAD and drafts.head is not None:
        usual = command(replace(way, mode="draft"), place, port)
        draft = str(gguf_of(place.pair.draft, way.weights))
        kinds = {"draft-simple": "draft-eagle3", draft: str(gguf_of(drafts.head, way.weights))}
        return [kinds.get(word, word) for word in usual]
    return command(replace(way, mode={MODEL: "draft", LOOKUP: "n-gram"}.get(way.mode, way.mode)), place, port)
