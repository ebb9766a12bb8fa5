"""A real drafter process, killed with SIGKILL amid running requests: no wrong, lost or double token."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from ssd_serve.base.engine_settings import Mode
from ssd_serve.base.messages import Committed, SamplingParameters, Submit
from ssd_serve.base.settings import Settings
from ssd_serve.bench.devices import Devices
from ssd_serve.bench.lossless.named import load_named
from ssd_serve.bench.lossless.rig import Case, LoadedPair, run_case
from ssd_serve.models.text.tokenizer import Tokenizer
from tests.end_to_end.tiny_pair import write_head, write_pair
from tests.lossless.drafter_process import drafter_process

pytestmark = pytest.mark.slow

FEW_TOKENS = SamplingParameters(max_tokens=400, ignore_eos=True, allowed_token_ids=tuple(range(60, 80)))


def test_killed_drafter_process_is_lossless(tmp_path: Path) -> None:
    folders = write_pair(tmp_path / "pair")
    pair = LoadedPair("tiny", *folders)
    pair.hello = replace(pair.hello, tokenizer=Tokenizer(folders[0]).vocabulary_hash())
    submits = [
        Submit(number, (40 + number, 50, 60), SamplingParameters(temperature=heat, max_tokens=400), number)
        for number, heat in enumerate((0.0, 0.7, 1.0, 1.5))
    ]
    expected = run_case(pair, Case("ar", 1), submits).tokens
    engine = pair.engine(Case("ssd", 4, 8))
    tokens: dict[int, list[int]] = {submit.request: [] for submit in submits}
    settings = Settings(
        target=str(folders[0]), draft=str(folders[1]), mode=Mode.SSD, dtype="fp32", log_level="warning"
    )
    with drafter_process(settings, engine, tmp_path / "run") as worker:
        for submit in submits:
            assert engine.submit(submit) is None
        accepted_before = 0
        while engine.busy:
            for report in engine.step():
                if isinstance(report, Committed):
                    tokens[report.request].extend(report.tokens)
            if not accepted_before and engine.totals.figures.accepted > 5:
                accepted_before = engine.totals.figures.accepted
                worker.popen.send_signal(signal.SIGKILL)
                assert worker.popen.wait(10) == -signal.SIGKILL
    assert accepted_before > 0
    assert engine.drafters.num_joined == 0
    assert {number: tuple(each) for number, each in tokens.items()} == expected


def memory_maps(process: int | str) -> int:
    """How often a process has memory that is shared for features."""
    return Path(f"/proc/{process}/maps").read_text().count("memfd:ssd-features")


def test_killed_eagle_drafter_rejoins_and_is_lossless(tmp_path: Path) -> None:
    target, _ = write_pair(tmp_path / "pair", layers=3)
    head = write_head(tmp_path / "head", target, range(60, 80))
    settings = Settings(
        target=str(target),
        draft=str(head),
        mode=Mode.SSD,
        dtype="fp32",
        eagle_layers="0,1,2",
        log_level="warning",
    )
    loaded = load_named(settings, Devices(), None)
    submits = [
        Submit(number, (60 + number, 62, 66), replace(FEW_TOKENS, temperature=heat), number)
        for number, heat in enumerate((0.0, 0.8, 0.8, 1.2))
    ]
    expected = run_case(loaded, Case("ar", 1), submits).tokens
    engine = loaded.engine(Case("ssd", 4, 8))
    tokens: dict[int, list[int]] = {submit.request: [] for submit in submits}

    def go_on(over: Callable[[], bool]) -> None:
        while engine.busy and not over():
            for report in engine.step():
                if isinstance(report, Committed):
                    tokens[report.request].extend(report.tokens)

    accepted = [0]
    for life in range(3):
        with drafter_process(settings, engine, tmp_path / f"run{life}") as worker:
            if not life:
                assert [engine.submit(submit) for submit in submits] == [None] * len(submits)
            go_on(lambda: engine.totals.figures.accepted > accepted[-1] + 5)
            assert memory_maps("self") == memory_maps(worker.popen.pid) == 1
            accepted.append(engine.totals.figures.accepted)
            worker.popen.send_signal(signal.SIGKILL)
            assert worker.popen.wait(10) == -signal.SIGKILL
            rounds = engine.totals.figures.rounds
            go_on(lambda rounds=rounds: engine.totals.figures.rounds > rounds + 20)  # type: ignore[misc]
            assert engine.drafters.num_joined == 0
            assert memory_maps("self") == 0
            assert engine.busy
    go_on(lambda: False)
    assert engine.drafters.rejoins == 2
    assert accepted[1] < accepted[2] < accepted[3]
    assert {number: tuple(each) for number, each in tokens.items()} == expected
