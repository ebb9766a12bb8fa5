"""`python -m lab.host`: what the host adds to a round of the verifier and to a step of the drafter.

Host time is wall time less the forward (through the head) and less deliberate waits; noise and sampling are
in it. The drafter of the verifier's rounds is an oracle at the other end of a real socket: it knows what the
target will choose, so that every round has the same work; its own time is not counted. Knows rounds and
steps, not what they are used for.
"""

import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from lab.host.drafting import measure_drafter
from ssd_serve.bench.load.servers import served
from ssd_serve.bench.prompts import Prompt, held_out_prompts
from ssd_serve.bench.rig import EngineWay, Rig, use_cores
from ssd_serve.cache.expansions import ROOT_STEP, Expansion, pack
from ssd_serve.cluster.channels.channel import SocketChannel
from ssd_serve.draft_messages import Open, Outcome
from ssd_serve.engine_settings import EMBEDDED, Mode
from ssd_serve.errors import SsdError
from ssd_serve.memory import settle_memory
from ssd_serve.messages import Committed, SamplingParameters, Submit
from ssd_serve.models.hub import resolve_model
from ssd_serve.seeds import mix
from ssd_serve.settings import Settings
from ssd_serve.verifier.engine import Engine

NODES_EACH = 8
_NEW_TOKENS = 192
_CHAIN = 4
_FAN_OUT = 16
WIDTHS = (1, 12, 16, 64)
_WIDE = 32
"""Times the embedded pair's vocabulary: 131,072 tokens, about what large models have."""
_IDLE_S = 12.0
_SAMPLED = SamplingParameters(temperature=0.8, max_tokens=_NEW_TOKENS, ignore_eos=True)
SAMPLINGS = {
    "greedy": replace(_SAMPLED, temperature=0.0),
    "temperature 0.8": _SAMPLED,
    "top-k 50, top-p 0.9": replace(_SAMPLED, top_k=50, top_p=0.9),
    "penalties": replace(_SAMPLED, repetition_penalty=1.1, presence_penalty=0.2),
}


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Host seconds of decoding rounds, and how many nodes they verified."""

    host_s: tuple[float, ...]
    nodes: float


def run_host(settings: Settings, batches: Sequence[int], say: Callable[[str], None]) -> dict[str, object]:
    """Rows of every sampling and batch, the drafter's steps, and what an idle server takes; milliseconds,
    medians with quartiles. Without batches only the drafter's."""
    use_cores("cpu:0")
    rig = Rig(settings)
    settle_memory()
    # Short ones, so that the longest batch fits the rig's slots.
    pool = held_out_prompts(resolve_model(EMBEDDED, "target"), rig.tokenizer)
    prompts = sorted(pool, key=lambda prompt: len(prompt.tokens))[: max(batches, default=1)]
    rows: list[dict[str, object]] = []
    for name, sampling in SAMPLINGS.items():
        for batch in batches:
            rounds = measure_rounds(rig, prompts[:batch], sampling)
            row = {"sampling": name, "batch": batch, "nodes_a_request": round(rounds.nodes / batch, 1)}
            rows.append(row | _milliseconds(rounds.host_s))
            say(f"{name}, batch {batch}: {rows[-1]['host_ms']} ms")
    say("draft steps")
    drafter = [
        measure_drafter(rig, prompts[0], temperature, width, times)
        for times, temperatures in ((1, (0.0, 0.8)), (_WIDE, (0.8,)))
        for temperature in temperatures
        for width in WIDTHS
    ]
    if not batches:
        return {"drafter": drafter}
    return {"verifier": rows, "drafter": drafter, "idle_core_share": _idle(settings)}


def _idle(settings: Settings) -> float:
    """Processor seconds a second of all processes of a server that nobody asks for anything."""
    own = settings.model_copy(update={"mode": Mode.SSD})
    with (
        tempfile.TemporaryDirectory(prefix="ssd-bench-") as folder,
        served({"idle": own}, Path(folder)) as servers,
    ):
        time.sleep(_IDLE_S / 4)
        before = servers["idle"].cpu_s()
        time.sleep(_IDLE_S)
        return round((servers["idle"].cpu_s() - before) / _IDLE_S, 4)


def _milliseconds(seconds: Sequence[float]) -> dict[str, object]:
    low, middle, high = (round(1e3 * value, 3) for value in statistics.quantiles(seconds, n=4))
    return {"host_ms": middle, "quartiles": [low, high], "rounds": len(seconds)}


def _submits(prompts: Sequence[Prompt], sampling: SamplingParameters) -> list[Submit]:
    return [Submit(number, each.tokens, sampling, each.seed) for number, each in enumerate(prompts, 1)]


def measure_rounds(rig: Rig, prompts: Sequence[Prompt], sampling: SamplingParameters) -> _Rounds:
    """Host time of the rounds in which all requests decode."""
    submits = _submits(prompts, sampling)
    texts = _plain(rig.engine(EngineWay("ar")), submits)
    engine = rig.engine(EngineWay("ssd"), verified=NODES_EACH * len(prompts))
    oracle = Oracle(engine, rig, texts)
    for submit in submits:
        engine.submit(submit)
    host_s: list[float] = []
    while engine.busy:
        before, rows = engine.clocked.host_s, engine.clocked.rows
        decoding = all(request.decoding for request in engine.scheduler.running)
        reports = engine.step()
        enough = engine.clocked.rows - rows == (1 + NODES_EACH) * len(prompts)
        if decoding and enough and len(reports) == len(prompts):
            host_s.append(engine.clocked.host_s - before)
        oracle.work()
    oracle.close()
    if len(host_s) < 4:
        raise SsdError("too few full rounds to measure: is the context long enough?")
    return _Rounds(tuple(host_s), float(NODES_EACH * len(prompts)))


def _plain(engine: Engine, submits: Sequence[Submit]) -> dict[int, list[int]]:
    """What the target chooses, by request."""
    texts: dict[int, list[int]] = {submit.request: [] for submit in submits}
    for submit in submits:
        engine.submit(submit)
    while engine.busy:
        for report in engine.step():
            if isinstance(report, Committed):
                texts[report.request].extend(report.tokens)
    return texts


class Oracle:
    """A drafter that knows the texts: each outcome is answered with the next tokens and wrong guesses
    beside."""

    def __init__(self, engine: Engine, rig: Rig, texts: dict[int, list[int]]) -> None:
        ours, theirs = socket.socketpair()
        self._channel = SocketChannel(ours)
        self._texts = texts
        self._vocabulary = rig.real.facts.vocabulary
        self._starts: dict[int, int] = {}
        self._sequences: dict[int, int] = {}
        self._channel.send(rig.hello)
        self._drafters = engine.drafters
        self._drafters.connect(SocketChannel(theirs))
        self._drafters.drain({})

    def close(self) -> None:
        """Leave; the engine notices."""
        self._channel.close()
        self._drafters.drain({})

    def work(self) -> None:
        """Answer what has been said since the last round."""
        for message in self._channel.receive():
            if isinstance(message, Open):
                self._starts[message.request] = len(message.prompt)
                self._grow(message.request, message.epoch, len(message.output), message.root)
            elif isinstance(message, Outcome):
                put_out = message.position + len(message.tokens) - self._starts[message.request]
                self._grow(message.request, message.epoch, put_out, message.root)

    def _grow(self, request: int, epoch: int, put_out: int, root: int) -> None:
        coming = self._texts[request][put_out : put_out + _CHAIN]
        expansions: list[Expansion] = []
        parent, step, name = root, ROOT_STEP, root
        for token in coming:
            wrong = [(token + 1 + index) % self._vocabulary for index in range(_FAN_OUT - 1)]
            values = [-0.1 - 0.2 * index for index in range(_FAN_OUT)]
            expansions.append(Expansion(parent, step, [token, *wrong], values))
            parent, step, name = name, token, mix(name, token)
        sequence = self._sequences.get(request, 0)
        self._sequences[request] = sequence + 1
        self._channel.send(pack(request, epoch, sequence, expansions, "oracle", snapshot=False))
