"""A model on several ranks in one process: a thread a rank, which meet through gloo as processes do."""

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from ssd_serve.models.interface import Model
from ssd_serve.models.load import ModelOptions, load_model
from ssd_serve.models.parallel import Group, Parallel, join_group
from ssd_serve.models.wrapped import LeaderModel, follow

T = TypeVar("T")
SLOTS = 256


def in_ranks(
    store: Path, size: int, work: Callable[[Group], T], *, ordered: bool = False, patience_s: float = 30.0
) -> list[T]:

    def run(rank: int) -> T:
        torch.set_num_threads(1)
        return work(join_group(store, Parallel(rank, size), "cpu", ordered=ordered, patience_s=patience_s))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@contextmanager
def ranked(folder: Path, store: Path, size: int, **options: Any) -> Generator[Model]:
    """Rank 0's model; the other ranks follow it in threads until the end."""
    ordered = bool(options.get("batch_invariant"))
    options = {"slots": SLOTS, "context": None, **options}

    def load(group: Group) -> Model:
        return load_model(folder, ModelOptions(device="cpu", **options), group=group)

    models = in_ranks(store, size, load, ordered=ordered)
    told: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in models[1:]]

    def tell(message: bytes) -> None:
        for each in told:
            each.put(message)

    def hear(queue: "SimpleQueue[bytes | None]") -> Callable[[], bytearray | None]:
        return lambda: None if (message := queue.get()) is None else bytearray(message)

    with ThreadPoolExecutor(size) as pool:
        following = [
            pool.submit(follow, model, hear(queue)) for model, queue in zip(models[1:], told, strict=True)
        ]
        try:
            yield LeaderModel(models[0], tell)
        finally:
            for queue in told:
                queue.put(None)
        for each in following:
            each.result()
