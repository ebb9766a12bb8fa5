"""`ssd bench peers`: this engine and llama.cpp, vLLM and transformers on the same checkpoint and cores.

Each mode of each peer is tuned. Then all engines run at the same time, and every prompt goes to each of them
in a random order; a request is sent only when all engines are idle.
"""

import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ssd_serve.base.devices import Device
from ssd_serve.base.engine_config import Mode
from ssd_serve.base.settings import Settings
from ssd_serve.bench.client import Answer, LoadRequest
from ssd_serve.bench.peers.engines import (
    LLAMA,
    OUR_MODES,
    OURS,
    PEER_MODES,
    PeerError,
    PeerMode,
    PeerServer,
    Place,
    await_idle,
    gguf_path,
    initial_shapes,
    launched,
    neighbours,
)
from ssd_serve.bench.prompts import Prompt
from ssd_serve.bench.rig import use_cores
from ssd_serve.bench.runner import token_hash
from ssd_serve.bench.statistics import Interval, interleave, quartiles, ratio_interval, tune
from ssd_serve.bench.workload import ballast_pair, choose_prompts

COLUMNS = ("temperature", "engine", "mode", "shape", "answers", "whole_ms", "first_token_ms", "tokens_per_s")
RATIO_COLUMNS = ("temperature", "ours", "best_peer", "whole", "first_token", "verdict")
Answers = Mapping[tuple[int, int], Answer]
"""Answers of one mode by launch and prompt."""


@dataclass(frozen=True, slots=True)
class PeersPlan:
    """The size of a comparison."""

    temperatures: Sequence[float]
    prompts: int
    tuning_prompts: int
    tokens: int
    launches: int


@dataclass(slots=True)
class PeersResult:
    """Rows, ratios, tuned shapes, single answers and failures."""

    results: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    ratios: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    tuned: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    answers: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    failures: list[dict[str, object]] = field(default_factory=list[dict[str, object]])


def run_peers(
    plan: PeersPlan, programs: dict[str, Path], cores: tuple[int, ...], dtype: str, say: Callable[[str], None]
) -> dict[str, object]:
    """Measure everything and return the result file; a failed engine is named in it and ends nothing else."""
    use_cores(str(Device("cpu", cores)))
    result = PeersResult()
    with tempfile.TemporaryDirectory(prefix="ssd-peers-") as name:
        work = Path(name)
        pair = ballast_pair(work)
        place = Place(programs, Path(pair["target"]), Path(pair["draft"]), cores, work, dtype)
        if LLAMA in programs:
            from ssd_serve.bench.peers.gguf_writer import write_gguf

            for checkpoint in (place.target, place.draft):
                write_gguf(checkpoint, gguf_path(checkpoint, dtype), dtype)
        settings = Settings(mode=Mode.AR, target=pair["target"], draft=pair["draft"])
        chosen = choose_prompts(
            settings, plan.temperatures, plan.prompts, say, tuning=plan.tuning_prompts, tokens=plan.tokens
        )
        for temperature, texts in chosen.items():
            session = _Session(place, plan.tokens, temperature, result, say)
            modes = [PeerMode(OURS, mode) for mode in OUR_MODES]
            for engine, mode in _peer_modes(programs):
                best = session.tuned(initial_shapes(engine, mode, len(cores)), texts.tuning)
                modes += [best] if best is not None else []
            for launch in range(plan.launches):
                say(f"temperature {temperature:g}: launch {launch + 1} of {plan.launches}")
                session.measure(launch, modes, texts.prompts)
            session.report()
    return {"benchmark": "peers", "dtype": dtype, "cores": len(cores), **asdict(result)}


def _peer_modes(programs: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    return ((engine, mode) for engine in programs for mode in PEER_MODES[engine])


class _Session:
    """The measurement at one temperature."""

    def __init__(
        self, place: Place, tokens: int, temperature: float, result: PeersResult, say: Callable[[str], None]
    ) -> None:
        self._place = place
        self._tokens = tokens
        self._temperature = temperature
        self._result = result
        self._say = say
        self._answers: dict[PeerMode, dict[tuple[int, int], Answer]] = {}

    def tuned(self, start: Sequence[PeerMode], prompts: Sequence[Prompt]) -> PeerMode | None:
        """Return the shape with the fastest whole requests; None if no shape could be measured."""

        def speeds(modes: Sequence[PeerMode], some: Sequence[Prompt]) -> dict[PeerMode, float]:
            return {
                mode: _speed(found.values()) for mode, found in self._asked(modes, some, "tuning").items()
            }

        if len(start) == 1 and not start[0].cores:
            return start[0]
        best, tried = tune(start, lambda mode: neighbours(mode, len(self._place.cores)), speeds, prompts)
        shapes = {mode.shape: round(speed, 2) for mode, speed in tried.items()}
        self._say(f"  {best.name}: {best.shape} of {shapes} tokens/s")
        self._result.tuned.append(
            {"temperature": self._temperature, "mode": best.name, "shape": best.shape, "tried": shapes}
        )
        return best if not tried or tried[best] else None

    def measure(self, launch: int, modes: Sequence[PeerMode], prompts: Sequence[Prompt]) -> None:
        """Ask all modes in a fresh start of every engine."""
        for mode, answers in self._asked(modes, prompts, f"launch {launch}").items():
            kept = self._answers.setdefault(mode, {})
            kept.update({(launch, prompt): answer for prompt, answer in answers.items()})

    def _asked(
        self, modes: Sequence[PeerMode], prompts: Sequence[Prompt], when: str
    ) -> dict[PeerMode, dict[int, Answer]]:
        """Return the answers of each mode by prompt; failures are noted and left out."""
        with ExitStack() as stack:
            engines: dict[PeerMode, PeerServer] = {}
            for mode in modes:
                engine = self._started(stack, mode, prompts[0], when)
                if engine is not None:
                    engines[mode] = engine

            def run(mode: PeerMode, prompt: Prompt, order: int) -> Answer | None:
                try:
                    waited = await_idle(list(engines.values()))
                    answer = engines[mode].ask(self._request(prompt), self._temperature)
                except PeerError as error:
                    self._fail(mode, when, error)
                    return None
                self._result.answers.append(self._answer_row(mode, when, prompt, order, waited, answer))
                return answer

            found = interleave(engines, prompts, run)
        return {
            mode: {number: answer for number, answer in enumerate(some) if answer is not None}
            for mode, some in found.items()
        } | {mode: {} for mode in modes if mode not in found}

    def _started(self, stack: ExitStack, mode: PeerMode, prompt: Prompt, when: str) -> PeerServer | None:
        """Start an engine and send two warm-up requests; None if that fails."""
        try:
            engine = stack.enter_context(launched(mode, self._place))
            for _ in range(2):
                engine.ask(self._request(prompt), self._temperature)
        except PeerError as error:
            self._fail(mode, when, error)
            return None
        return engine

    def _request(self, prompt: Prompt) -> LoadRequest:
        return LoadRequest(prompt.tokens, self._tokens, prompt.seed)

    def _fail(self, mode: PeerMode, when: str, error: PeerError) -> None:
        self._say(f"  {error}")
        self._result.failures.append(
            {"mode": mode.name, "shape": mode.shape, "when": when, "reason": str(error)}
        )

    def _answer_row(
        self, mode: PeerMode, when: str, prompt: Prompt, order: int, waited: float, answer: Answer
    ) -> dict[str, object]:
        return {
            "temperature": self._temperature,
            "when": when,
            "mode": mode.name,
            "shape": mode.shape,
            "prompt": prompt.path,
            "seed": prompt.seed,
            "order": order,
            "waited_s": round(waited, 3),
            "first_s": round(answer.ttft_s, 6),
            "whole_s": round(answer.latency_s, 6),
            "tokens": answer.tokens,
            "text": token_hash(answer.text) if answer.text else "",
        }

    def report(self) -> None:
        """Add the rows of all modes, and our ratios to the peer with the fastest whole requests."""
        for mode, found in self._answers.items():
            if not found:
                continue
            answers = list(found.values())
            self._result.results.append(
                {
                    "temperature": self._temperature,
                    "engine": mode.engine,
                    "mode": mode.mode,
                    "shape": mode.shape,
                    "answers": len(answers),
                    "whole_ms": quartiles([1e3 * answer.latency_s for answer in answers]),
                    "first_token_ms": quartiles([1e3 * answer.ttft_s for answer in answers]),
                    "tokens_per_s": round(_speed(answers), 2),
                }
            )
        peers = {mode: found for mode, found in self._answers.items() if mode.engine != OURS and found}
        best = max(peers, key=lambda mode: _speed(peers[mode].values()), default=None)
        for mode, found in self._answers.items():
            if mode.engine == OURS and best is not None:
                whole = paired(found, peers[best], lambda answer: answer.latency_s)
                first = paired(found, peers[best], lambda answer: answer.ttft_s)
                self._result.ratios.append(
                    {
                        "temperature": self._temperature,
                        "ours": mode.mode,
                        "best_peer": f"{best.name} {best.shape}",
                        "whole": None if whole is None else asdict(whole),
                        "first_token": None if first is None else asdict(first),
                        "verdict": None if whole is None else whole.verdict,
                    }
                )


def _speed(answers: Collection[Answer]) -> float:
    """Return the tokens a second of whole requests; 0 without answers."""
    seconds = sum(answer.latency_s for answer in answers)
    return sum(answer.tokens for answer in answers) / seconds if seconds else 0.0


def paired(ours: Answers, theirs: Answers, seconds: Callable[[Answer], float]) -> Interval | None:
    """Return how many times as fast ours are, answer by answer.

    Answers to one prompt are alike, and so are answers of one launch: the interval is the wider one of the
    interval over prompts and the interval over launches.
    """
    pairs = {key: seconds(theirs[key]) / seconds(ours[key]) for key in sorted(ours.keys() & theirs.keys())}
    found: list[Interval] = []
    for place in (0, 1):
        groups: dict[int, list[float]] = {}
        for key, ratio in pairs.items():
            groups.setdefault(key[place], []).append(ratio)
        interval = ratio_interval([statistics.geometric_mean(some) for some in groups.values()])
        if interval is not None:
            found.append(interval)
    return max(found, key=lambda one: one.high / one.low, default=None)
