"""Whether a machine is busy follows from what threads waited for their cores."""

import os
from pathlib import Path

from ssd_serve.base.contention import CoreContention, ThreadLimit, core_seconds, family_seconds


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


def others_of(tmp_path: Path, cores: list[float], own: float = 0.0) -> list[int]:
    """Taken cores after seconds in which all cores together worked so much beside `own`."""
    threads, worked, ours = Threads(tmp_path), 0.0, 0.0

    def passed() -> float:
        return ours

    contention = CoreContention(tmp_path, lambda: threads.now, lambda: worked, passed)
    taken = []
    for each in cores:
        threads.pass_second(0, 0)
        worked, ours = worked + each + own, ours + own
        contention.observe()
        taken.append(contention.taken)
    return taken


def test_a_core_is_taken_until_others_use_less_than_half_of_it(tmp_path: Path) -> None:
    assert others_of(tmp_path, [0.1, 0.6, 0.7, 0.5, 0.4, 1.3, 1.7, 1.5, 1.4, 0.0]) == [
        *(0, 0, 1, 1, 0, 1, 2, 2, 1, 0)
    ]


def test_other_processes_of_the_server_take_no_core(tmp_path: Path) -> None:
    assert others_of(tmp_path, [0.1, 0.1], own=1.8) == [0, 0]


def test_seconds_of_a_family_are_those_of_the_parent_and_its_children(tmp_path: Path) -> None:
    for process, ticks in ((7, 100), (8, 30), (9, 20), (10, 999)):
        (tmp_path / str(process)).mkdir()
        fields = f"{process} (a) b) S 1 1 1 0 -1 0 0 0 0 0 {ticks} 5 0 0"
        (tmp_path / str(process) / "stat").write_text(fields)
    for thread, children in (("7", "8 "), ("70", "9 ")):
        (tmp_path / "7" / "task" / thread).mkdir(parents=True)
        (tmp_path / "7" / "task" / thread / "children").write_text(children)
    assert family_seconds(7, tmp_path) == 165 / os.sysconf("SC_CLK_TCK")
    assert family_seconds(1, tmp_path) == 0.0


def test_threads_leave_taken_cores_and_come_back() -> None:
    threads = [4]
    limit = ThreadLimit(lambda: threads[0], lambda number: threads.append(threads.pop() and number))
    found = []
    for taken in (0, 1, 3, 9, 0):
        limit.leave(taken, 4)
        found.append(threads[0])
    assert found == [4, 3, 1, 1, 4]
    limit.leave(2, 4)
    threads[0] = 3  # the mode has changed
    limit.leave(2, 4)
    assert threads[0] == 2
    limit.leave(0, 4)
    assert threads[0] == 3
