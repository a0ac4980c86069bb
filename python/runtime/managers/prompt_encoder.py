"""Turns prompts into token ids: within the limits of a call, and off the event loop if they are long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
"""Texts of at least this many characters are tokenised in a separate thread, so they do not delay shorter ones."""
MIN_CHARS = 64
"""Minimum cost of a text, in characters."""


class PromptEncoder:
    """Tokenises texts and conversations. Belongs to one event loop.

    Args:
        tokenizer: must be thread-safe.
        max_context_len: prompt and output tokens of one request together.
        max_tokens: the maximum number of tokens of texts that need not fit in the context.
    """

    def __init__(self, tokenizer: Tokenizer, max_context_len: int, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_context_len = max_context_len
        self._max_tokens = max_tokens
        self._max_chars = max_context_len * tokenizer.longest_token
        self._on_loop = 0  # characters tokenised on the event loop since other tasks last ran
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._huge = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize-huge")

    async def encode(self, text: str, add_special_tokens: bool = True, *, any_length: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            any_length: whether the text may exceed the context.

        Raises:
            ContextTooLong: the text cannot fit in the context; a text that is far too long is not tokenised.
            RequestError: with `any_length`, the text has more than `max_tokens`.
        """
        bound = self._bound(len(text), "prompt", any_length)
        return await self._run(len(text), lambda: self._tokenizer.encode(text, add_special_tokens, bound))

    async def encode_chat(self, messages: Sequence[Message], *, any_length: bool = False, **options: Any) -> list[int]:
        """Token ids of a conversation; `options` are those of `Tokenizer.encode_chat`. Raises like `encode`."""
        tools = options.get("tools") or []
        chars = count_chars([*messages, *tools])
        bound = self._bound(chars, "messages", any_length)
        long = options.get("chat_template") is not None or bool(tools)
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

    def _bound(self, characters: int, param: str, any_length: bool) -> BoundedEncoding:
        """Limits the tokens of a text while it is encoded. Raises `TextTooLong` at once if it has too many characters."""
        if any_length:
            rule = f"A text may have {self._max_tokens:,} tokens (--max-queued-tokens)"
            return BoundedEncoding(self._max_tokens, lambda count: RequestError(f"{rule}; this one has at least {count:,}.", param))
        if characters > self._max_chars:
            raise TextTooLong(characters, self._max_chars, self._max_context_len, param)
        too_long = partial(ContextTooLong, max_context_len=self._max_context_len, at_least=True, param=param)
        return BoundedEncoding(self._max_context_len - 1, too_long)
