"""The HTTP server: how it starts, how it stops, and how errors become statuses."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from runtime.entrypoints.http.access_log import AccessLog
from runtime.entrypoints.http.auth import KeyGate
from runtime.entrypoints.http.body_route import IGNORED_HEADER
from runtime.entrypoints.http.connection import MAX_HEADER_BYTES, BoundedConnection
from runtime.entrypoints.http.key_ring import key_ring
from runtime.entrypoints.http.limits import BodyLimits, HeaderLimit, LingeringResponse
from runtime.entrypoints.http.origin import OriginGate
from runtime.entrypoints.http.request_names import HEADER, RequestNames
from runtime.entrypoints.http.responses import INTERNAL, error_response
from runtime.entrypoints.server.openapi import describe
from runtime.entrypoints.server.routes import add_routes
from runtime.errors import BodyTooLarge, RequestError, ServingError, StatusError
from runtime.managers.observers.metrics import Metrics
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

CORS = {
    "allow_methods": ("GET", "POST", "DELETE"), "allow_headers": ("*",), "expose_headers": (IGNORED_HEADER, HEADER, "Retry-After"),
}  # fmt: skip
"""Methods and headers that pages from the origins of --allow-origins may send and read."""
CLOSE_SECONDS = 4
"""How long open answers may take after the server was told to stop."""
DROP_SECONDS = 1
"""How long the handlers of dropped connections may take to end."""
CLIENT_CLOSED = 499
"""nginx's status for a client that disconnected; only the access log shows it."""


def create_app(manager: TokenizerManager, provider: TracerProvider | None = None) -> FastAPI:
    """Build the HTTP application of a manager; its metrics become the manager's observer.

    Args:
        provider: receives the spans of all requests; None disables tracing.
    """
    config = manager.config
    metrics = Metrics(config.model.served_model_name)
    manager.observer = metrics
    app = FastAPI(title="Talon", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.body_limits = BodyLimits(config.server.max_body_mib, config.server.max_parse_ms)
    app.state.max_context_len = manager.max_context_len
    app.state.strict_request_fields = config.server.strict_request_fields
    add_routes(app, manager, metrics)
    describe(app, manager)
    app.add_exception_handler(ServingError, _serving_error)
    app.add_exception_handler(RequestValidationError, _bad_parameter)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_left)
    app.add_exception_handler(Exception, _internal_error)
    # The middleware added last runs first.
    app.add_middleware(HeaderLimit)
    server = config.server
    ring = app.state.key_ring = key_ring(server)
    manager.charge = ring.spend
    app.add_middleware(KeyGate, ring=ring, protect_metrics=server.protect_metrics)
    hosts = None if ring.guards_api else (server.host, *server.allowed_hosts)
    app.add_middleware(OriginGate, hosts=hosts, origins=server.allow_origins)
    app.add_middleware(ExceptionMiddleware, handlers={ServingError: _serving_error})  # answers the errors of the gates
    if server.allow_origins:
        app.add_middleware(CORSMiddleware, allow_origins=server.allow_origins, **CORS)
    if provider is not None:
        from runtime.entrypoints.http.tracing import PhaseTracer, Tracing

        manager.on_end.append(PhaseTracer(provider))
        app.add_middleware(Tracing, provider=provider, model=config.model.served_model_name)
    if server.log_requests:
        app.add_middleware(AccessLog)
    app.add_middleware(RequestNames)
    return app


async def _serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    return error_response(error, request.scope["path"], form=LingeringResponse if isinstance(error, BodyTooLarge) else Response)


async def _bad_parameter(request: Request, error: Exception) -> Response:
    """The error of a path or query parameter; `BodySchema` words the errors of bodies."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return error_response(RequestError(f"{name}: {first['msg']}.", name), request.scope["path"])


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    text, headers = str(error.detail), dict(error.headers) if error.headers else {}
    if error.status_code == 404:
        text = f"There is no {what}. GET /openapi.json lists the endpoints."
    elif error.status_code == 405:
        allowed = _allowed(request)
        headers["Allow"] = ", ".join(allowed)
        text = f"{what} is not allowed. Use {' or '.join(method for method in allowed if method != 'HEAD')}."
    return error_response(StatusError(error.status_code, text), request.url.path, headers)


def _allowed(request: Request) -> list[str]:
    """The methods of all routes of this path."""
    routes = [route for route in request.app.routes if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in route.methods or ()})


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _internal_error(request: Request, error: Exception) -> Response:
    return error_response(ServingError(INTERNAL), request.url.path)


class _Server(uvicorn.Server):
    """uvicorn without signal handlers; the launcher handles signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers."""
        yield


async def serve(manager: TokenizerManager, listener: socket.socket, stopping: asyncio.Event) -> None:
    """Serve HTTP on a bound socket until `stopping` is set; then give open answers `CLOSE_SECONDS` to end."""
    if (level := manager.config.server.log_level_http) is not None:
        logging.getLogger("uvicorn").setLevel(level.upper())
    config = manager.config.server
    provider = _provider(manager)
    app = create_app(manager, provider)
    if config.api_key_file is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, app.state.key_ring.reload)
    server = _Server(
        uvicorn.Config(
            app,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile_password=config.ssl_keyfile_password,
            http=BoundedConnection,
            ws="none",  # the middlewares handle only HTTP
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=CLOSE_SECONDS + DROP_SECONDS,
        )
    )
    watch = asyncio.create_task(_stop_when(stopping, server))
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()
        await _drop_connections(server)
        if provider is not None:
            from runtime.entrypoints.http.tracing import send_last_spans

            await send_last_spans(provider)


def _provider(manager: TokenizerManager) -> TracerProvider | None:
    """The provider that sends spans to the collector of --otlp-traces-endpoint; None without the flag."""
    if (endpoint := manager.config.server.otlp_traces_endpoint) is None:
        return None
    from runtime.entrypoints.http.tracing import otlp_provider

    return otlp_provider(endpoint, manager.config.model.served_model_name)


async def _stop_when(stopping: asyncio.Event, server: uvicorn.Server) -> None:
    await stopping.wait()
    server.should_exit = True
    await asyncio.sleep(CLOSE_SECONDS)
    await _drop_connections(server)


async def _drop_connections(server: uvicorn.Server) -> None:
    """Close the connections that are still open; uvicorn would cancel their handlers and log a traceback for each."""
    for connection in list(server.server_state.connections):
        if connection.transport is not None:
            connection.transport.abort()
    if tasks := list(server.server_state.tasks):
        await asyncio.wait(tasks, timeout=DROP_SECONDS)
