"""Turns prompts into token ids: within the limits of a call, and off the event loop if they are long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from runtime.errors import ContextTooLong, RequestError, TextTooLong
from runtime.managers.request_context import CURRENT_REQUEST
from runtime.text.bounded_encoding import BoundedEncoding
from runtime.text.chat_template import Message, count_chars
from runtime.text.tokenizer import Tokenizer

T = TypeVar("T")

LONG_TEXT = 2048
"""Texts of at least this many characters are tokenised in a thread, so they do not block the event loop."""
HUGE_TEXT = 65536
"""Texts of at least this many characters have a thread of their own, so they do not keep shorter ones waiting."""
MIN_CHARS = 64
"""Minimum cost of a text, in characters."""


class PromptEncoder:
    """Tokenises texts and conversations. Belongs to one event loop.

    Args:
        tokenizer: its `encode` runs in threads too.
        max_context_len: prompt and output tokens of one request together.
        max_tokens: the most tokens where the context is no limit.
    """

    def __init__(self, tokenizer: Tokenizer, max_context_len: int, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_context_len = max_context_len
        self._max_tokens = max_tokens
        self._max_chars = max_context_len * tokenizer.longest_token
        self._on_loop = 0  # characters tokenised on the event loop since it had a turn
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._huge = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize-huge")

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ContextTooLong: it cannot fit in the context; a text that is far too long is not tokenised.
        """
        self._check_chars(len(text))
        return await self._run(len(text), lambda: self._tokenizer.encode(text, add_special_tokens, self._context_bound()))

    async def encode_any(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text that need not fit in the context. Raises `RequestError` above `max_tokens`."""
        return await self._run(len(text), lambda: self._tokenizer.encode(text, add_special_tokens, self._any_bound()))

    async def encode_chat(self, messages: Sequence[Message], *, any_length: bool = False, **options: Any) -> list[int]:
        """Token ids of a conversation; `options` are those of `Tokenizer.encode_chat`.

        Raises like `encode`, or with `any_length` like `encode_any`.
        """
        tools = options.get("tools") or []
        chars = count_chars([*messages, *tools])
        if not any_length:
            self._check_chars(chars, "messages")
        long = options.get("chat_template") is not None or bool(tools)
        bound = self._any_bound("messages") if any_length else self._context_bound("messages")
        return await self._run(max(chars, LONG_TEXT * long), lambda: self._tokenizer.encode_chat(messages, bound=bound, **options))

    def close(self) -> None:
        """Stop the threads."""
        for threads in (self._threads, self._huge):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, characters: int, encode: Callable[[], T]) -> T:
        began, request = time.monotonic(), CURRENT_REQUEST.get()
        if characters < LONG_TEXT:
            done = encode()
            self._on_loop += max(characters, MIN_CHARS)
            if self._on_loop > LONG_TEXT:  # many short texts of one call must not keep other requests waiting
                self._on_loop = 0
                await asyncio.sleep(0)
        else:
            threads = self._threads if characters < HUGE_TEXT else self._huge
            done = await asyncio.get_running_loop().run_in_executor(threads, encode)
        if request is not None:
            request.tokenized.append((began, time.monotonic()))
        return done

    def _check_chars(self, characters: int, param: str = "prompt") -> None:
        if characters > self._max_chars:
            raise TextTooLong(characters, self._max_chars, self._max_context_len, param)

    def _context_bound(self, param: str = "prompt") -> BoundedEncoding:
        refuse = lambda count: ContextTooLong(count, self._max_context_len, at_least=True, param=param)  # noqa: E731
        return BoundedEncoding(self._max_context_len - 1, refuse)

    def _any_bound(self, param: str = "prompt") -> BoundedEncoding:
        return BoundedEncoding(self._max_tokens, lambda count: self._too_many(count, param))

    def _too_many(self, count: int, param: str) -> RequestError:
        return RequestError(f"A text may have {self._max_tokens:,} tokens (--max-queued-tokens); this one has at least {count:,}.", param)
