"""A connection to a Ray cluster: the one that the user names, or one started on this machine; Ray's token.

Without a token Ray runs code of any client that reaches its ports. A Ray that is started here requires one,
and a Ray without one is reported. Run as a program, this module prints Ray's resources as JSON."""

import contextlib
import importlib
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ssd_serve.base.devices import this_machine
from ssd_serve.base.errors import SettingsError, in_a_line
from ssd_serve.base.logs import Logger
from ssd_serve.base.resources import probe
from ssd_serve.base.settings import RAY_VARIABLE, Settings
from ssd_serve.base.settings_sources import visible_gpus
from ssd_serve.cluster.process import hidden_secrets
from ssd_serve.cluster.ray.placement import RayNode, node_of

_MODE, _TOKEN, _TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_ASK_S = 5.0
_QUESTION = "/ray.rpc.NodeInfoGcsService/CheckAlive"


def prepare_token(environment: MutableMapping[str, str], *, joining: bool) -> None:
    """Set missing variables of Ray's token before Ray is imported. A Ray that is started here gets a random token
    that is not written to disk. A joined Ray gets its token, if there is one. Set variables are kept."""
    if "ray" in sys.modules:
        return  # too late: a Ray that is started now makes its own token file
    has_token = _TOKEN in environment or _TOKEN_FILE in environment
    if has_token or not joining:
        environment.setdefault(_MODE, "token")
    if not has_token and not joining and environment[_MODE] == "token":
        environment[_TOKEN] = secrets.token_hex(32)


def warn_without_token(ray: Any, log: Logger) -> None:
    """Log a warning if the joined cluster accepts clients without a token."""
    if answers_without_token(str(ray.get_runtime_context().gcs_address)):
        log.warning(
            "this Ray cluster runs code of any client that reaches its ports",
            advice="start all its nodes with RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN",
        )


def answers_without_token(address: str) -> bool:
    """True if Ray's directory at `host:port` answers a client without a token. Raises nothing."""
    try:
        grpc: Any = importlib.import_module("grpc")
    except ImportError:
        return False
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_QUESTION)(b"", timeout=_ASK_S)
        except grpc.RpcError:
            return False
    return True


NAMESPACE = "ssd-serve"
_OBJECT_BYTES = 80 << 20
"""Size of Ray's object store, near the minimum that Ray accepts: it carries control messages, no tensors."""
_LAST_WORDS_S, _LOOK_EVERY_S = 5.0, 0.05
_LONGEST_TEMPORARY = 24
"""Longest name of a temporary folder: paths of Ray's sockets below it may have 107 bytes."""
_NOTHING_AHEAD = {"prestart_worker_first_driver": False, "enable_worker_prestart": False}
"""Disables prestarted workers, since they lack the environment of the actors."""
_BEFORE_IMPORT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Variables that Ray reads on import."""


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A joined cluster. `ray` is the module; its types are not strict."""

    ray: Any

    @property
    def nodes(self) -> list[RayNode]:
        """Nodes that are alive."""
        return [node_of(entry) for entry in self.ray.nodes() if entry["Alive"]]

    @property
    def own_node(self) -> str:
        """The id of the node that this process is on."""
        return str(self.ray.get_runtime_context().get_node_id())

    def bundle_nodes(self, group: Any) -> dict[int, str]:
        """The nodes of a placement group's bundles; empty while some bundle has none."""
        table: Mapping[str, Any] = self.ray.util.placement_group_table(group)
        if table["state"] != "CREATED":
            return {}
        return {int(index): str(node) for index, node in table["bundles_to_node_id"].items()}


@contextmanager
def ray_cluster(settings: Settings) -> Generator[RayCluster]:
    """Join a cluster for the length of a `with` block; an existing connection is used and kept open."""
    visible_gpus()  # raises if the variables contradict each other
    prepare_token(os.environ, joining=bool(settings.ray_address))
    ray = _import_ray()
    if ray.is_initialized():
        yield RayCluster(ray)
        return
    with contextlib.ExitStack() as stack:
        options = _joining(settings) if settings.ray_address else _starting(stack)
        stack.callback(ray.shutdown)
        try:
            with _own_signals(), hidden_secrets():
                ray.init(namespace=NAMESPACE, configure_logging=False, log_to_driver=True, **options)
        except Exception as error:
            where, advice = "on this machine", ""
            if settings.ray_address:
                where = f"at {settings.ray_address}"
                advice = " (where it asks for a token, set RAY_AUTH_TOKEN to it here too)"
            raise SettingsError(f"Ray {where} cannot be used: {in_a_line(error)}{advice}") from error
        yield RayCluster(ray)


def _import_ray() -> Any:
    for name, value in _BEFORE_IMPORT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise SettingsError(
            "SSD_LAUNCHER=ray, or RAY_ADDRESS, needs Ray: pip install 'ssd-serve[ray]', "
            "or set SSD_LAUNCHER=local"
        ) from error


def _joining(settings: Settings) -> dict[str, object]:
    address = settings.ray_address or ""
    if address.startswith("ray://"):
        raise SettingsError(
            f"the Ray address {address} is a client's: this process must be on a node of the cluster; "
            "write host:port, or auto"
        )
    return {"address": address}


def _starting(stack: contextlib.ExitStack) -> dict[str, object]:
    machine = this_machine()
    options: dict[str, object] = {
        "address": "local",
        "num_cpus": len(machine.cores),
        # Ray detects AMD's GPUs only with a package that ROCm does not install for every Python.
        "num_gpus": machine.gpus,
        "include_dashboard": False,
        "object_store_memory": _OBJECT_BYTES,
        "_system_config": dict(_NOTHING_AHEAD),  # Ray writes into it
    }
    usual = tempfile.gettempdir()
    short = len(os.fsencode(usual)) <= _LONGEST_TEMPORARY
    folder = Path(tempfile.mkdtemp(prefix="ssd-ray-", dir=usual if short else "/tmp"))
    stack.callback(_remove, folder)
    return {**options, "_temp_dir": str(folder)}


def _remove(folder: Path) -> None:
    """Remove a folder that Ray's processes write into until they have ended."""
    deadline = time.monotonic() + _LAST_WORDS_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_LOOK_EVERY_S)


@contextmanager
def _own_signals() -> Generator[None]:
    """Restore the signal handlers that Ray replaces when it starts, since the server needs them to shut down."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


_TIMEOUT_S = 60.0
_PROGRAM = (sys.executable, "-m", "ssd_serve.cluster.ray.cluster")
_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0"}
_ACCELERATOR = "accelerator_type:"


@dataclass(frozen=True, slots=True)
class RayView:
    """Counts of cores and GPUs, and Ray's names of the kinds of GPU; or why there is no answer."""

    cores: int = 0
    gpus: int = 0
    kinds: tuple[str, ...] = ()
    failure: str = ""


def ray_view(timeout_s: float = _TIMEOUT_S, program: Sequence[str] = _PROGRAM) -> RayView:
    """Resources that Ray sees, or the reason why they are unknown. Raises nothing."""
    answer = probe(program, timeout_s, _VARIABLES)
    if answer.failure:
        return RayView(failure=answer.failure)
    try:
        found: dict[str, float] = json.loads(answer.printed.splitlines()[-1])
        counts = {str(name): int(count) for name, count in found.items()}
    except (ValueError, IndexError, AttributeError, TypeError):
        return RayView(failure=f"an answer that is none: {answer.printed[-80:]!r}")
    kinds = sorted(name.removeprefix(_ACCELERATOR) for name in counts if name.startswith(_ACCELERATOR))
    return RayView(counts.get("CPU", 0), counts.get("GPU", 0), tuple(kinds))


def main() -> int:
    """Print Ray's resources as JSON."""
    prepare_token(os.environ, joining=RAY_VARIABLE in os.environ)
    import ray

    ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        print(json.dumps(cast(Any, ray).cluster_resources()))
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
