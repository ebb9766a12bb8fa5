"""Tests of the self-test of tree attention: a wrong backend is refused by name, and skipped under `auto`."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ssd_serve.base.errors import UserError
from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.kernels.attention.backends import Candidate, choose_attention
from ssd_serve.kernels.attention.contract import Capturable, Maker, PlanWithSlots
from ssd_serve.kernels.attention.sdpa import SdpaAttention, SdpaPlan
from ssd_serve.kernels.attention.self_test import RATIOS, attention_seconds, first_failure, self_test
from ssd_serve.kernels.batch import Batch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOSTLY_SLOW = [DTYPES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DTYPES[1:])]


class Inflated(SdpaAttention):
    """Backend with a softmax denominator 1.875 times too large: 1.0 in bf16 read as fp16."""

    def run(self, layer: int, queries: torch.Tensor, plan: SdpaPlan) -> torch.Tensor:
        return super().run(layer, queries, plan) / 1.875


class WrongHead(SdpaAttention):
    """Backend that, under grouped-query attention, gives a stacked row the mask of another row of its group."""

    def plan(self, batch: Batch) -> SdpaPlan:
        plan = super().plan(batch)
        for pieces in plan.pieces.values():
            for index, piece in enumerate(pieces):
                if piece.folded:
                    by_head = piece.mask.view(
                        self._heads // 4, -1, piece.mask.shape[1]
                    )  # [group, rows, context]
                    mask = by_head.transpose(0, 1).reshape(piece.mask.shape)
                    pieces[index] = replace(piece, mask=mask)
        return plan


class NotANumber(SdpaAttention):
    def run(self, layer: int, queries: torch.Tensor, plan: SdpaPlan) -> torch.Tensor:
        out = super().run(layer, queries, plan)
        out[-1, -1] = torch.nan
        return out


class Raising(SdpaAttention):
    """Backend with a compiler that does not support this device."""

    def run(self, layer: int, queries: torch.Tensor, plan: SdpaPlan) -> torch.Tensor:
        raise RuntimeError("unsupported architecture gfx000\nand a long story")


class FirstStays(SdpaAttention):
    """Backend that can be captured, so that batches are padded.

    Of several rows that write to one slot the first one stays. With torch's copy it is the last one on a CPU,
    and any of them on a GPU.
    """

    def plan_to_capture(self, batch: Batch) -> SdpaPlan:
        return self.plan(batch)

    def captured_as(self, plan: SdpaPlan) -> None:
        """Do nothing: no test captures it."""

    def write(self, layer: int, stored: torch.Tensor, plan: PlanWithSlots) -> None:
        for row in range(len(stored) - 1, -1, -1):
            self._cache.write(layer, plan.write_slots[row : row + 1], stored[row : row + 1])


@pytest.mark.parametrize("dtype", MOSTLY_SLOW)
@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_right_results_pass_in_every_dtype(dtype: torch.dtype, head_dim: int) -> None:
    trials = self_test(SdpaAttention, dtype, head_dim, "cpu")
    assert [(trial.heads.heads, trial.heads.kv_heads) for trial in trials] == list(RATIOS)
    assert all(trial.right for trial in trials)


@pytest.mark.parametrize("dtype", MOSTLY_SLOW)
def test_self_test_finds_an_inflated_denominator(dtype: torch.dtype) -> None:
    assert not any(trial.right for trial in self_test(Inflated, dtype, 64, "cpu"))


@pytest.mark.parametrize("dtype", MOSTLY_SLOW)
def test_self_test_finds_masks_of_another_head(dtype: torch.dtype) -> None:
    right = [trial.right for trial in self_test(WrongHead, dtype, 64, "cpu")]
    assert right == [heads == kv_heads for heads, kv_heads in RATIOS]


def test_self_test_ignores_padding_rows() -> None:
    assert isinstance(
        FirstStays(KVCache(KVLayout((LayerKV(2, 64),), torch.float32), 8, "cpu"), 4), Capturable
    )
    assert first_failure(FirstStays, torch.float32, 64, "cpu") == ""


class Log:
    """Logger that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, object]]] = []

    def info(self, event: str, **fields: object) -> None:
        self.lines.append(("info", event, fields))

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append(("warning", event, fields))


def choose(asked: str, makers: dict[str, Maker], missing: str = "") -> tuple[str, Log]:
    cache = KVCache(KVLayout((LayerKV(2, 64),), torch.float32), 64, "cpu")
    log: Any = Log()
    found = [Candidate(name, missing if name == "absent" else "", make) for name, make in makers.items()]
    return choose_attention(asked, cache, 8, found, log).name, log


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (Inflated, "8/2 heads of 64 in float32: off by "),
        (NotANumber, "8/2 heads of 64 in float32: off by inf"),
        (Raising, "RuntimeError: unsupported architecture gfx000[)]"),
    ],
)
def test_wrong_backend_is_an_error_by_name_and_skipped_under_auto(wrong: Maker, why: str) -> None:
    makers: dict[str, Maker] = {"fast": wrong, "sdpa": SdpaAttention}
    with pytest.raises(UserError, match=f"'fast' cannot be used here: its self-test failed [(]{why}"):
        choose("fast", makers)
    name, log = choose("auto", makers)
    assert name == "sdpa"
    assert [(level, fields["backend"]) for level, _, fields in log.lines] == [
        ("warning", "fast"),
        ("info", "sdpa"),
    ]


def test_missing_backend_is_an_error_only_if_named() -> None:
    makers: dict[str, Maker] = {"absent": SdpaAttention, "sdpa": SdpaAttention}
    with pytest.raises(UserError, match="'absent' cannot be used here: it needs a GPU"):
        choose("absent", makers, missing="it needs a GPU")
    name, log = choose("auto", makers, missing="it needs a GPU")
    assert (name, len(log.lines)) == ("sdpa", 1)


def test_no_right_backend_is_an_error() -> None:
    with pytest.raises(UserError, match="no tree attention passes"):
        choose("auto", {"fast": Inflated, "sdpa": Inflated})


def test_auto_chooses_the_fastest_right_backend() -> None:
    """Wrong backends are not timed, and one that fails during timing is skipped too."""

    class Slower(SdpaAttention):
        pass

    class Failing(SdpaAttention):
        pass

    def seconds(make: Maker) -> float:
        if make is Failing:
            raise RuntimeError("out of memory\nand a long story")
        return 3e-3 if make is Slower else 2e-3

    cache = KVCache(KVLayout((LayerKV(2, 64),), torch.float32), 64, "cpu")
    makers: dict[str, Maker] = {
        "failing": Failing,
        "wrong": Inflated,
        "slower": Slower,
        "sdpa": SdpaAttention,
    }
    found = [Candidate(name, "", make) for name, make in makers.items()]
    log: Any = Log()
    assert choose_attention("auto", cache, 8, found, log, seconds).name == "sdpa"
    assert choose_attention("slower", cache, 8, found, None, seconds).name == "slower"
    assert log.lines[-1] == (
        "info",
        "tree attention",
        {"backend": "sdpa", "slower_us": 3000, "sdpa_us": 2000},
    )
    skipped = [fields["backend"] for level, _, fields in log.lines if level == "warning"]
    assert sorted(skipped) == ["failing", "wrong"]
    assert log.lines[0][2]["reason"] == "RuntimeError: out of memory"
    with pytest.raises(UserError, match="no tree attention"):
        choose_attention("auto", cache, 8, found[:2], None, seconds)


def test_forward_time_counts_every_layer() -> None:
    """Layers of one shape run one after the other in the same memory."""
    runs: list[int] = []

    class Counted(SdpaAttention):
        def run(self, layer: int, queries: torch.Tensor, plan: SdpaPlan) -> torch.Tensor:
            runs.append(layer)
            return queries

    full, window = LayerKV(2, 16), LayerKV(2, 16, 9)
    layout = KVLayout((full, window, full), torch.float32)
    assert attention_seconds(Counted, layout, 4, "cpu") > 0
    assert len(runs) % 3 == 0
    assert runs.count(0) == 2 * runs.count(1)
