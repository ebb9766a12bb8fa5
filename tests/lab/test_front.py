"""`python -m lab.front`: every token that the engine gives is counted where it arrives."""

import msgspec

from lab.front.experiment import run_front, table
from lab.front.others import StreamLoad
from lab.front.ways import FrontWay


def test_all_tokens_of_all_streams_are_counted() -> None:
    load = StreamLoad(streams=3, tokens_per_round=2, tokens_per_s=600.0, seconds=0.2)
    told: list[str] = []
    result = run_front([load], [FrontWay("asyncio", "h11"), FrontWay("asyncio", "httptools")], 1, told.append)
    bounded, unbounded = msgspec.convert(result["trials"], type=list[dict[str, float | str]])
    assert (bounded["parser"], unbounded["parser"]) == ("h11", "httptools")
    for trial in (bounded, unbounded):
        assert 0 < float(trial["tokens_per_s"]) < 1200
        assert 0 < float(trial["late_ms"]) <= float(trial["late_99_ms"])
    assert len(told) == 2
    assert "httptools" in table(result)


def test_rounds_are_as_long_as_the_rate_wants() -> None:
    load = StreamLoad(streams=256, tokens_per_round=4, tokens_per_s=20_480.0, seconds=2.0)
    assert (load.period_s, load.rounds) == (0.05, 40)
