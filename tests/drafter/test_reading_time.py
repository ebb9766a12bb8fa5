"""How fast a draft reads is measured as it reads: many tokens at a time."""

import pytest

from ssd_serve.drafter.sources import reading_time
from tests.models.timed_steps import Steps


@pytest.mark.parametrize(("row_s", "slots", "rows"), [(1e-5, 2048, 256), (1e-3, 2048, 100), (1e-5, 64, 64)])
def test_a_token_of_a_text_is_timed_among_many_of_which_only_the_last_gives_logits(
    row_s: float, slots: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(0.01, slots=slots)
    monkeypatch.setattr(reading_time, "time", steps)
    assert reading_time.measure_reading(steps, row_s) == pytest.approx(0.01 / rows)
    assert {(batch.rows, len(batch.rows_wanted)) for batch in steps.batches} == {(rows, 1)}
