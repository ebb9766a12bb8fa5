"""A silent process is stuck unless it computes."""

from ssd_serve.cluster.health import HangDetector


def verdicts(*looks: tuple[float, float], silent_s: float = 61.0) -> list[bool]:
    detector = HangDetector(look_s=5.0)
    return [detector.is_stuck(now, silent_s, computed_s) for now, computed_s in looks]


def test_idle_process_is_stuck_after_one_interval() -> None:
    assert verdicts((100.0, 7.0), (104.9, 7.0), (105.1, 7.1)) == [False, False, True]


def test_computing_process_is_not_stuck() -> None:
    assert verdicts((100.0, 7.0), (105.1, 8.0), (110.2, 9.0), (115.3, 9.0)) == [False, False, False, True]


def test_old_observation_does_not_count_for_new_suspicion() -> None:
    assert verdicts((100.0, 7.0), (111.0, 7.0), (116.1, 7.0)) == [False, False, True]


def test_nothing_takes_ten_minutes_however_busy_it_is() -> None:
    assert verdicts((100.0, 7.0), silent_s=601.0) == [True]
