"""A real drafter process, killed with SIGKILL amid running requests: no wrong, lost or double token."""

import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from ssd_serve.bench.lossless.rig import Case, LoadedPair, run_case
from ssd_serve.cluster.channels.listener import Listener
from ssd_serve.cluster.local.process import WorkerPlan, WorkerProcess, start_worker, worker_command
from ssd_serve.cluster.local.run_dir import make_run_dir
from ssd_serve.messages import Committed, SamplingParameters, Submit
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.settings import Mode, Settings
from ssd_serve.verifier.engine import Engine
from tests.end_to_end.tiny_pair import write_pair

pytestmark = pytest.mark.slow

JOIN_S = 90.0


@contextmanager
def drafter(folders: tuple[Path, Path], engine: Engine, run_dir: Path) -> Generator[WorkerProcess]:
    """The drafter process of the installation, joined to an engine in this process."""
    place = make_run_dir(run_dir)
    listener = Listener.unix(place.drafter_socket)
    settings = Settings(
        target=str(folders[0]), draft=str(folders[1]), mode=Mode.SSD, dtype="fp32", log_level="warning"
    )
    command = worker_command("drafter", "drafter-0", place.drafter_socket)
    worker = start_worker(WorkerPlan("drafter-0", command), settings)
    try:
        deadline = time.monotonic() + JOIN_S
        while not engine.drafters.alive:
            assert worker.exit_code is None
            assert time.monotonic() < deadline
            channel = listener.accept()
            if channel is not None:
                engine.drafters.connect(channel)
            engine.drafters.drain({})
            time.sleep(0.02)
        yield worker
    finally:
        worker.stop()
        listener.close()
        place.remove()


def test_kill_9_in_the_middle_of_running_requests(tmp_path: Path) -> None:
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
    with drafter(folders, engine, tmp_path / "run") as worker:
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
    assert engine.drafters.alive == 0
    assert {number: tuple(each) for number, each in tokens.items()} == expected
