"""One that lives but tells nothing is stuck, unless it computes."""

from ssd_serve.cluster.health import HangDetector


def verdicts(*looks: tuple[float, float], silent_s: float = 61.0) -> list[bool]:
    """Of one process that is looked at at these moments, when it has computed for so long."""
    detector = HangDetector(look_s=5.0)
    return [detector.is_stuck(now, silent_s, computed_s) for now, computed_s in looks]


def test_who_computes_nothing_for_a_whole_look_is_stuck() -> None:
    assert verdicts((100.0, 7.0), (104.9, 7.0), (105.1, 7.1)) == [False, False, True]


def test_who_computes_is_not_for_as_long_as_it_does() -> None:
    assert verdicts((100.0, 7.0), (105.1, 8.0), (110.2, 9.0), (115.3, 9.0)) == [False, False, False, True]


def test_an_old_look_says_nothing_about_a_new_suspicion() -> None:
    assert verdicts((100.0, 7.0), (111.0, 7.0), (116.1, 7.0)) == [False, False, True]


def test_nothing_takes_ten_minutes_however_busy_it_is() -> None:
    assert verdicts((100.0, 7.0), silent_s=601.0) == [True]
