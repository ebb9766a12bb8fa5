"""Our own modes beside one another, of results whose truth is known."""

from typing import Any

from lab.own_modes_block import own_modes

_LAUNCHES = 6


def result(answers_of_sd: int = 8, launches: int = _LAUNCHES, **speeds: list[float]) -> dict[str, Any]:
    """Of one number format and temperature: plain decoding at 50 tokens/s, `speeds` of the other modes."""
    found = {
        "ar": [50.0] * launches,
        "sd": [100.0] * launches,
        "ssd": [100.0] * launches,
        "auto": [100.0] * launches,
    }
    rows = [
        {
            "engine": "ssd-serve",
            "mode": mode,
            "dtype": "bf16",
            "temperature": 0.6,
            "launches": rates,
            "answers": 8,
        }
        for mode, rates in (found | speeds).items()
    ]
    rows[1]["answers"] = answers_of_sd
    peer = {"engine": "llama.cpp", "mode": "plain", "dtype": "bf16", "temperature": 0.6, "launches": [1.0]}
    return {"results": [*rows, peer]}


def cells(*results: dict[str, Any]) -> list[list[str]]:
    """Of each line below the table's head."""
    lines = own_modes(*results).partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_line_says_how_many_times_as_fast_auto_is_and_what_that_shows() -> None:
    slower = [110.0, 111.0, 109.0, 110.0, 111.0, 109.0]
    (line,) = cells(result(sd=slower))
    assert line[:4] == ["bf16", "0.6", "0.909 (0.901 to 0.917)", "worse"]
    assert line[4:] == ["1.000 (1.000 to 1.000)", "as good", "2.000 (2.000 to 2.000)", "better"]


def test_launches_that_differ_much_show_nothing() -> None:
    (line,) = cells(result(sd=[80.0, 130.0, 85.0, 125.0, 90.0, 120.0]))
    assert line[3] == "not shown"


def test_launches_are_paired_in_order() -> None:
    rates = [50.0, 70.0, 90.0, 110.0, 130.0, 150.0]
    (line,) = cells(result(sd=rates, auto=[1.1 * rate for rate in rates]))
    assert line[2:4] == ["1.100 (1.100 to 1.100)", "better"]


def test_modes_that_answered_other_prompts_are_not_compared() -> None:
    (line,) = cells(result(answers_of_sd=7))
    assert line[2:4] == ["not the same prompts", ""]


def test_a_mode_that_never_answered_is_named() -> None:
    found = result()
    found["results"] = [row for row in found["results"] if row["mode"] != "ssd"]
    (line,) = cells(found)
    assert line[4:6] == ["not measured", ""]
    assert line[2:4] == ["1.000 (1.000 to 1.000)", "as good"], "the others are told all the same"


def test_one_launch_has_no_interval() -> None:
    (line,) = cells(result(launches=1))
    assert line[2:4] == ["one launch", ""]


def test_every_result_has_lines_of_its_own() -> None:
    assert len(cells(result(), result())) == 2
