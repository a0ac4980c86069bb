"""Conversations: rendered, started, and read as typed updates. Every chat protocol is a conversion of these."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from runtime.entrypoints.generations import Call, Generations
from runtime.entrypoints.http.refused import TEMPLATE_REFUSED
from runtime.entrypoints.openai.chat_updates import ChatAnswer, ChatFinish, ChatUpdate
from runtime.entrypoints.openai.protocol import ChatBody
from runtime.entrypoints.openai.usage import TokenCounts, UsageCounter
from runtime.errors import RequestError, UnsupportedField
from runtime.managers.generation import GenerationUpdate
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.parsers.deltas import Content
from runtime.text.tokenizer import Tokenizer

LONG_CHAT = 2048
"""Characters of a conversation from which its template runs in a thread."""


class Chat:
    """The answers to one conversation under way. Leaving `async with` ends what still runs.

    Attributes:
        name: its name for `/abort_request`.
        prompt_ids: the rendered conversation.
    """

    def __init__(self, name: str, n: int, group: Generations) -> None:
        self.name = name
        self.prompt_ids = group.each[0].prompt_ids
        self._n = n
        self._group = group
        self._counter = UsageCounter(group)

    async def __aenter__(self) -> Chat:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs."""
        self._group.close()

    def counts(self) -> TokenCounts:
        """The tokens so far."""
        return self._counter.counts()

    async def updates(self) -> AsyncGenerator[ChatUpdate, None]:
        """The updates of all answers as they come; the first error is raised."""
        async with aclosing(self._group.updates()) as updates:
            async for prompt, update in updates:
                self._counter.add(prompt, update)
                yield _read(update)

    async def answers(self) -> list[ChatAnswer]:
        """All answers, complete."""
        done = [ChatAnswer() for _ in range(self._n)]
        async with aclosing(self.updates()) as updates:
            async for update in updates:
                done[update.index].add(update)
        return done


class Chats:
    """Starts conversations."""

    def __init__(self, manager: TokenizerManager, tokenizer: Tokenizer) -> None:
        self._manager = manager
        self._tokenizer = tokenizer

    async def start(self, body: ChatBody) -> Chat:
        """Render a conversation and start its answers.

        Raises:
            RequestError, QueueFull: it cannot start.
        """
        name = f"chatcmpl-{uuid.uuid4().hex}"
        call = Call(
            name=name,
            prompts=[await self.prompt_ids(body)],
            sampling=[body.sampling(body.limit, body.min_tokens, self._manager.config.model.default_sampling_params)],
            rids=[name],
            n=body.n,
            stream=body.stream,
            top_logprobs=body.top,
            prompt_logprobs=False,
            priority=body.priority,
            cache_salt=body.cache_salt,
            params={"prompt": "messages", "input_ids": "messages", "max_new_tokens": body.limit_name},
            fill_context=body.fill_context,
            continues_prompt=body.continue_final_message,
        )
        return Chat(name, body.n, await Generations.start(self._manager, call))

    async def prompt_ids(self, body: ChatBody) -> list[int]:
        """Token ids of the conversation; a long one is rendered in a thread."""
        if body.chat_template is not None and not self._manager.config.server.trust_request_chat_template:
            raise UnsupportedField("chat_template", TEMPLATE_REFUSED)
        if not self._tokenizer.has_chat_template and body.chat_template is None:
            raise RequestError(
                "This model has no chat template. Use /v1/completions, or start the server with --chat-template FILE.", "messages"
            )
        messages = [message.rendered() for message in body.messages]
        if body.chat_template is None and sum(len(message["content"]) for message in messages) < LONG_CHAT:
            return self._render(body, messages)
        return await asyncio.to_thread(self._render, body, messages)

    def _render(self, body: ChatBody, messages: list[dict[str, str]]) -> list[int]:
        return self._tokenizer.encode_chat(
            messages,
            add_generation_prompt=not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs or None,
            chat_template=body.chat_template,
        )


def _read(update: GenerationUpdate) -> ChatUpdate:
    finish = update.finish and ChatFinish(update.finish.reason, update.finish.matched)
    return ChatUpdate(update.index, [Content(update.text)] if update.text else [], update.token_ids, update.logprobs, finish)
