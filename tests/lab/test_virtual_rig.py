"""Models that note what their forwards would take."""

import numpy as np

from lab.virtual.rig import TimedModel
from ssd_serve.bench.device_tables import Flat
from ssd_serve.kernels.batch import RequestRows, build_batch
from tests.fakes import FakeModel

NOTHING = np.zeros(0, dtype=np.int32)


def test_a_forward_takes_what_the_table_says_of_its_rows() -> None:
    model = TimedModel(FakeModel(512), Flat(0.002, 4))
    rows = 6
    texts = RequestRows(list(range(1, rows + 1)), list(range(rows)), list(range(rows)), NOTHING, [0])
    model.forward(build_batch([texts]))
    assert model.take_seconds() == 0.002 * rows / 4
    assert model.take_seconds() == 0.0
