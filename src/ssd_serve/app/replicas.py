"""Run replicas of the server behind one address, on Ray Serve; each has its own front end and engine.

A Serve configuration imports `app` (`import_path: ssd_serve.app.replicas:app`). Ray Serve owns port and TLS,
routes each request to the replica with the fewest requests, and starts and replaces replicas.
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, cast

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import BackpressureConfig
from ray.serve.exceptions import RayServeException
from starlette.middleware import Middleware

from ssd_serve.base.devices import Machine, parse_device, this_machine
from ssd_serve.base.engine_config import Mode
from ssd_serve.base.errors import EngineDeadError, SettingsError
from ssd_serve.base.logs import Logger, get_logger
from ssd_serve.base.resources import settle_memory
from ssd_serve.base.settings import SECRETS, Settings
from ssd_serve.base.settings_sources import refuse_empty_keys, rename_hint, resolve, variable_name
from ssd_serve.cluster.health import WorkerDiedError
from ssd_serve.cluster.launch import RunningEngine
from ssd_serve.cluster.local import local_engine
from ssd_serve.cluster.placement import find_models
from ssd_serve.cluster.ray.cluster import warn_without_token
from ssd_serve.cluster.ray.launcher import ray_engine
from ssd_serve.models.text.tokenizer import Tokenizer
from ssd_serve.server.access.auth import AllowedHosts, allowed_hosts, exposure_warnings
from ssd_serve.server.access.keys import read_keys
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.http.app import create_app
from ssd_serve.server.limits import Limits
from ssd_serve.server.observability.metrics import ServerMetrics, join_pages
from ssd_serve.server.text import LoadedTokenizer

DEPLOYMENT = "ssd"
_PROXYS = {
    "host": "http_options.host",
    "port": "http_options.port",
    "tls_certificate": "http_options.ssl_certfile",
    "tls_key": "http_options.ssl_keyfile",
}
"""Settings of a listening server, with the fields of a Serve config that replace them."""
_LOOK_EVERY_S = 0.1
_FAREWELL_S = 0.5
"""Time from the engine's death to the replica's exit, in which running requests receive their errors."""
_SPARE_REQUESTS = 8
"""Requests above the decoding limit, so that health checks and scrapes reach a busy replica."""
_LAST_WORDS_S = 10
_PAGES_WITHIN_S = 3.0
_PLACE_S = 86400.0
"""Timeout for resources. Serve starts replicas before a node with free resources has joined, and stops trying
after several failed starts, so a replica waits instead."""


def app(arguments: dict[str, Any]) -> serve.Application:
    """Return the application of a Serve config; its `args` are settings by field name. Other settings come from
    the `SSD_` variables of the replica's machine. Wrong ones raise `SettingsError`."""
    options = deployment_options(replica_settings(arguments))
    # Serve adds attributes to the class that mypy does not know.
    replica: Any = serve.ingress()(ServerReplica)
    deployment: Any = cast(Any, serve).deployment(**options)(replica)
    application: serve.Application = deployment.bind(arguments)
    return application


def deployment_options(settings: Settings) -> dict[str, Any]:
    """Return Ray Serve's options of replicas with these settings; a Serve config may override them."""
    return {
        "name": DEPLOYMENT,
        "max_ongoing_requests": settings.max_running + _SPARE_REQUESTS,
        "max_queued_requests": settings.max_waiting,
        "backpressure_config": BackpressureConfig(status_code=429, retry_after_s=1.0),
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": settings.drain_seconds + _LAST_WORDS_S,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 30.0,
        # An error that three starts do not fix is permanent: `serve status` shows it.
        "max_constructor_retry_count": 3,
        "ray_actor_options": resources(settings),
    }


def resources(settings: Settings) -> dict[str, int]:
    """Return the resources of one replica: the named GPUs, counted from cuda:0, and a core for each process on
    cores. With GPUs the front end gets a core too. With the launcher `ray` only the front end's core is
    counted: the engine requests its own resources."""
    if settings.launcher == "ray":
        return {"num_cpus": 1}
    named = (settings.target_device, settings.draft_device)
    devices = [parse_device(text) for text in named if text is not None]
    gpus = max((1 + index for each in devices if each.kind == "cuda" for index in each.indices), default=0)
    drafters = 0 if settings.mode is Mode.AR else settings.drafters or len(settings.draft_models)
    workers = settings.tensor_parallel + drafters
    return {"num_cpus": workers + 1, "num_gpus": gpus} if gpus else {"num_cpus": workers}


def replica_settings(arguments: Mapping[str, Any]) -> Settings:
    """Return the settings of one replica. Raises `SettingsError` for unknown or wrong ones, and for the proxy's."""
    for name in arguments:
        if name not in Settings.model_fields:
            hint = rename_hint(name, str)
            raise SettingsError(f"args: '{name}' is not a setting{hint} (`ssd settings` lists all)")
        if name in SECRETS:
            raise SettingsError(
                f"args: '{name}' is a secret, and Ray's dashboard shows args to its users: set "
                f"{variable_name(name)} in the containers' environment, from a Kubernetes secret"
            )
        if name in _PROXYS:
            raise SettingsError(f"args: '{name}' is the proxy's: set {_PROXYS[name]} in the Serve config")
    settings = resolve(arguments)
    if settings.metrics_port is not None:
        raise SettingsError("replicas share one port: SSD_METRICS_KEY instead of SSD_METRICS_PORT")
    return settings


def cores_of(machine: Machine, count: int, rank: int) -> Machine:
    """Return the `count` cores for replica number `rank` of this machine: Ray counts cores but binds no process.
    If there are too few cores, or `count` is 0, the replica gets all of them."""
    parts = len(machine.cores) // count if count else 0
    if parts < 2:
        return machine
    first = count * (rank % parts)
    return Machine(machine.cores[first : first + count], machine.gpus)


def check_keys(settings: Settings, log: Logger) -> None:
    """Check the API keys before models load: raise for wrong ones, and warn if there are none. Replicas do not
    know on which addresses Serve's proxies listen; in Pods they listen on all."""
    refuse_empty_keys()
    if settings.api_keys_file is not None:
        read_keys(settings.api_keys_file)
    for warning in exposure_warnings(settings, loopback=False):
        log.warning(warning)


class ServerReplica:
    """A front end and its engine in one process of Ray. It is ready when it has been constructed."""

    async def __init__(self, arguments: dict[str, Any]) -> None:  # type: ignore[misc]
        """Start the engine and wait until it can generate. Raises why it cannot."""
        context = serve.get_replica_context()
        self._name = context.replica_tag
        self._handle = serve.get_deployment_handle(context.deployment, context.app_name)
        self._settings = replica_settings(arguments)
        self._log = get_logger(f"replica-{self._name}", self._settings.log_level, self._settings.log_format)
        self._limits = Limits()
        check_keys(self._settings, self._log)
        self._parts = ExitStack()
        try:
            self._engine = await asyncio.to_thread(self._start_engine, context.rank.local_rank)
            self._client = EngineClient()
            self._client.start()
            self._client.target = self._engine.config.target
            self._client.attach(await asyncio.to_thread(self._engine.connect), self._engine)
            await self._ready()
        except BaseException:
            self._parts.close()
            raise
        self._watching = asyncio.create_task(self._watch())

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application of `ssd serve`. Ray Serve calls this after the constructor."""
        # Only if hosts are named: the proxies' address is unknown here.
        hosts = allowed_hosts(self._settings, loopback=False)
        application = create_app(
            self._settings,
            self._client,
            self._tokenizer,
            self._limits,
            metrics_page=self._all_pages,
            guards=[] if hosts is None else [Middleware(AllowedHosts, allowed=hosts)],
        )
        self._metrics: ServerMetrics = application.state.metrics
        return application

    async def check_health(self) -> None:
        """Raise the failure, after which Serve replaces this replica. An engine that restarts is no failure: its
        launcher handles that."""
        if self._client.dead is not None:
            raise EngineDeadError(str(self._engine.supervisor.failure or self._client.dead))
        silent_s = self._client.silent_s
        if self._client.lost_s is None and silent_s > self._limits.engine_silence_s:
            raise EngineDeadError(f"the engine has sent nothing for {silent_s:.0f} s: it seems to hang")

    def metrics_page(self) -> tuple[str, str]:
        """Return the replica's name and its own metrics page."""
        return self._name, self._metrics.render().decode()

    def __del__(self) -> None:
        """Close the engine. Serve calls this when no request runs, or after the shutdown timeout."""
        if hasattr(self, "_watching"):
            self._watching.cancel()
        if hasattr(self, "_parts"):
            self._parts.close()

    def _start_engine(self, rank: int) -> RunningEngine:
        found = find_models(self._settings, lambda text: self._log.debug(text), self._log.warning)
        self._tokenizer = LoadedTokenizer(Tokenizer(found.target))
        settle_memory()
        if self._settings.launcher == "ray":
            return self._parts.enter_context(
                ray_engine(self._settings, self._log, models=found.names, place_s=_PLACE_S)
            )
        warn_without_token(ray, self._log)
        asked = cast(Any, ray).get_runtime_context().get_assigned_resources()
        machine = cores_of(this_machine(), int(asked.get("CPU", 0)), rank)
        return self._parts.enter_context(
            local_engine(self._settings, self._log, models=found.names, machine=machine)
        )

    async def _ready(self) -> None:
        while self._client.ready is None:
            if self._client.dead is not None:
                reason = await asyncio.to_thread(self._engine.supervisor.await_failure, _LAST_WORDS_S)
                # Not the original exception: Ray cannot pass it to the controller.
                raise EngineDeadError(str(reason or self._client.dead))
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _watch(self) -> None:
        """Exit when the engine is dead, so that Serve sends requests to other replicas. Otherwise its fast errors
        would make this replica look the least loaded."""
        while self._engine.supervisor.failure is None:
            await asyncio.sleep(_LOOK_EVERY_S)
        await asyncio.sleep(_FAREWELL_S)
        failure: WorkerDiedError = self._engine.supervisor.failure
        self._log.error("replica exits", why=str(failure))
        await asyncio.to_thread(self._parts.close)
        os._exit(failure.exit_code)

    async def _all_pages(self) -> bytes:
        """Return the metrics pages of all live replicas. Serve returns all answers or none: while one replica hangs,
        the result has only this replica's page, and the other series have a gap."""
        try:
            answers = await self._handle.broadcast("metrics_page").results_async(
                timeout_s=_PAGES_WITHIN_S, return_exceptions=True
            )
        except (TimeoutError, RayServeException):
            answers = []
        pages = dict(answer for answer in answers if not isinstance(answer, BaseException))
        return join_pages(pages or dict([self.metrics_page()]))
