"""A Ray cluster of simulated nodes on this machine, one of which can be removed like a machine that fails."""

import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import psutil  # type: ignore[import-untyped]

from ssd_serve.base.errors import UserError

_OBJECT_BYTES = 80 << 20
_CORES = 2
"""Cores of a node: one for the target, one for the drafter."""
_ACTOR = "RoleActor"


@contextmanager
def two_nodes() -> Generator[tuple[str, Callable[[], None]]]:
    """Yield the address of a cluster with two nodes, and a function that removes the node with the target."""
    try:
        simulated: Any = importlib.import_module("ray.cluster_utils")
    except ImportError as error:
        raise UserError("a lost node needs Ray: pip install 'ssd-serve[ray]'") from error
    head = {"num_cpus": 0, "object_store_memory": _OBJECT_BYTES, "include_dashboard": False}
    cluster: Any = simulated.Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.add_node(num_cpus=_CORES, object_store_memory=_OBJECT_BYTES) for _ in range(2)]

        def lose() -> None:
            cluster.remove_node(next(filter(_works, nodes)), allow_graceful=False)

        yield str(cluster.address), lose
    finally:
        cluster.shutdown()


def _works(node: Any) -> bool:
    """Return True if an actor runs on this node."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return any(_ACTOR in " ".join(child.cmdline()) for child in raylet.children(recursive=True))
