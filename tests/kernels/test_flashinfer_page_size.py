"""The page size is what a clock says: the fastest, the smaller of equals, and none that cannot run."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from ssd_serve.base.logs import Logger
from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention.backends import candidates
from ssd_serve.kernels.batch import build_batch
from ssd_serve.kernels.flashinfer import factory
from ssd_serve.kernels.flashinfer.factory import PAGE_SIZES, UNMEASURED, fastest_page_size, long_batch
from ssd_serve.kernels.flashinfer.tables import leading_pages
from tests.kernels.flashinfer_double import WORKSPACE, Doubles, WrapperDouble
from tests.kernels.flashinfer_signatures import UPSTREAM
from tests.kernels.test_flashinfer import chunk

LONG = 8 * 256 + 64  # slots of the shortest batch that is measured


class Hours:
    """A clock: by it a forward with pages of the size that is tried takes so many microseconds."""

    def __init__(self, doubles: "Slow") -> None:
        self._doubles = doubles
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._doubles.spent
        self._doubles.spent = 0.0
        return self._now


class Slow(Doubles):
    """Doubles whose plans take a time that depends on the page size, and longer at first, as compilers do."""

    def __init__(self, microseconds: dict[int, float], microsecond: float) -> None:
        super().__init__(UPSTREAM)
        self.microseconds = microseconds
        self.microsecond = microsecond
        self.spent = 0.0
        self.sizes: list[int] = []

    def __call__(self, *positional: object, **named: object) -> WrapperDouble:
        double = super().__call__(*positional, **named)
        plan = double.plan

        def planned(*given: object, **asked: object) -> None:
            plan(*given, **asked)
            size = double.planned["page_size"]
            if size not in self.microseconds:
                raise RuntimeError(f"no kernel for pages of {size}\nat some place")
            first = size not in self.sizes
            self.sizes.append(size)
            # A forward by pages plans the rest one slot a page.
            self.spent += self.microsecond * (self.microseconds[size] - (size != 1) * self.microseconds[1])
            self.spent += 0.5 if first else 0.0

        double.plan = planned  # type: ignore[method-assign]
        return double


def measured(
    microseconds: dict[int, float],
    slots: int = LONG,
    windows: Sequence[int | None] = (None,),
    microsecond: float = 1e-6,
) -> tuple[int, str, Slow]:
    """The size that is chosen, and what is logged."""
    stream, doubles = io.StringIO(), Slow(microseconds, microsecond)
    layers = tuple(LayerKV(1, 2, window) for window in windows)
    cache = KVCache(KVLayout(layers, torch.float32, order="slots"), slots, "cpu")
    size = fastest_page_size(
        cache,
        1,
        doubles.package(),
        Logger("test", stream=stream),
        clock=Hours(doubles),
        workspace_bytes=WORKSPACE,
    )
    return size, stream.getvalue(), doubles


@pytest.mark.parametrize(
    ("microseconds", "expected"),
    [
        ({1: 900.0, 16: 500.0, 64: 600.0}, 16),
        ({1: 900.0, 16: 500.0, 64: 400.0}, 64),
        ({1: 300.0, 16: 500.0, 64: 400.0}, 1),
    ],
)
def test_the_fastest_is_taken_and_all_are_told(microseconds: dict[int, float], expected: int) -> None:
    size, log, _ = measured(microseconds)
    assert size == expected
    assert log.count("\n") == 1
    for tried, time in microseconds.items():
        assert f"{tried}: {time:.0f}" in log
    assert f"slots_a_page={expected}" in log


def test_of_equals_the_smaller_is_taken() -> None:
    exact = 2.0**-20  # sums of which are not rounded
    assert measured({1: 5.0, 16: 5.0, 64: 5.0}, microsecond=exact)[0] == 1
    assert measured({1: 9.0, 16: 5.0, 64: 5.0}, microsecond=exact)[0] == 16


def test_a_size_that_raises_is_left_out() -> None:
    size, log, _ = measured({1: 900.0, 64: 400.0})
    assert size == 64
    assert "left out" in log
    assert "no kernel for pages of 16" in log
    assert "16: " not in log.splitlines()[-1]
    size, log, _ = measured({})
    assert size == 1
    assert log.count("left out") == len(PAGE_SIZES)


def test_windows_and_short_caches_are_not_measured() -> None:
    for slots, windows, expected in (
        (LONG, (5,), 1),
        (LONG - 1, (None,), UNMEASURED),
        (UNMEASURED, (None,), UNMEASURED),
        (UNMEASURED - 1, (None,), 1),
    ):
        size, log, doubles = measured({}, slots, windows)
        assert (size, log, doubles.made) == (expected, "", [])
    assert measured({1: 9.0, 16: 5.0, 64: 6.0}, LONG, (5, None))[0] == 16


@pytest.mark.parametrize(
    ("slots", "length"), [(LONG, 256), (LONG + 511, 256), (LONG + 512, 320), (99999, 4096)]
)
def test_what_is_measured_is_long_in_order_and_inside_the_cache(slots: int, length: int) -> None:
    batch = long_batch(slots)
    assert batch is not None
    assert np.diff(batch.prefix_offsets).tolist() == [length] * 8
    assert np.diff(batch.request_offsets).tolist() == [8] * 8
    for size in PAGE_SIZES:
        assert leading_pages(batch, size).tolist() == [length // size] * 8
    used = np.concatenate((batch.prefix_slots, batch.write_slots))
    assert len(set(used.tolist())) == len(used)
    assert used.max() < slots


def test_the_backend_that_serves_reads_pages_of_that_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubles = Doubles(UPSTREAM)
    monkeypatch.setattr(factory, "load_package", lambda *given: doubles.package())
    cache = KVCache(KVLayout((LayerKV(2, 16),), torch.float32, order="slots"), 640, "cpu")
    [candidate] = [each for each in candidates(cache, None, tmp_path) if each.name == "flashinfer"]
    monkeypatch.setattr(factory, "UNMEASURED", 8)
    candidate.make(cache, 4).plan(build_batch([chunk(range(16), [70])]))
    assert [plan["page_size"] for plan in doubles.planned(masked=False)] == [1, 8]
