"""A real drafter process, killed with SIGKILL while requests run: no wrong, lost or duplicate token."""

import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from ssd_serve.base.engine_config import Mode
from ssd_serve.base.messages import Committed, SamplingParameters, Submit
from ssd_serve.base.settings import Settings
from ssd_serve.bench.lossless.rig import Case, load_named, run_case
from ssd_serve.bench.options import Devices
from ssd_serve.cluster.local import make_run_dir
from ssd_serve.cluster.process import WorkerPlan, WorkerProcess, start_worker, worker_command
from ssd_serve.transport.listener import Listener
from ssd_serve.verifier.engine import Engine
from tests.end_to_end.tiny_pair import write_head, write_pair

pytestmark = pytest.mark.slow

FEW_TOKENS = SamplingParameters(max_tokens=400, ignore_eos=True, allowed_token_ids=tuple(range(60, 80)))


def memory_maps(process: int | str) -> int:
    """Number of shared-memory mappings for features in a process."""
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


_JOIN_S = 90.0


@contextmanager
def drafter_process(settings: Settings, engine: Engine, run_dir: Path) -> Generator[WorkerProcess]:
    """Start a drafter process, wait until it has joined, and stop it at the end."""
    place = make_run_dir(run_dir)
    listener = Listener.unix(place.drafter_socket)
    command = worker_command("drafter", "drafter-0", place.drafter_socket)
    worker = start_worker(WorkerPlan("drafter-0", command), settings.engine_config())
    try:
        deadline = time.monotonic() + _JOIN_S
        while not engine.drafters.num_joined:
            assert worker.exit_code is None
            assert time.monotonic() < deadline
            channel = listener.accept()
            if channel is not None:
                engine.drafters.connect(channel)
            engine.drain()
            time.sleep(0.02)
        yield worker
    finally:
        worker.stop()
        listener.close()
        place.remove()
