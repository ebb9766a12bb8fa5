"""A model with forwards on a GPU that are captured once for each shape and then replayed.

Launching the kernels of a small forward takes longer on the host than the forward on the GPU. Batches are
padded to a few row counts. Forwards that cannot be captured run eagerly, and so do all forwards after a
failed capture. Knows the two parts of a model's forward, not requests.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch

from ssd_serve.base.errors import CaptureError, in_a_line
from ssd_serve.base.logs import Logger
from ssd_serve.kernels.attention.contract import Capturable
from ssd_serve.kernels.batch import Batch, padded
from ssd_serve.kernels.device import MAX_CAPTURED_ROWS, CapturedGraph, GraphCapture, captured_rows, completion
from ssd_serve.models.interface import CapturableModel, ForwardResult, Inputs
from ssd_serve.models.parallel import Group
from ssd_serve.models.warmup import one_tree, single_rows
from ssd_serve.models.wrapped import WrappedModel

MAX_GRAPHS = 256
_FEW_ROWS = 64
"""Up to this number of rows all logits are computed where few are wanted: still faster than no capture."""
_AHEAD = (2048, 1)
"""Contexts for which forwards are captured in advance; most requests resemble one of them."""


@dataclass(frozen=True, slots=True)
class _Forward:
    """A captured forward and its features, which every replay overwrites."""

    graph: CapturedGraph
    features: Mapping[str, torch.Tensor]


class CapturedModel(WrappedModel):
    """`Model` over another with attention that can be captured.

    `padding_slot` is a KV slot that no request has.
    """

    def __init__(
        self,
        model: CapturableModel,
        capturable: Capturable,
        capture: GraphCapture,
        padding_slot: int,
        *,
        group: Group | None = None,
        log: Logger | None = None,
    ) -> None:
        super().__init__(model)
        self._runs = model
        self._capturable = capturable
        self._graphs = capture
        self._padding_slot = padding_slot
        self._group = group or Group()
        self._log = log
        self._device = torch.device(model.facts.device)
        # Tokens, then positions.
        self._rows = torch.zeros((2, MAX_CAPTURED_ROWS), dtype=torch.int64, device=self._device)
        # One for all graphs: each would keep its own.
        self._logits = torch.zeros((MAX_CAPTURED_ROWS, model.facts.vocabulary), device=self._device)
        self._forwards: dict[tuple[int, Hashable], _Forward] = {}
        self._failed = False

    @property
    def graphs(self) -> int:
        """Number of captured forwards."""
        return len(self._forwards)

    @property
    def row_counts(self) -> frozenset[int]:
        """Row counts of which some forward is captured."""
        return frozenset(rows for rows, _ in self._forwards)

    @property
    def captured_bytes(self) -> int:
        """Memory that the graphs hold."""
        return sum(each.graph.bytes for each in self._forwards.values())

    def capture_ahead(self, most_rows: int = MAX_CAPTURED_ROWS) -> None:
        """Capture forwards of a tree of one request and of single rows of many, for each row count up to
        `most_rows`. The largest is first, as the others reuse its memory. Other shapes are captured on
        first use.

        Writes only garbage into KV slots: call it before any request runs.
        """
        room = min(self.slots, self.facts.context) - 1
        counts = [rows for rows in range(most_rows, 0, -1) if captured_rows(rows) == rows]
        batches = (
            make(rows, context)
            for rows, context in product(counts, _AHEAD)
            if rows + context <= room
            for make in (one_tree, single_rows)
        )
        reasons = {self._capture_one_ahead(batch) for batch in batches} - {""}
        if self._log is None:
            return
        self._log.info("forwards captured", graphs=self.graphs, mib=self.captured_bytes >> 20)
        if reasons:
            self._log.warning(
                "forwards are not captured until they are met", reason="; ".join(sorted(reasons))
            )

    @torch.inference_mode()
    def _capture_one_ahead(self, batch: Batch) -> str:
        """Why it cannot be captured; empty: it is, or it never is. It is tried again when it is met."""
        inputs = self._inputs(batch)
        key = self._key(inputs)
        if key is None or key in self._forwards:
            return ""
        forward, reason = self._capture(inputs)
        if forward is not None:
            self._forwards[key] = forward
        return reason

    @torch.inference_mode()
    def forward(self, batch: Batch) -> ForwardResult:
        """Logits are good until the next forward."""
        rows = captured_rows(batch.rows)
        # All rows' logits are computed; where few of many are wanted, as in a prompt, that would not pay.
        few_wanted = batch.rows > _FEW_ROWS and 2 * len(batch.rows_wanted) < batch.rows
        if rows is None or self._failed or few_wanted:
            return self._model.forward(batch)
        inputs = self._inputs(padded(batch, rows, self._padding_slot))
        key = self._key(inputs)
        forward, includes_capture = (None, False) if key is None else self._captured(inputs, key)
        if forward is None:
            return replace(self._model.forward(batch), includes_capture=includes_capture)
        # Before the replay: the host would wait for it, on ROCm whether the copy is to block or not.
        wanted = None
        if len(batch.rows_wanted) < batch.rows:
            wanted = torch.from_numpy(batch.rows_wanted).to(self._device)
        forward.graph.replay()
        logits = self._logits[: batch.rows]
        if wanted is not None:
            logits = logits.index_select(0, wanted)
        features = {name: values[: batch.rows] for name, values in forward.features.items()}
        return ForwardResult(logits, features, completion(self._device), includes_capture)

    def _inputs(self, batch: Batch) -> Inputs:
        """The batch in fixed memory, all logits wanted; without a plan where it cannot be captured."""
        tokens, positions = self._rows[:, : batch.rows]
        tokens.copy_(torch.from_numpy(batch.tokens))
        positions.copy_(torch.from_numpy(batch.positions))
        return Inputs(tokens, positions, self._capturable.plan_to_capture(batch))

    def _key(self, inputs: Inputs) -> tuple[int, Hashable] | None:
        """Return the key of the graph that serves these inputs; None: they cannot be captured."""
        shape = None if inputs.plan is None else self._capturable.captured_as(inputs.plan)
        return None if shape is None else (len(inputs.tokens), shape)

    def _captured(self, inputs: Inputs, key: tuple[int, Hashable]) -> tuple[_Forward | None, bool]:
        """The graph for forwards like this one, made now if there is none (None: there can be none), and
        whether that was tried now."""
        found = self._forwards.get(key)
        if found is not None or len(self._forwards) >= MAX_GRAPHS:
            return found, False
        forward, reason = self._capture(inputs)
        # Ranks pad their batches alike or not at all: what one of them cannot capture, none replays.
        if not self._group.agree(forward is not None) or forward is None:
            self._failed = True
            if self._log is not None:
                self._log.warning(
                    "forwards are not captured: kernels are launched one by one, which is slower",
                    reason=reason or "another rank cannot capture them",
                )
            return None, True
        self._forwards[key] = forward
        if self._log is not None:
            mib = self.captured_bytes >> 20
            self._log.info("forward captured", rows=key[0], graphs=len(self._forwards), mib=mib)
        return forward, True

    def _capture(self, inputs: Inputs) -> tuple[_Forward | None, str]:
        """A captured forward, or why there can be none."""

        def work() -> Mapping[str, torch.Tensor]:
            logits, features = self._runs.run(inputs)
            self._logits[: len(logits), : logits.shape[1]].copy_(logits)  # a rank's share, or all
            return features

        try:
            self._graphs.warm_up(work)
        except Exception as error:  # any error of a foreign kernel or its compiler
            # The others wait in a sum of this forward, and would take a vote for its numbers.
            if self._group.parallel.size > 1:
                raise
            return None, in_a_line(error)
        completion(self._device).wait()
        self._group.quiesce()
        try:
            graph, features = self._graphs.capture(work)
        except CaptureError as error:
            return None, str(error)
        return _Forward(graph, features), ""
