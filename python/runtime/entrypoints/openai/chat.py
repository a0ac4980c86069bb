"""POST /v1/chat/completions: conversations in OpenAI's form."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.responses import Response

from runtime.entrypoints.http.rendering import encoded, off_loop
from runtime.entrypoints.http.responses import json_response
from runtime.entrypoints.http.sse import EventStream
from runtime.entrypoints.openai.chat_updates import ChatFinish, ChatUpdate
from runtime.entrypoints.openai.chats import Chat, Chats
from runtime.entrypoints.openai.chunks import Chunks
from runtime.entrypoints.openai.logprobs import chat_logprobs
from runtime.entrypoints.openai.protocol import ChatBody
from runtime.entrypoints.openai.served_model import ServedModel
from runtime.managers.messages import TokenLogprobs
from runtime.parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from runtime.text.tokenizer import Tokenizer

Json = dict[str, Any]


class ChatApi:
    """Answers conversations as JSON or as a stream."""

    def __init__(self, chats: Chats, tokenizer: Tokenizer, model: ServedModel) -> None:
        self._chats, self._tokenizer, self._model = chats, tokenizer, model

    async def create(self, body: ChatBody) -> Response:
        """Answer a conversation."""
        self._model.check(body.model)
        chat = await self._chats.start(body)
        if body.stream:
            return EventStream(self._events(body, chat), chat.group.close)
        async with chat.group:
            return json_response(await self._answer(body, chat))

    # ---- answers

    async def _answer(self, body: ChatBody, chat: Chat) -> Json:
        answers = await chat.answers()
        cells = sum(len(each.token_ids) for each in answers) * (2 + body.top)
        choices = await off_loop(cells, lambda: [encoded(self._choice(body, answer)) for answer in answers])
        counts = chat.counts()
        shown = {"choices": choices, "usage": counts.usage(body), **counts.extension(body)}
        answer = {**self._model.head(chat.name, "chat.completion"), **shown}
        return {**answer, "prompt_token_ids": chat.prompt_ids} if body.return_token_ids else answer

    def _choice(self, body: ChatBody, answer: ChatUpdate) -> Json:
        assert answer.finish is not None
        shown: Json = {
            "index": answer.index,
            "message": _message(answer.deltas, older=bool(body.functions)),
            "logprobs": self._logprobs(body, answer.token_ids, answer.logprobs or TokenLogprobs()),
            "finish_reason": _reason(answer.finish, older=bool(body.functions)),
            "matched_stop": answer.finish.matched,
        }
        return {**shown, "token_ids": answer.token_ids} if body.return_token_ids else shown

    def _logprobs(self, body: ChatBody, ids: Sequence[int], logprobs: TokenLogprobs | None) -> Json | None:
        return chat_logprobs(self._tokenizer, ids, logprobs, body.top) if logprobs is not None and body.logprobs else None

    # ---- streams

    async def _events(self, body: ChatBody, chat: Chat) -> AsyncGenerator[bytes, None]:
        chunks = Chunks(self._model.head(chat.name, "chat.completion.chunk"), body, chat.counts)
        prompt_ids = {"prompt_token_ids": chat.prompt_ids} if body.return_token_ids else {}
        for index in range(body.n):
            role = {"role": "assistant", "content": ""}
            yield chunks.choice({"index": index, "delta": role, "logprobs": None, "finish_reason": None}, **prompt_ids)
        async for update in chat.updates():
            if shown := self._chunks(body, update):
                yield b"".join(map(chunks.choice, shown))
        yield chunks.end()

    def _chunks(self, body: ChatBody, update: ChatUpdate) -> list[Json]:
        """The chunks of an update: one per delta. The first has the tokens, the last the finish reason."""
        older = bool(body.functions)
        deltas = [_older_delta(delta) if older else _delta(delta) for delta in update.deltas]
        calls = bool(update.deltas) and isinstance(update.deltas[-1], (CallStart, CallArguments))
        if update.finish is not None and (not deltas or calls):
            deltas.append({})  # OpenAI ends tool calls with a separate chunk
        if not deltas and update.token_ids and (body.return_token_ids or body.logprobs):
            deltas.append({})
        shown: list[Json] = [{"index": update.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        if shown:
            shown[0]["logprobs"] = self._logprobs(body, update.token_ids, update.logprobs)
            if update.finish is not None:
                shown[-1].update(finish_reason=_reason(update.finish, older), matched_stop=update.finish.matched)
            if body.return_token_ids:
                shown[0]["token_ids"] = update.token_ids
        return shown


def _reason(finish: ChatFinish, older: bool) -> str:
    return "function_call" if older and finish.reason == "tool_calls" else finish.reason


def _message(deltas: Sequence[Delta], older: bool) -> Json:
    """The message of a complete answer, with reasoning and calls if the model produced any.

    Args:
        older: whether the request has `functions`, the older spelling of `tools`.
    """
    content = reasoning = ""
    calls: list[Json] = []
    for delta in deltas:
        match delta:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(_, call_id, name):
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case CallArguments(call, text):
                calls[call]["function"]["arguments"] += text
    message: Json = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"function_call": calls[0]["function"]} if older else {"tool_calls": calls}
    return message


def _delta(delta: Delta) -> Json:
    """A delta in OpenAI's form."""
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(call, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": call, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(call, text):
            return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}


def _older_delta(delta: Delta) -> Json:
    """A delta for a request with `functions`, the older spelling of `tools`; the answer has at most one call."""
    shown = _delta(delta)
    return {"function_call": shown["tool_calls"][0]["function"]} if "tool_calls" in shown else shown
