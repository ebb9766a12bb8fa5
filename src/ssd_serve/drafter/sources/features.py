"""Draft sources whose rows read vectors of the target: a committed token's row reads that of the position before it.

Knows committed tokens and features; not how a head computes.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ssd_serve.base.errors import ProtocolError
from ssd_serve.base.messages import SamplingParameters
from ssd_serve.cache.slots import SlotPool
from ssd_serve.cache.vectors import VectorTable
from ssd_serve.drafter.sources.contract import NodeRequest, Scales
from ssd_serve.drafter.sources.draft_model import MAX_PREFILL_ROWS, R, StepSource, in_order
from ssd_serve.drafter.sources.rows import DraftKvState
from ssd_serve.models.interface import Model
from ssd_serve.sampling.noise_rows import NoiseRows
from ssd_serve.sampling.ranking import NativeRanking


@dataclass(slots=True)
class TargetVectors:
    """The committed tokens of a request, and vectors of the target: a token's row reads that of the position before."""

    committed: list[int]
    table: VectorTable = field(default_factory=VectorTable)

    def add(self, held: DraftKvState, pool: SlotPool, position: int, vectors: torch.Tensor) -> bool:
        """Add vectors [positions, hidden] from `position` on; after a gap, forget all earlier ones and return True."""
        gap = position != self.table.end or not len(self.table)
        if gap:
            pool.free(held.take_slots())
            held.start, held.tokens = position + 1, []
            self.table.begin(position)
        self.table.extend(vectors)
        self.queue(held)
        return gap

    def queue(self, held: DraftKvState) -> None:
        """Queue committed tokens that follow a position with a vector."""
        end = min(len(self.committed), self.table.end + 1) if len(self.table) else 0
        held.tokens.extend(self.committed[held.start + len(held.tokens) : end])

    def complete(self, held: DraftKvState) -> bool:
        """True if all committed tokens, after a gap all since, are queued."""
        return bool(held.tokens) and held.start + len(held.tokens) == len(self.committed)


class FeatureStepSource(StepSource[R]):
    """Expands nodes of requests with a vector for each committed token before the root."""

    def __init__(
        self,
        model: Model,
        pool: SlotPool,
        noise: NoiseRows,
        fan_out: int,
        native: NativeRanking | None = None,
        prefill_rows: int = MAX_PREFILL_ROWS,
    ) -> None:
        super().__init__(model, pool, noise, fan_out, native, prefill_rows)
        self._known: dict[int, TargetVectors] = {}

    @property
    @abstractmethod
    def _width(self) -> int:
        """Numbers of the target's features at one position."""

    @abstractmethod
    def _vectors(self, features: torch.Tensor) -> torch.Tensor:
        """Map features [positions, width] to vectors [positions, hidden]."""

    def open(self, request: int, tokens: Sequence[int], parameters: SamplingParameters, seed: int) -> None:
        super().open(request, (), parameters, seed)
        self._known[request] = TargetVectors(list(tokens))

    def close(self, request: int) -> None:
        super().close(request)
        self._known.pop(request, None)

    def commit(self, request: int, tokens: Sequence[int], path: Sequence[int], kept: Sequence[int]) -> None:
        """Accepted nodes become committed tokens, which are computed again with their features."""
        held, known = self.held[request], self._known[request]
        self.pool.free([slot for name in path if (slot := held.nodes.pop(name, None)) is not None])
        super().commit(request, (), (), kept)
        known.committed.extend(tokens)
        known.queue(held)

    def read(self, request: int, position: int, features: torch.Tensor) -> None:
        """Take features of committed tokens; see `FeatureSource.read`. After a gap, earlier ones are forgotten."""
        if position < 0 or features.shape[1] != self._width:
            raise ProtocolError(
                f"features have width {features.shape[1]}, not {self._width}, or a negative position"
            )
        if request in self._known:
            self.add(request, position, self._vectors(features))

    def add(self, request: int, position: int, vectors: torch.Tensor) -> bool:
        """Take vectors [positions, hidden] of committed tokens; return True after a gap."""
        return self._known[request].add(self.held[request], self.pool, position, vectors)

    def expand(self, requests: Sequence[NodeRequest], scales: Sequence[Scales]) -> Sequence[R | None]:
        """Run one forward for the nodes with complete inputs."""
        ready = [index for index, each in enumerate(requests) if self._can_grow(each)]
        found = super().expand([requests[index] for index in ready], [scales[index] for index in ready])
        return in_order(found, ready, len(requests))

    def _can_grow(self, request: NodeRequest) -> bool:
        """Hook: return True if the node's inputs are known; here, all committed tokens have vectors."""
        return self._known[request.request].complete(self.held[request.request])
