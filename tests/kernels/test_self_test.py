"""A wrong tree attention is found out before it serves anybody: refused by name, or skipped under `auto`."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ssd_serve.cache.kv import KVCache, KVLayout, LayerKV
from ssd_serve.errors import UserError
from ssd_serve.kernels.backends import Candidate, choose_attention
from ssd_serve.kernels.batch import Batch
from ssd_serve.kernels.sdpa import SdpaAttention, SdpaPlan
from ssd_serve.kernels.self_test import RATIOS, Maker, first_failure, self_test

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Inflated(SdpaAttention):
    """The softmax denominator is 1.875 times too large: 1.0 in bf16 read as if it were fp16."""

    def run(self, layer: int, queries: torch.Tensor, plan: SdpaPlan) -> torch.Tensor:
        return super().run(layer, queries, plan) / 1.875


class WrongHead(SdpaAttention):
    """Under grouped-query attention a stacked row takes the mask of another row of its group."""

    def plan(self, batch: Batch) -> SdpaPlan:
        plan = super().plan(batch)
        for pieces in plan.pieces.values():
            for index, piece in enumerate(pieces):
                if piece.folded:
                    by_head = piece.mask.view(self._group, -1, piece.mask.shape[1])  # [group, rows, context]
                    mask = by_head.transpose(0, 1).reshape(piece.mask.shape)
                    pieces[index] = replace(piece, mask=mask)
        return plan


class NotANumber(SdpaAttention):
    """One output is no number, which compares false with everything."""

    def run(self, layer: int, queries: torch.Tensor, plan: SdpaPlan) -> torch.Tensor:
        out = super().run(layer, queries, plan)
        out[-1, -1] = torch.nan
        return out


class Raising(SdpaAttention):
    """A compiler that does not know this device."""

    def run(self, layer: int, queries: torch.Tensor, plan: SdpaPlan) -> torch.Tensor:
        raise RuntimeError("unsupported architecture gfx000\nand a long story")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_right_results_pass_in_every_dtype(dtype: torch.dtype, head_dim: int) -> None:
    trials = self_test(SdpaAttention, dtype, head_dim, "cpu")
    assert [(trial.heads.heads, trial.heads.kv_heads) for trial in trials] == list(RATIOS)
    assert all(trial.right for trial in trials)
    assert first_failure(SdpaAttention, dtype, head_dim, "cpu") == ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_inflated_denominator_is_found_in_every_ratio(dtype: torch.dtype) -> None:
    assert not any(trial.right for trial in self_test(Inflated, dtype, 64, "cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mask_of_another_head_is_found_wherever_heads_share_keys(dtype: torch.dtype) -> None:
    right = [trial.right for trial in self_test(WrongHead, dtype, 64, "cpu")]
    assert right == [heads == kv_heads for heads, kv_heads in RATIOS]


def test_what_is_wrong_is_said_in_words() -> None:
    assert "16/4 heads of 64 in bfloat16: off by" in first_failure(WrongHead, torch.bfloat16, 64, "cpu")
    assert "inf" in first_failure(NotANumber, torch.float32, 64, "cpu")
    assert first_failure(Raising, torch.float32, 64, "cpu") == "RuntimeError: unsupported architecture gfx000"


class Log:
    """Keeps what is logged."""

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


@pytest.mark.parametrize("wrong", [Inflated, WrongHead, NotANumber, Raising])
def test_a_wrong_backend_is_an_error_by_name_or_skipped_with_a_warning(wrong: Maker) -> None:
    makers: dict[str, Maker] = {"fast": wrong, "sdpa": SdpaAttention}
    with pytest.raises(UserError, match="'fast' cannot be used here: its self-test failed"):
        choose("fast", makers)
    name, log = choose("auto", makers)
    assert name == "sdpa"
    assert [(level, fields["backend"]) for level, _, fields in log.lines] == [
        ("warning", "fast"),
        ("info", "sdpa"),
    ]


def test_a_backend_that_is_not_there_is_named_only_when_it_was_asked_for() -> None:
    makers: dict[str, Maker] = {"absent": SdpaAttention, "sdpa": SdpaAttention}
    with pytest.raises(UserError, match="'absent' cannot be used here: it needs a GPU"):
        choose("absent", makers, missing="it needs a GPU")
    name, log = choose("auto", makers, missing="it needs a GPU")
    assert (name, len(log.lines)) == ("sdpa", 1)


def test_nothing_wrong_ever_serves() -> None:
    with pytest.raises(UserError, match="no tree attention passes"):
        choose("auto", {"fast": Inflated, "sdpa": Inflated})
