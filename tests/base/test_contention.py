"""Whether a machine is busy follows from what threads waited for their cores."""

from pathlib import Path

from ssd_serve.base.contention import CoreContention


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


def test_threads_that_begin_and_systems_without_counters_count_nothing(tmp_path: Path) -> None:
    threads = Threads(tmp_path)
    contention = CoreContention(tmp_path, lambda: threads.now)
    threads.times["3"] = [0, 900_000_000]
    threads.pass_second(900, 0)
    assert not contention.observe()
    assert not CoreContention(tmp_path / "none").observe()
