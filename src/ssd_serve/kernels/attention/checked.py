"""Tree attention that is watched while it serves: some live batches are computed on a second backend too.

Both read the same cache, so that every difference is caused by the kernel. Knows backends and batches; a
callback receives the differences.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ssd_serve.base.logs import Logger
from ssd_serve.kernels.attention.contract import AttentionBackend
from ssd_serve.kernels.attention.self_test import ALLOWED
from ssd_serve.kernels.batch import Batch

EVERY = 64
"""Interval of checked forwards: their attention is computed twice."""
_LOGGED = 8
_LEAST = 1e-3
"""Below this largest output of a row and head, rounding of the averaged values may explain a difference."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first output that differs by more than rounding: in the batch's order of requests and rows."""

    layer: int
    request: int
    row: int
    """Among the request's rows."""
    head: int
    error: float
    """Largest difference of that row and head, as a multiple of what rounding explains."""


@dataclass(frozen=True, slots=True)
class CheckedPlan:
    """The plan of the backend that serves, and that of the second one where this forward is checked."""

    served: Any
    second: Any
    request_offsets: np.ndarray


class DifferenceLog:
    """Counts differences, and logs the first ones."""

    def __init__(self, log: Logger) -> None:
        self.count = 0
        self._log = log

    def __call__(self, difference: Difference) -> None:
        self.count += 1
        if self.count <= _LOGGED:
            self._log.warning("tree attention differs from the second backend's", **asdict(difference))


class CheckedAttention:
    """`AttentionBackend` that serves `served` and compares some forwards with `second`, over one cache."""

    def __init__(
        self,
        served: AttentionBackend[Any],
        second: AttentionBackend[Any],
        report: Callable[[Difference], None],
        every: int = EVERY,
    ) -> None:
        self._served = served
        self._second = second
        self._report = report
        self._every = every
        self._forwards = 0

    @property
    def dtype(self) -> torch.dtype:
        return self._served.dtype

    def plan(self, batch: Batch) -> CheckedPlan:
        """Plan for both where this forward's turn has come."""
        checked = self._forwards % self._every == 0
        self._forwards += 1
        return CheckedPlan(
            self._served.plan(batch), self._second.plan(batch) if checked else None, batch.request_offsets
        )

    def write(self, layer: int, stored: torch.Tensor, plan: CheckedPlan) -> None:
        self._served.write(layer, stored, plan.served)

    def run(self, layer: int, queries: torch.Tensor, plan: CheckedPlan) -> torch.Tensor:
        result = self._served.run(layer, queries, plan.served)
        if plan.second is not None:
            expected = self._second.run(layer, queries, plan.second)
            self._compare(layer, result.view(queries.shape), expected.view(queries.shape), plan)
        return result

    def run_with_lse(
        self, layer: int, queries: torch.Tensor, plan: CheckedPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `AttentionBackend`; not checked."""
        return self._served.run_with_lse(layer, queries, plan.served)

    def _compare(self, layer: int, found: torch.Tensor, expected: torch.Tensor, plan: CheckedPlan) -> None:
        """Outputs are [rows, heads, head_dim]. Rounding grows with the values."""
        expected = expected.float()
        # [rows, heads]: an average over a long context may be small everywhere.
        allowed = ALLOWED[found.dtype] * expected.abs().amax(dim=2).clamp(min=_LEAST)
        errors = torch.nan_to_num((found.float() - expected).abs(), nan=torch.inf).amax(dim=2) / allowed
        wrong = torch.nonzero(errors > 1.0)  # [differing, 2], by row, then by head
        if len(wrong):
            row, head = (int(value) for value in wrong[0])
            request = int(np.searchsorted(plan.request_offsets, row, side="right")) - 1
            first = int(plan.request_offsets[request])
            self._report(Difference(layer, request, row - first, head, float(errors[row, head])))
