"""Routes, lifespan, and failures to statuses. Nothing else."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from runtime import __version__
from runtime.entrypoints.admin_api import AdminApi
from runtime.entrypoints.auth import KeyGate
from runtime.entrypoints.body_limits import BodyLimit
from runtime.entrypoints.connection import MAX_HEADER_BYTES, BoundedConnection
from runtime.entrypoints.fields import Fields
from runtime.entrypoints.native_api import NativeApi
from runtime.entrypoints.native_protocol import ABORT, DETOKENIZE, GENERATE, PROFILE, TOKENIZE
from runtime.entrypoints.openai_api import OpenAIApi
from runtime.entrypoints.openai_protocol import CHAT, COMPLETION
from runtime.entrypoints.responses import error_response, internal_error, json_response, status_response
from runtime.errors import ServingError
from runtime.managers.telemetry.metrics import Metrics
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5
"""How long open answers may still take once the server stops."""
CLIENT_CLOSED = 499
"""nginx's status for a client that left; only the access log sees it."""

Handler = Callable[[Request], Awaitable[Response]]


def create_app(manager: TokenizerManager) -> FastAPI:
    """Build the HTTP application around a manager, and make its metrics the manager's observer."""
    config = manager.config
    metrics = Metrics(config.model.served_model_name)
    manager.observer = metrics
    app = FastAPI(title="Talon", version=__version__, docs_url=None, redoc_url=None)
    _add_routes(app, manager, metrics)
    _add_failures(app)
    # The last one added sees a request first: the key is checked before the body is looked at.
    app.add_middleware(BodyLimit)
    app.add_middleware(KeyGate, api_key=config.server.api_key, admin_api_key=config.server.admin_api_key)
    return app


def _add_routes(app: FastAPI, manager: TokenizerManager, metrics: Metrics) -> None:
    assert isinstance(manager.tokenizer, Tokenizer)
    openai, native = OpenAIApi(manager, manager.tokenizer), NativeApi(manager, manager.tokenizer)
    admin = AdminApi(manager, metrics)
    for path, handler in (
        ("/health", admin.health),
        ("/ready", admin.ready),
        ("/health_generate", admin.health_generate),
        ("/get_server_info", admin.server_info),
        ("/server_info", admin.server_info),
        ("/get_model_info", admin.model_info),
        ("/model_info", admin.model_info),
        ("/metrics", admin.scrape),
        ("/v1/models", openai.models),
        ("/v1/models/{model:path}", openai.one_model),
    ):
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
    app.add_api_route("/", admin.page, methods=["GET"], response_model=None, include_in_schema=False)
    app.add_api_route("/flush_cache", admin.flush_cache, methods=["POST"], response_model=None)
    app.add_api_route("/flush_cache", admin.flush_cache, methods=["GET"], response_model=None, include_in_schema=False)
    for path, handler, fields in (
        ("/v1/chat/completions", openai.chat, CHAT),
        ("/v1/completions", openai.completions, COMPLETION),
        ("/generate", native.generate, GENERATE),
        ("/tokenize", native.tokenize, TOKENIZE),
        ("/v1/tokenize", native.tokenize, TOKENIZE),
        ("/detokenize", native.detokenize, DETOKENIZE),
        ("/abort_request", admin.abort_request, ABORT),
        ("/start_profile", admin.start_profile, PROFILE),
        ("/stop_profile", admin.stop_profile, PROFILE),
    ):
        app.add_api_route(path, handler, methods=["POST"], response_model=None, openapi_extra=_described(fields))


def _described(fields: Fields) -> dict[str, object]:
    """What /openapi.json says of a body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": fields.schema()}}}}


# ---- failures


def _add_failures(app: FastAPI) -> None:
    app.add_exception_handler(ServingError, _serving_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_left)
    app.add_exception_handler(Exception, _unforeseen)


async def _serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    said = {404: f"there is no {what}; GET /openapi.json lists what there is", 405: f"{what}: the method is not allowed"}
    headers = dict(error.headers) if error.headers else None
    return status_response(error.status_code, said.get(error.status_code, str(error.detail)), headers)


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _unforeseen(request: Request, error: Exception) -> Response:
    return json_response(internal_error(), 500)


# ---- serving


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: signals belong to whoever started the processes."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


async def serve(manager: TokenizerManager, listener: socket.socket, stopping: asyncio.Event) -> None:
    """Answer HTTP on a bound socket until `stopping` is set; then give open answers `CLOSE_SECONDS` to end."""
    server = _Server(
        uvicorn.Config(
            create_app(manager),
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=manager.config.server.log_requests,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
    )
    watch = asyncio.create_task(_stop_when(stopping, server))
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()


async def _stop_when(stopping: asyncio.Event, server: uvicorn.Server) -> None:
    await stopping.wait()
    server.should_exit = True
