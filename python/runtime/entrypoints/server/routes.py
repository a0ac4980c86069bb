"""Every endpoint of the server: its path, its handler, and its answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from runtime.entrypoints.anthropic import protocol as anthropic
from runtime.entrypoints.anthropic.messages import MessagesApi
from runtime.entrypoints.http.body_route import IGNORED_HEADER, BodyRoute
from runtime.entrypoints.http.page import chat_page
from runtime.entrypoints.http.responses import ANTHROPIC_PATH, AnthropicError, ErrorBody
from runtime.entrypoints.native import protocol as native
from runtime.entrypoints.native.generate import GenerateApi
from runtime.entrypoints.native.tokens import TokenApi
from runtime.entrypoints.openai import protocol as openai
from runtime.entrypoints.openai import response_protocol
from runtime.entrypoints.openai.chat import ChatApi
from runtime.entrypoints.openai.chats import Chats
from runtime.entrypoints.openai.completions import CompletionApi
from runtime.entrypoints.openai.responses import ResponseApi
from runtime.entrypoints.openai.served_model import ServedModel
from runtime.entrypoints.pooling import protocol as pooling
from runtime.entrypoints.pooling.endpoints import EmbeddingApi, RerankApi, ScoreApi
from runtime.entrypoints.server.admin import AdminApi
from runtime.entrypoints.server.loads import LoadApi, Loads, RankLoad
from runtime.entrypoints.server.openapi import SCHEMAS
from runtime.managers.observers.metrics import Metrics
from runtime.managers.tokenizer_manager import TokenizerManager

Handler = Callable[..., Awaitable[Response]]
Responses = dict[int | str, dict[str, Any]]

ERRORS = {
    400: "The request is wrong; the message says what to change.",
    401: "The API key is missing or wrong.",
    403: "A page of another origin sent the request, or its Host is not a name of this server.",
    404: "This server has no such model or response, or the endpoint is switched off.",
    408: "The body of the request did not arrive in time.",
    409: "Requests are running, so the cache cannot be flushed; or a profile is already running, or none is.",
    413: "The body of the request is too large, or has too many values.",
    415: "The body is not declared as JSON.",
    429: "The queue is full.",
    431: "The headers are too large.",
    500: "The server failed.",
    503: "The server is not ready, is shutting down, or has lost a process, or the request waited too long.",
    504: "The request took too long.",
}
OF_ALL = (400, 401, 403, 431, 500)
"""Statuses that any endpoint can answer with: they come from the connection, the limits, the keys, or a fault."""
OF_GENERATION = (404, 408, 413, 415, 429, 503, 504)
"""Statuses of the endpoints that run prompts."""
EVENT = {"type": "string", "description": "A JSON object; `[DONE]` in the last event."}
STREAM = {"text/event-stream": {"schema": {"type": "object", "required": ["data"], "properties": {"data": EVENT}}}}
"""A stream's schema describes each event, by the convention of OpenAPI before 3.2."""


def add_routes(app: FastAPI, manager: TokenizerManager, metrics: Metrics) -> None:
    """Add all endpoints."""
    chats = Chats(manager)
    admin, model, tokens = AdminApi(manager, metrics), ServedModel(manager), TokenApi(manager, chats)
    load = LoadApi(manager, admin.fresh_stats)
    app.add_api_route("/", chat_page, methods=["GET", "HEAD"], response_class=HTMLResponse, include_in_schema=False)
    app.add_api_route("/metrics", admin.scrape, response_class=PlainTextResponse, responses=_errors(404))
    app.add_api_route("/metrics", admin.scrape, methods=["HEAD"], response_class=PlainTextResponse, include_in_schema=False)
    for path, handler, answer, statuses in (
        ("/health", admin.health, native.Status, (503,)),
        ("/ready", admin.ready, native.Status, (503,)),
        ("/health_generate", admin.health_generate, native.Status, (429, 503)),
        ("/get_server_info", admin.server_info, dict[str, Any], ()),
        ("/server_info", admin.server_info, dict[str, Any], ()),
        ("/get_model_info", admin.model_info, native.ModelInfo, ()),
        ("/model_info", admin.model_info, native.ModelInfo, ()),
        ("/get_load", load.get_load, list[RankLoad], ()),
        ("/v1/loads", load.loads, Loads, ()),
        ("/tokenizer_info", tokens.info, native.TokenizerInfo, ()),
        ("/v1/models", model.models, openai.ModelList, ()),
        ("/v1/models/{model:path}", model.one_model, openai.ModelCard, (404,)),
    ):
        app.add_api_route(path, handler, response_model=answer, responses=_errors(*statuses))
        app.add_api_route(path, handler, methods=["HEAD"], response_model=None, include_in_schema=False)
    for method in ("GET", "POST"):
        app.add_api_route("/flush_cache", admin.flush_cache, methods=[method], response_model=native.Flushed, responses=_errors(409, 503))
    for path, handler, answer in (
        ("/start_profile", admin.begin_profile, native.ProfileStarted),
        ("/stop_profile", admin.end_profile, native.ProfileWritten),
    ):
        app.add_api_route(path, handler, response_model=answer, responses=_errors(404, 409, 503))
    _add_posts(app, admin, tokens)
    _add_generation(app, manager, model, chats)


def _add_posts(app: FastAPI, admin: AdminApi, tokens: TokenApi) -> None:
    for path, handler, answer, *statuses in (
        ("/tokenize", tokens.tokenize, native.Tokenized),
        ("/v1/tokenize", tokens.tokenize, native.Tokenized),
        ("/detokenize", tokens.detokenize, native.Detokenized),
        ("/v1/detokenize", tokens.detokenize, native.Detokenized),
        ("/abort_request", admin.abort_request, native.Done),
        ("/set_internal_state", admin.set_internal_state, native.Done),
        ("/start_profile", admin.start_profile, native.ProfileStarted, 404, 409),
        ("/stop_profile", admin.stop_profile, native.ProfileWritten, 404, 409),
    ):
        _add_body_route(app, path, handler, answer, _errors(408, 413, 415, 503, *statuses))


def _add_generation(app: FastAPI, manager: TokenizerManager, model: ServedModel, chats: Chats) -> None:
    responses = ResponseApi(chats, manager, model)
    for path, handler, answer in (
        ("/v1/chat/completions", ChatApi(chats, manager.tokenizer, model).create, openai.ChatCompletion),
        ("/v1/responses", responses.create, response_protocol.ResponseObject),
        ("/v1/completions", CompletionApi(manager, model).create, openai.Completion),
        ("/generate", GenerateApi(manager, model).generate, native.Generated | list[native.Generated]),
    ):
        _add_body_route(app, path, handler, answer, {200: {"content": STREAM}, **_errors(*OF_GENERATION)})
    one = "/v1/responses/{response_id}"
    for path, handler, answer, method in (
        (one, responses.retrieve, response_protocol.ResponseObject, "GET"),
        (one, responses.delete, response_protocol.ResponseDeleted, "DELETE"),
        (one + "/cancel", responses.cancel, response_protocol.ResponseObject, "POST"),
        (one + "/input_items", responses.input_items, response_protocol.InputItemList, "GET"),
    ):
        app.add_api_route(path, handler, methods=[method], response_model=answer, responses=_errors(404))
    messages, errors = MessagesApi(chats, manager, model), _errors(*OF_GENERATION, form=AnthropicError)
    _add_body_route(app, ANTHROPIC_PATH, messages.create, anthropic.AnthropicMessage, {200: {"content": STREAM}, **errors})
    _add_body_route(app, ANTHROPIC_PATH + "/count_tokens", messages.count_tokens, anthropic.TokenCount, errors)
    for path, handler, answer in (
        ("/v1/embeddings", EmbeddingApi(manager, model).create, pooling.EmbeddingList),
        ("/v1/score", ScoreApi(manager, model).create, pooling.Scores),
        ("/rerank", RerankApi(manager, model).create, list[pooling.Rank]),
        ("/v1/rerank", RerankApi(manager, model).create, list[pooling.Rank]),
    ):
        _add_body_route(app, path, handler, answer, _errors(*OF_GENERATION))


def _add_body_route(app: FastAPI, path: str, handler: Handler, answer: Any, responses: Responses) -> None:
    ignored = {IGNORED_HEADER: {"description": "Names of unknown request fields, which were ignored.", "schema": {"type": "string"}}}
    responses = {**responses, 200: {**responses.get(200, {}), "headers": ignored}}
    app.router.add_api_route(path, handler, methods=["POST"], response_model=answer, responses=responses, route_class_override=BodyRoute)


def _errors(*statuses: int, form: type[BaseModel] = ErrorBody) -> Responses:
    """The answers of an endpoint other than 200. `describe` adds their forms to the schema; FastAPI would build a validator per model."""
    content = {"application/json": {"schema": {"$ref": SCHEMAS.format(model=form.__name__)}}}
    return {status: {"content": content, "description": ERRORS[status]} for status in sorted((*OF_ALL, *statuses))}
