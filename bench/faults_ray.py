"""A Ray cluster of simulated nodes on this machine, one of which can be lost like a machine that fails.

Knows Ray's own means of testing; no engine and no clients.
"""

import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from ssd_serve.errors import UserError

_OBJECT_BYTES = 80 << 20
_CORES = 2
"""Of a node: one for the target, one for the drafter."""


@contextmanager
def two_nodes() -> Generator[tuple[str, Callable[[], None]]]:
    """Gives the address of a cluster with one node, and what loses it after another one has come.

    The head has no cores, so that everything is on that one node.
    """
    try:
        simulated: Any = importlib.import_module("ray.cluster_utils")
    except ImportError as error:
        raise UserError("a lost node needs Ray: pip install 'ssd-serve[ray]'") from error
    head = {"num_cpus": 0, "object_store_memory": _OBJECT_BYTES, "include_dashboard": False}
    cluster: Any = simulated.Cluster(initialize_head=True, head_node_args=head)

    def add() -> Any:
        return cluster.add_node(num_cpus=_CORES, object_store_memory=_OBJECT_BYTES)

    try:
        first = add()

        def lose() -> None:
            add()
            cluster.remove_node(first, allow_graceful=False)

        yield str(cluster.address), lose
    finally:
        cluster.shutdown()
