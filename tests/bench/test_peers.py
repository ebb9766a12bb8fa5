"""Tests of the comparison with llama.cpp: start commands, shapes, questions, order, resuming, and figures."""

import contextlib
import functools
import gzip
import json
import random
import threading
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ssd_serve.base.errors import UserError
from ssd_serve.bench.client import Answer, LoadRequest
from ssd_serve.bench.peers import comparison, engines
from ssd_serve.bench.peers.comparison import PeersPlan, Sitting
from ssd_serve.bench.peers.engines import (
    BOTH,
    DRAFT,
    LLAMA,
    LOOKUP,
    OUR_MODES,
    OURS,
    PLAIN,
    PeerAnswer,
    PeerError,
    PeerMode,
    Place,
    await_idle,
    command,
    disturbing,
    launched,
    shapes_to_try,
)
from ssd_serve.bench.peers.figures import AnswerRow, figures, grouped, pairs
from ssd_serve.bench.peers.questions import KINDS, read_kind
from ssd_serve.bench.peers.record import Record, open_record, read_record
from ssd_serve.models.hub import embedded_folder
from ssd_serve.models.text.tokenizer import Tokenizer

PLACE = Place("m", Path("/m.gguf"), Path("/opt/llama-server"), Path("/d.gguf"), ("--no-repack",), 1)
read_tokenizer = functools.cache(Tokenizer)
RESULTS = [
    Path(__file__).with_name("peers_trial.json"),
    *Path(comparison.__file__).parents[1].joinpath("results").glob("peers*.json"),
]


def words(engine: str, mode: str, **shape: float) -> str:
    return " ".join(command(PeerMode(engine, mode, **shape), PLACE, 8))  # type: ignore[arg-type]


def test_llama_uses_both_kinds_of_draft() -> None:
    both = words(LLAMA, BOTH, length=4, match=3, cores=2, draft_cores=2)
    assert "--spec-type ngram-simple,draft-simple" in both
    assert "-md /d.gguf" in both
    assert "--spec-ngram-simple-size-n 3" in both
    assert "--spec-draft-n-max 4" in both
    assert "--spec-type" not in words(LLAMA, PLAIN)
    assert "-md" not in words(LLAMA, LOOKUP, length=4, match=3)


def test_engines_serve_the_same_file_to_as_many_users() -> None:
    eight = replace(PLACE, users=8)
    theirs = " ".join(command(PeerMode(LLAMA, PLAIN, cores=2), eight, 8))
    assert "-m /m.gguf" in theirs
    assert "-np 8" in theirs
    assert "-c 16384" in theirs
    ours = " ".join(command(PeerMode(OURS, "auto"), eight, 8))
    assert "serve m --mode auto" in ours
    assert "--max-running 8 --no-prefix-cache" in ours
    assert all("--draft" not in words(OURS, mode) for mode in OUR_MODES)
    assert "--mode ar --target-device cpu:0 " in words(OURS, "ar:1")
    assert "--target-device cpu:0-3 " in words(OURS, "sd:4")


def test_shapes_of_every_mode_are_tried() -> None:
    assert [shape.shape for shape in shapes_to_try(PLAIN, 2)] == ["threads 1", "threads 2"]
    assert "48, match 12, threads 2" in [shape.shape for shape in shapes_to_try(LOOKUP, 2)]
    assert "8, p >= 0.5, threads 2+2" in [shape.shape for shape in shapes_to_try(DRAFT, 2)]
    assert all(shape.match and shape.draft_cores for shape in shapes_to_try(BOTH, 2))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    def lines(records: Sequence[object]) -> bytes:
        return "\n".join(json.dumps(record) for record in records).encode()

    numbers = range(8)
    chat = [{"question_id": at, "turns": [f"Say {at}.", "Again."]} for at in numbers]
    (tmp_path / "mt_bench.jsonl").write_bytes(lines(chat))
    (tmp_path / "gsm8k_test.jsonl").write_bytes(
        lines([{"question": f"{at} + 1?", "answer": ""} for at in numbers])
    )
    programs = [
        {
            "task_id": f"HumanEval/{at}",
            "prompt": f"def f{at}(x):\n",
            "entry_point": f"f{at}",
            "canonical_solution": f"    return x + {at}\n",
        }
        for at in numbers
    ]
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(lines(programs)))
    return tmp_path


def test_questions_of_each_kind(data: Path, tmp_path: Path) -> None:
    kinds = {kind: read_kind(kind, data) for kind in KINDS}
    first, second = kinds["chat"][:2]
    assert second.turns == (*first.turns, "Again.")
    assert len({question.seed for questions in kinds.values() for question in questions}) == 40
    assert not kinds["code"][0].chat
    copied = next(one for one in kinds["copying"] if one.name == "HumanEval/2").turns[0]
    assert copied.index("return x + 2") < copied.index("return x + 3")
    edited = next(one for one in kinds["editing"] if one.name == "HumanEval/2").turns[0]
    assert "Rename the function f2 to renamed_f2" in edited
    with pytest.raises(UserError, match="cannot read the questions"):
        read_kind("chat", tmp_path / "none")


class FakeEngine:
    """Test double of an engine: `step_s` seconds a token, then `busy` seconds of CPU after each answer."""

    def __init__(self, mode: PeerMode, step_s: float, busy: int = 0) -> None:
        self.mode = mode
        self._step_s = step_s
        self._busy_for = busy
        self._busy = 0
        self._cpu_s = 0.0
        self.asked: list[tuple[int, ...]] = []

    def ask(self, request: LoadRequest, temperature: float, *, exact: bool = True) -> PeerAnswer:
        assert not isinstance(request.prompt, str)
        self.asked.append(request.prompt)
        self._busy = self._busy_for
        noise = 1 + 0.01 * random.Random(request.seed).random()
        times = [0.1 + self._step_s * noise * number for number in range(request.tokens)]
        return PeerAnswer(Answer(0.0, 0.0, times[-1], tuple((at, 1) for at in times)), f"text {temperature}")

    def cpu_s(self) -> float:
        if self._busy:
            self._busy -= 1
            self._cpu_s += 0.05
        return self._cpu_s


def test_await_idle_waits_for_an_engine_that_works_after_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_IDLE_WINDOW_S", 0.001)
    busy = FakeEngine(PeerMode(LLAMA, PLAIN), 0.01, busy=7)
    busy.ask(LoadRequest((1,), 4, 0), 0.0)
    await_idle([busy])  # type: ignore[list-item]
    before = busy.cpu_s()
    assert busy.cpu_s() == before
    monkeypatch.setattr(engines, "_IDLE_TIMEOUT_S", 0.01)
    stuck = FakeEngine(PeerMode(LLAMA, PLAIN), 0.01, busy=10**9)
    stuck.ask(LoadRequest((1,), 4, 0), 0.0)
    with pytest.raises(PeerError, match=r"llama.cpp plain uses a core"):
        await_idle([stuck])  # type: ignore[list-item]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeEngine]:
    started: dict[str, FakeEngine] = {}

    @contextlib.contextmanager
    def launch(mode: PeerMode, _place: Place) -> Generator[FakeEngine]:
        seconds = 0.01 * (1 + abs(mode.length - 16) + (mode.cores == 1)) if mode.engine == LLAMA else 0.005
        engine = started[mode.name] = FakeEngine(mode, seconds)
        yield engine

    monkeypatch.setattr(comparison, "launched", launch)
    monkeypatch.setattr(comparison, "await_idle", lambda _engines: 0.0)
    monkeypatch.setattr(comparison, "usable_cores", lambda: 2)
    monkeypatch.setattr(comparison, "Tokenizer", read_tokenizer)
    return started


def sit(
    record: Record,
    data: Path,
    kinds: Sequence[str] = ("chat", "code"),
    prompts: int = 2,
    users: int = 1,
    busy: str = "none",
) -> list[str]:
    """Run a sitting with the embedded pair's tokenizer; return what it said."""
    said: list[str] = []
    plan = PeersPlan(
        kinds=kinds,
        temperatures=(0.0, 0.7),
        modes=("auto",),
        llama_modes=(PLAIN, LOOKUP),
        prompts=prompts,
        tokens=8,
        busy=busy,
        data=data,
        deadline_s=60.0,
    )
    record.sittings.append({})
    place = replace(PLACE, file=embedded_folder("target"), llama_draft=None, users=users)
    Sitting(place, plan, record, None, said.append).run()
    return said


def test_sittings_keep_every_answer_and_go_on_where_the_last_one_ended(
    fakes: dict[str, FakeEngine], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Tokenizer,
        "apply_chat_template",
        lambda _self, messages: "".join(f"{each['role']}: {each['content']}\n" for each in messages),
    )
    record = Record(setup={})
    sit(record, data, kinds=("chat",))
    assert [one.best.length for one in record.tuned] == [0, 16]
    assert {one.best.cores for one in record.tuned} == {2}
    assert len(record.answers) == 2 * 2 * 3
    tokenizer = read_tokenizer(embedded_folder("target"))
    texts = [tokenizer.decode(list(prompt)) for prompt in fakes[f"{OURS} auto"].asked]
    assert any("Again." in text and "assistant: text 0.0" in text for text in texts)
    said = sit(record, data)
    assert said[0].startswith("12 requests of 1 users to come")
    assert len(record.answers) == 24
    assert {row.sitting for row in record.answers if row.kind == "code"} == {1}
    assert sit(record, data)[0].startswith("0 requests")
    orders = {
        row.group: [one.name for one in record.answers if one.group == row.group] for row in record.answers
    }
    assert len({tuple(order) for order in orders.values()}) > 1
    ratios = figures(record.answers)["ratios"]
    assert {row["best_peer"] for row in ratios} == {"llama.cpp n-gram", "the best of each kind"}


def test_users_ask_at_once_and_a_group_is_one_pair(fakes: dict[str, FakeEngine], data: Path) -> None:
    record = Record(setup={})
    sit(record, data, kinds=("code",), prompts=4, users=2)
    assert len(fakes) == 3
    assert {len(some) for some in grouped(record.answers, lambda each: (each.group, each.name)).values()} == {
        2
    }
    assert {row["pairs"] for row in figures(record.answers)["ratios"]} == {2}
    assert len({row.seed for row in record.answers}) == 4


def test_busy_machine_takes_the_idle_shapes_with_its_own_number_of_threads(
    fakes: dict[str, FakeEngine], data: Path
) -> None:
    record = Record(setup={})
    sit(record, data, kinds=("code",))
    record.tuned = [one for one in record.tuned if one.name.endswith(LOOKUP)]
    sit(record, data, kinds=("code",), busy="burst")
    assert [(one.busy, one.best.mode) for one in record.tuned] == [("none", LOOKUP), ("burst", PLAIN)]
    shapes = {row.shape for row in record.answers if row.busy == "burst" and row.mode == LOOKUP}
    assert shapes == {record.tuned[0].best.shape}


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


@pytest.mark.parametrize(("busy", "processes"), [("none", 0), ("one", 1), ("all", 3), ("burst", 3)])
def test_cores_are_used_by_as_many_processes_until_the_end(busy: str, processes: int) -> None:
    before = children()
    with disturbing(busy, 3):
        assert len(children() - before) == processes
    assert children() <= before


def test_record_is_read_again_and_refused_for_another_model(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    open_record(path, {"model": "a"}).write(path)
    assert open_record(path, {"model": "a"}).setup == {"model": "a"}
    with pytest.raises(UserError, match="measured with model a, not b"):
        open_record(path, {"model": "b"})
    path.write_text("[]")
    with pytest.raises(UserError, match="no result of ssd bench peers"):
        read_record(path)


def row(engine: str, mode: str, prompt: int, first_s: float, whole_s: float, **others: object) -> AnswerRow:
    fields = {
        **{
            "sitting": 0,
            "users": 1,
            "busy": "none",
            "kind": "code",
            "prompt": f"{prompt}",
            "temperature": 0.0,
        },
        **{"group": f"{prompt}", "order": 0, "engine": engine, "mode": mode, "shape": "", "seed": prompt},
        **{"prompt_tokens": 50 + 10 * prompt, "waited_s": 0.1, "first_s": first_s, "whole_s": whole_s},
        **{"tokens": 256, "repeated": 0.0, "text": ""},
    }
    return msgspec.convert({**fields, **others}, AnswerRow)


def test_first_tokens_with_two_modes_are_refused() -> None:
    late = [row(LLAMA, PLAIN, at, 0.2 + 0.01 * at + (0.9 if at % 3 == 0 else 0.0), 4.0) for at in range(12)]
    with pytest.raises(PeerError, match=r"llama.cpp plain needed 0.* s more than usual for a quarter"):
        figures(late)
    fine = [row(LLAMA, PLAIN, at, 0.2 + 0.1 * at, 4.0) for at in range(12)]
    assert figures(fine)["ratios"] == []
    assert figures([msgspec.structs.replace(each, busy="one") for each in late])["ratios"] == []


def test_a_group_is_one_pair_and_only_with_answers_of_the_same_sitting() -> None:
    ours = [row(OURS, "auto", at, 0.1, 2.0, group="a") for at in range(4)]
    theirs = [row(LLAMA, PLAIN, at, 0.1, 4.0 + at, group="a") for at in range(4)]
    (ratio,) = pairs(ours, theirs)
    assert ratio == pytest.approx((4 * 5 * 6 * 7) ** 0.25 / 2)
    assert pairs(ours, [msgspec.structs.replace(each, sitting=1) for each in theirs]) == []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_printed_figures_are_those_of_the_committed_answers(path: Path) -> None:
    record, printed = read_record(path), json.loads(path.read_text())
    found = figures(record.answers)
    assert found["results"] == printed["results"]
    assert found["ratios"] == printed["ratios"]
    assert any(ratio["whole"] for ratio in printed["ratios"])


def test_engine_that_cannot_start_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    program = tmp_path / "server"
    place = replace(PLACE, llama_server=program)
    with pytest.raises(PeerError, match="cannot be started"), launched(PeerMode(LLAMA, PLAIN), place):
        pass
    for script, message in (
        ("echo out of luck; exit 3", r"did not start \(its log ends: out of luck\)"),
        ("kill -SEGV $$", "--llama-flag=--no-repack"),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        with pytest.raises(PeerError, match=message), launched(PeerMode(LLAMA, PLAIN), place):
            pass
