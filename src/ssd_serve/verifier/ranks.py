"""The target on several ranks: rank 0 in the verifier, each other one in its own process.

Rank 0 sends the model's path and the number of cache slots; then all load their shares at the same time.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from ssd_serve.base.engine_config import EngineConfig
from ssd_serve.base.logs import get_logger
from ssd_serve.base.resources import Heap, settle_memory
from ssd_serve.kernels.attention.checked import DifferenceLog
from ssd_serve.kernels.native.library import native_library
from ssd_serve.models.interface import Model
from ssd_serve.models.load import load_served
from ssd_serve.models.memory import available_memory
from ssd_serve.models.parallel import Parallel, TorchGroup, join_group
from ssd_serve.models.sizes import torch_device
from ssd_serve.models.wrapped import LeaderModel, follow
from ssd_serve.transport.listener import Listener
from ssd_serve.transport.rank_sockets import Follower, Leader, RankFiles


class Beginning(msgspec.Struct, frozen=True):
    """Values that rank 0 decides for all ranks before they load."""

    path: str
    slots: int


class LeadingRank:
    """Rank 0, which listens from the start so that the others need not wait."""

    def __init__(self, config: EngineConfig, files: RankFiles) -> None:
        self._config = config
        self._files = files
        files.store.unlink(missing_ok=True)
        self._listener = Listener.unix(files.socket)

    def meet(self) -> Leader:
        """Return the connections of the other ranks, once all have connected."""
        leader = Leader.accept_all(self._listener, self._config.tensor_parallel)
        self._listener.close()
        return leader

    def load(self, leader: Leader, path: Path, slots: int, share: Callable[..., Model]) -> Model:
        """Return the whole model, once all ranks have loaded; `share(group=...)` loads this one's."""
        leader.broadcast(msgspec.json.encode(Beginning(str(path), slots)))
        model = share(group=_join(self._config, 0, self._files))
        leader.wait_ready()
        return LeaderModel(model, leader.broadcast)


def run(config: EngineConfig, rank: int, files: RankFiles) -> None:
    """Body of the process of rank 1, 2, ...: load a share and follow rank 0 until it is gone."""
    name = f"rank-{rank}"
    device = config.rank_device(rank)
    log = get_logger(name, config.log_level, config.log_format)
    free = available_memory(torch_device(device))
    link = Follower.connect(files.socket, rank, free)
    message = link.receive()
    if message is None:
        return
    beginning = msgspec.json.decode(message, type=Beginning)
    model = load_served(
        config,
        Path(beginning.path),
        device,
        beginning.slots,
        native_library(config, log),
        log,
        DifferenceLog(log),
        batch_invariant=config.batch_invariant,
        group=_join(config, rank, files),
    )
    settle_memory()
    link.send_ready()
    heap = Heap()

    def receive() -> bytearray | None:
        heap.trim_when_due()
        return link.receive()

    follow(model, receive)


def _join(config: EngineConfig, rank: int, files: RankFiles) -> TorchGroup:
    return join_group(
        files.store,
        Parallel(rank, config.tensor_parallel),
        torch_device(config.rank_device(rank)),
        ordered=config.batch_invariant,
    )
