"""The ASGI application: routes, middleware, error handlers and start-up."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from ssd_serve.base.errors import SettingsError, SsdError
from ssd_serve.base.settings import Settings
from ssd_serve.base.version import __version__
from ssd_serve.server.access.auth import AuthMiddleware, metrics_may_show_cached
from ssd_serve.server.access.tenants import RATE_HEADERS, Tenants
from ssd_serve.server.anthropic import MessagesEndpoint
from ssd_serve.server.engine.client import EngineClient
from ssd_serve.server.errors import ApiError, from_ssd_error, internal
from ssd_serve.server.http.body import Bodies
from ssd_serve.server.http.middleware import (
    REQUEST_ID_HEADER,
    RequestIds,
    RequestSmugglingGuard,
    RootPath,
    path_within,
)
from ssd_serve.server.http.not_built import not_built
from ssd_serve.server.http.streaming import ClientGoneError
from ssd_serve.server.http.worker_pool import WorkerPool
from ssd_serve.server.information import InformationEndpoints
from ssd_serve.server.limits import Limits
from ssd_serve.server.observability.metrics import ServerMetrics
from ssd_serve.server.openai.chat import ChatEndpoint
from ssd_serve.server.openai.completions import CompletionsEndpoint
from ssd_serve.server.openai.prompts import TokenizingEndpoints
from ssd_serve.server.openai.responses import ResponsesEndpoint
from ssd_serve.server.openai.unknown_fields import IGNORED_HEADER, UnknownFields
from ssd_serve.server.openapi import SecuritySchemes, describe
from ssd_serve.server.page import add_page
from ssd_serve.server.service import Service, StopGate, model_name
from ssd_serve.server.text import TextTokenizer, TokenTexts

if TYPE_CHECKING:
    from ssd_serve.server.observability.traces import Traces

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""nginx's status for a client that closed the connection; it is only logged."""

Handler = Callable[..., Awaitable[Response]]


def create_app(
    settings: Settings,
    engine: EngineClient,
    tokenizer: Callable[[], TextTokenizer],
    limits: Limits | None = None,
    gate: StopGate | None = None,
    guards: Sequence[Middleware] = (),
    metrics_page: Callable[[], Awaitable[bytes]] | None = None,
) -> FastAPI:
    """Build the application. Its lifespan starts and stops the engine. `guards` run before the key is checked.
    `metrics_page` replaces this server's own page at /metrics; `app.state.metrics` has the latter."""
    limits = limits or Limits()
    tenants = Tenants(settings)
    service = Service(
        settings=settings,
        limits=limits,
        engine=engine,
        loaded_tokenizer=tokenizer,
        texts=TokenTexts(tokenizer),
        metrics=ServerMetrics(
            engine,
            lambda: service.problem() is None,
            tenants,
            metrics_may_show_cached(settings),
            model_name(settings),
            settings.metrics_prefix,
        ),
        bodies=Bodies(limits, UnknownFields(settings.strict_requests)),
        worker_pool=WorkerPool(limits.inline_characters, limits.tokenize_threads),
        template_pool=WorkerPool(-1, limits.tokenize_threads),
        tokenize_pool=WorkerPool(-1, threads=1),
        gate=gate or StopGate(),
        tenants=tenants,
        metrics_page=metrics_page,
    )

    traces = _traces(settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None, None]:
        engine.start()
        try:
            yield
        finally:
            engine.stop()
            if traces is not None:
                await asyncio.to_thread(traces.close)

    app = FastAPI(
        title="ssd-serve",
        version=__version__,
        lifespan=lifespan,
        # The documentation pages would load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    app.state.metrics = service.metrics
    _add_routes(app, service)
    _add_error_handlers(app)
    if traces is not None:
        app.add_middleware(traces.middleware)
    app.add_middleware(
        AuthMiddleware, tenants=tenants, metrics_key=settings.metrics_key, metrics_port=settings.metrics_port
    )
    app.add_middleware(RequestSmugglingGuard)
    for guard in guards:
        app.add_middleware(guard.cls, *guard.args, **guard.kwargs)
    app.add_middleware(RequestIds)
    if settings.cors_origins:
        # Before authentication: browsers send preflight requests without a key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins.split(","),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, IGNORED_HEADER, "Retry-After", *RATE_HEADERS],
        )
    if settings.root_path:
        app.add_middleware(RootPath, root_path=settings.root_path)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    information = InformationEndpoints(service)
    gets: dict[str, Handler] = {
        "/health": information.health,
        "/v1/models": information.models,
        "/v1/models/{name:path}": information.model,
        "/version": information.version,
        "/load": information.load,
        "/server_info": information.server_info,
        "/metrics": information.metrics,
    }
    for path, handler in gets.items():
        app.add_api_route(path, handler, methods=["GET", "HEAD"])
    app.add_api_route("/ping", information.health, methods=["GET", "HEAD", "POST"])

    tokenizing, messages = TokenizingEndpoints(service), MessagesEndpoint(service)
    posts: dict[str, Handler] = {
        "/v1/completions": CompletionsEndpoint(service).handle,
        "/v1/chat/completions": ChatEndpoint(service).handle,
        "/v1/responses": ResponsesEndpoint(service).handle,
        "/v1/messages": messages.handle,
        "/v1/messages/count_tokens": messages.count,
        "/tokenize": tokenizing.tokenize,
        "/detokenize": tokenizing.detokenize,
    }
    for path, handler in posts.items():
        app.add_api_route(path, handler, methods=["POST"])
    if service.settings.page:
        add_page(app)
    describe(app, SecuritySchemes(service.tenants.keys_needed, service.settings.metrics_key is not None))


def _traces(settings: Settings) -> "Traces | None":
    """Return the exporter of spans, if an endpoint is set. OpenTelemetry is an optional dependency."""
    if settings.otlp_traces_endpoint is None:
        return None
    try:
        from ssd_serve.server.observability.traces import Traces
    except ImportError as error:
        raise SettingsError(
            f"SSD_OTLP_TRACES_ENDPOINT needs OpenTelemetry: pip install 'ssd-serve[otel]' ({error})"
        ) from error
    return Traces(settings.otlp_traces_endpoint, model_name(settings))


def _add_error_handlers(app: FastAPI) -> None:
    """Give every error OpenAI's format."""

    async def known(_request: Request, error: Exception) -> Response:
        return (from_ssd_error(error) if isinstance(error, SsdError) else internal()).response()

    async def http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
        path = path_within(request.scope)
        if status == HTTPStatus.NOT_FOUND and (message := not_built(path)) is not None:
            return ApiError(status, message, code="not_built").response()
        messages = {
            404: f"there is nothing at {path}; GET /openapi.json lists all paths",
            405: f"{path} takes {headers.get('Allow', 'other methods')}, not {request.method}",
        }
        return ApiError(status, messages.get(status, str(error)), headers=headers).response()

    async def gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    app.add_exception_handler(SsdError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(ClientDisconnect, gone)
