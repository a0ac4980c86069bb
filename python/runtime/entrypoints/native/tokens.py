"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

from starlette.responses import Response

from runtime.entrypoints.http.rendering import off_loop
from runtime.entrypoints.http.responses import json_response
from runtime.entrypoints.native.protocol import DetokenizeBody, TokenizeBody
from runtime.entrypoints.openai.chats import Chats
from runtime.errors import UnknownToken
from runtime.managers.tokenizer_manager import TokenizerManager


class TokenApi:
    """Turns texts and conversations into token ids, and back."""

    def __init__(self, manager: TokenizerManager, chats: Chats) -> None:
        self._manager, self._tokenizer, self._chats = manager, manager.tokenizer, chats

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Token ids of a text, of several texts, or of a conversation."""
        if body.messages is not None:
            tokens: Any = await self._chats.prompt_ids(body.chat(body.messages), any_length=True)
        elif isinstance(body.prompt, str):
            tokens = await self._manager.encoder.encode(body.prompt, body.add_special_tokens, any_length=True)
        else:
            tokens = await self._ids_of(body.prompt or [], body.add_special_tokens)
        count = [len(ids) for ids in tokens] if isinstance(body.prompt, list) else len(tokens)
        answer = {"tokens": tokens, "count": count, "max_model_len": self._manager.max_context_len}
        total = sum(count) if isinstance(count, list) else count
        return await off_loop(
            total, lambda: json_response({**answer, "token_strs": self._token_strs(tokens)} if body.return_token_strs else answer)
        )

    async def _ids_of(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of several texts; the limit applies to their sum."""
        done: list[list[int]] = []
        for text in texts:
            done.append(await self._manager.encoder.encode(text, add_special_tokens, any_length=True))
            self._manager.new_cost().check_tokens(sum(map(len, done)), "prompt")
        return done

    def _token_strs(self, tokens: Any) -> Any:
        """The text of every token, in the shape of `tokens`."""
        return self._tokenizer.token_text(tokens) if isinstance(tokens, int) else [self._token_strs(each) for each in tokens]

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """The text of one list of token ids, or the texts of several."""
        several = bool(body.tokens) and isinstance(body.tokens[0], list)
        lists: list[list[int]] = body.tokens if several else [body.tokens]  # pyright: ignore[reportAssignmentType]
        highest, limit = max(chain.from_iterable(lists), default=0), self._manager.limits.vocab_size
        if highest >= limit:
            raise UnknownToken("tokens", highest, limit, subject="tokens has")
        skip = body.skip_special_tokens
        texts = await asyncio.to_thread(lambda: [self._tokenizer.decode(ids, skip_special_tokens=skip) for ids in lists])
        text = texts if several else texts[0]
        return json_response({"text": text, "prompt": text})

    async def info(self) -> Response:
        """The tokenizer's special tokens and chat template, for evaluation tools that tokenise through the server."""
        tokenizer = self._tokenizer
        named = {name: tokenizer.named_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        size = await asyncio.to_thread(lambda: tokenizer.vocab_size)  # the first access copies the vocabulary
        eos_ids = [token for token in dict.fromkeys((tokenizer.eos_id, *self._manager.model_config.eos_ids)) if token is not None]
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_ids": eos_ids, "vocab_size": size}
        lengths = {"model_max_length": self._manager.max_context_len}
        return json_response({**named, **ids, **lengths, "chat_template": tokenizer.chat_template})
