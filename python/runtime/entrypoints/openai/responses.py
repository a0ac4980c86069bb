"""/v1/responses, converted to and from chats, with a store so that later requests can continue an answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Query
from starlette.responses import Response

from runtime.entrypoints.http.responses import json_response
from runtime.entrypoints.http.sse import EventStream
from runtime.entrypoints.openai.chat_conversion import ChatConversion
from runtime.entrypoints.openai.chat_updates import ChatUpdate
from runtime.entrypoints.openai.chats import Chat, Chats
from runtime.entrypoints.openai.logprobs import chat_logprobs
from runtime.entrypoints.openai.protocol import ChatBody
from runtime.entrypoints.openai.response_chat import CHAT_NAMES, SYSTEM_ROLES, call_names, chat_fields, without_oldest
from runtime.entrypoints.openai.response_protocol import ChosenTool, InputItem, ResponseBody, ResponseTool
from runtime.entrypoints.openai.response_store import PreviousResponseNotFound, ResponseNotFound, ResponseStore, StoredResponse, size_of
from runtime.entrypoints.openai.response_writer import ITEM_PREFIX, ResponseWriter
from runtime.entrypoints.openai.served_model import ServedModel
from runtime.errors import ContextTooLong, RequestError, shown
from runtime.managers.tokenizer_manager import TokenizerManager

Json = dict[str, Any]
SHOWN = {"instructions", "max_output_tokens", "metadata", "previous_response_id", "store", "truncation", "user"}
"""Fields of a request that its response repeats."""
Streamed = Annotated[bool, Query(json_schema_extra={"enum": [False]})]


@dataclass(frozen=True, slots=True)
class _Run:
    """A running response: its request, its input items, the conversation it continues, its chat and its writer."""

    body: ResponseBody
    given: list[InputItem]
    conversation: list[InputItem]
    size: int
    chat: Chat
    writer: ResponseWriter


class ResponseApi:
    """Creates responses, and finds, cancels and deletes them later."""

    def __init__(self, chats: Chats, manager: TokenizerManager, model: ServedModel) -> None:
        self._chats, self._manager, self._model = chats, manager, model
        self._conversion = ChatConversion(CHAT_NAMES)
        self._store = ResponseStore()
        self._running: dict[str, _Run] = {}

    async def create(self, body: ResponseBody) -> Response:
        """POST /v1/responses, as JSON or as a stream of events."""
        self._model.check(body.model)
        run = await self._start(body)
        if body.stream:
            events = self._conversion.events(run.chat, run.writer, lambda: self._keep(run))
            return EventStream(events, lambda: self._close(run))
        try:
            await self._conversion.collect(run.chat, run.writer)
            self._keep(run)
        finally:
            self._close(run)
        return json_response(run.writer.response)

    async def retrieve(self, response_id: str, stream: Streamed = False) -> Response:
        """GET /v1/responses/{response_id}."""
        if stream:
            raise RequestError("A stored response is not streamed again. Retrieve it without stream.", "stream")
        run = self._running.get(response_id)
        return json_response(run.writer.response if run is not None and run.body.store else self._store.get(response_id).response)

    async def delete(self, response_id: str) -> Response:
        """DELETE /v1/responses/{response_id}."""
        self._store.remove(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, response_id: str) -> Response:
        """POST /v1/responses/{response_id}/cancel: cancel a running response; cancelling it again is not an error."""
        run = self._running.get(response_id)
        if run is None:
            ended = self._store.get(response_id).response
            if (status := ended["status"]) == "cancelled":
                return json_response(ended)
            raise RequestError(f"The response {shown(response_id)} has ended: its status is {status}.", "response_id")
        self._manager.abort(run.chat.name)
        return json_response({**run.writer.response, "status": "cancelled"})

    async def input_items(
        self,
        response_id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """GET /v1/responses/{response_id}/input_items: a page of the items of the request."""
        given = list(self._store.get(response_id).input)
        listed = given if order == "asc" else given[::-1]
        names = [item["id"] for item in listed]
        if after is not None and after not in names:
            raise RequestError(f"There is no input item {shown(after)}.", "after")
        start = 0 if after is None else names.index(after) + 1
        page, ids = listed[start : start + limit], names[start : start + limit]
        ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
        return json_response({"object": "list", "data": page, **ends, "has_more": start + limit < len(listed)})

    # ---- a run

    async def _start(self, body: ResponseBody) -> _Run:
        conversation: list[InputItem] = []
        size = 0
        if body.previous_response_id is not None:
            try:
                previous = self._store.get(body.previous_response_id)
            except ResponseNotFound as error:
                raise PreviousResponseNotFound(str(error), "previous_response_id") from None
            conversation, size = list(previous.conversation), previous.size
        given = self._store.resolved(body.input_items)
        conversation.extend(given)
        with self._conversion.naming():
            chat, chat_body = await self._start_chat(body, conversation)
        writer = ResponseWriter(self._head(body, chat_body), lambda update: self._logprobs(chat_body, update), call_names(body.tools))
        run = self._running[writer.response["id"]] = _Run(body, given, conversation, size, chat, writer)
        return run

    async def _start_chat(self, body: ResponseBody, conversation: Sequence[InputItem]) -> tuple[Chat, ChatBody]:
        chat_body = self._conversion.body(chat_fields(body, conversation))
        try:
            return await self._chats.start(chat_body, by_token=chat_body.logprobs), chat_body
        except ContextTooLong:
            droppable = sum(item.role not in SYSTEM_ROLES for item in conversation) - 1  # the last one stays
            if body.truncation != "auto" or droppable < 1:
                raise
        low, high = 1, droppable  # the fewest of the oldest items without which the rest fits
        while low < high:
            middle = (low + high) // 2
            chat_body = self._conversion.body(chat_fields(body, without_oldest(conversation, middle)))
            low, high = (low, middle) if await self._fits(chat_body) else (middle + 1, high)
        chat_body = self._conversion.body(chat_fields(body, without_oldest(conversation, low)))
        return await self._chats.start(chat_body, by_token=chat_body.logprobs), chat_body

    async def _fits(self, chat_body: ChatBody) -> bool:
        try:
            return len(await self._chats.prompt_ids(chat_body)) < self._manager.max_context_len
        except ContextTooLong:  # tokenisation stopped early because it is too long
            return False

    def _head(self, body: ResponseBody, chat_body: ChatBody) -> Json:
        """The response object before its output."""
        sampling = self._model.sampling.complete()
        choice = body.tool_choice or "auto"
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            **body.model_dump(include=SHOWN),
            "model": self._model.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "temperature": sampling["temperature"] if body.temperature is None else body.temperature,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice.model_dump(exclude_none=True, exclude_defaults=True) if isinstance(choice, ChosenTool) else choice,
            "tools": [_shown_tool(tool) for tool in body.tools if tool.type in ("function", "namespace")],
            "top_logprobs": max(chat_body.top, 0),
            "top_p": sampling["top_p"] if body.top_p is None else body.top_p,
            "usage": None,
        }

    def _logprobs(self, body: ChatBody, update: ChatUpdate) -> list[Json]:
        if update.logprobs is None or not body.logprobs:
            return []
        return chat_logprobs(self._manager.tokenizer, update.token_ids, update.logprobs, body.top)["content"]

    def _close(self, run: _Run) -> None:
        run.chat.group.close()
        self._running.pop(run.writer.response["id"], None)

    def _keep(self, run: _Run) -> None:
        """Store a finished response, if the request has `store`."""
        response = run.writer.response
        self._running.pop(response["id"], None)
        if not run.body.store:
            return
        given = tuple(_with_id(item) for item in run.given)
        output = [InputItem.model_validate(item) for item in response["output"]]
        self._store.add(StoredResponse(response, given, (*run.conversation, *output), run.size + size_of(response, given)))


def _shown_tool(tool: ResponseTool) -> Json:
    """A tool in a response object."""
    fields = tool.model_dump(exclude_unset=True)
    return {"parameters": None, "strict": None, **fields} if tool.type == "function" else fields


def _with_id(item: InputItem) -> Json:
    """An input item as JSON, with an id."""
    fields = item.model_dump(exclude_unset=True)
    if item.type == "message" and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        fields["content"] = [{"type": kind, "text": item.content}]
    return {"id": f"{ITEM_PREFIX.get(item.type, 'item')}_{uuid.uuid4().hex}", "type": item.type, **fields}
