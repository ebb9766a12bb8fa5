"""Whether a machine is busy follows from what threads waited for their cores."""

import os
from pathlib import Path

from ssd_serve.base.contention import CoreContention, core_seconds


class Threads:
    """A folder such as /proc/self/task, and a clock that moves by a second."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 0.0
        self.times: dict[str, list[int]] = {"1": [0, 0], "2": [0, 0]}
        self.write()

    def write(self) -> None:
        for name, (ran, waited) in self.times.items():
            (self.folder / name).mkdir(exist_ok=True)
            (self.folder / name / "schedstat").write_text(f"{ran} {waited} 7\n")

    def pass_second(self, ran_ms: int, waited_ms: int) -> None:
        self.now += 1.0
        self.times["2"][0] += ran_ms * 1_000_000
        self.times["2"][1] += waited_ms * 1_000_000
        self.write()


def test_waiting_threads_make_a_machine_busy_until_they_hardly_wait(tmp_path: Path) -> None:
    threads = Threads(tmp_path)
    contention = CoreContention(tmp_path, lambda: threads.now)
    found = []
    for waited_ms in (10, 120, 300, 70, 30, 120):
        threads.pass_second(900, waited_ms)
        found.append(contention.observe())
    assert found == [False, False, True, True, False, False]
    assert abs(contention.waited - 120 / 1020) < 1e-9


def test_a_process_with_little_work_says_nothing(tmp_path: Path) -> None:
    threads = Threads(tmp_path)
    contention = CoreContention(tmp_path, lambda: threads.now)
    threads.pass_second(10, 15)
    assert not contention.observe()
    threads.pass_second(10, 60)
    assert contention.observe()


def test_cores_of_other_processes_are_those_that_work_for_no_thread_of_this_one(tmp_path: Path) -> None:
    threads, worked = Threads(tmp_path), iter((10.0, 11.9, 12.5))
    contention = CoreContention(tmp_path, lambda: threads.now, lambda: next(worked))
    threads.pass_second(900, 400)
    contention.observe()
    assert abs(contention.others - 1.0) < 1e-9
    threads.pass_second(700, 0)
    contention.observe()
    assert contention.others == 0.0


def test_core_seconds_are_those_in_which_these_cores_worked(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 9 9\ncpu0 100 20 30 999 99 1 2 47 5 5\ncpu1 7 0 0 0 0 0 0 0 0 0\nintr 5\n")
    second = 1 / os.sysconf("SC_CLK_TCK")
    assert core_seconds((0,), stat) == 200 * second
    assert core_seconds((0, 1), stat) == 207 * second
    assert core_seconds((0,), tmp_path / "none") == 0.0


def test_threads_that_begin_and_systems_without_counters_count_nothing(tmp_path: Path) -> None:
    threads = Threads(tmp_path)
    contention = CoreContention(tmp_path, lambda: threads.now)
    threads.times["3"] = [0, 900_000_000]
    threads.pass_second(900, 0)
    assert not contention.observe()
    assert not CoreContention(tmp_path / "none").observe()
