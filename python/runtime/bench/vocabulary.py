"""Encoding and decoding for the client: a local tokenizer, else the server's over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from runtime.bench.http_stream import HttpClient, HttpFailure


class LocalVocabulary:
    """A local `tokenizer.json`."""

    def __init__(self, file: Path) -> None:
        """Raises ValueError if the file is not a tokenizer."""
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no narrower class
            raise ValueError(f"{file} cannot be read: {error}") from error
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.folder = file.parent

    async def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the server adds to a prompt."""
        await asyncio.sleep(0)  # lets Ctrl-C end the creation of many prompts
        return self._tokenizer.encode(text).ids

    async def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def count(self, text: str) -> int:
        """Number of tokens in `text`, without special tokens. A server may send half of a surrogate pair; it counts as a question mark."""
        return len(self._tokenizer.encode(text.encode(errors="replace").decode(), add_special_tokens=False).ids)


class ServerVocabulary:
    """Uses the server's `/tokenize` and `/detokenize`, for models without a local tokenizer."""

    def __init__(self, client: HttpClient, model: str, size: int) -> None:
        self._client = client
        self._model = model
        self.size = size

    async def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the server adds to a prompt."""
        return (await self._client.json("POST", "/tokenize", {"model": self._model, "prompt": text}))["tokens"]

    async def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`."""
        answer = await self._client.json("POST", "/detokenize", {"model": self._model, "tokens": list(ids)})
        return answer["text"] if "text" in answer else answer["prompt"]


_NO_TOKENIZER = "there is no tokenizer; pass --tokenizer FOLDER or choose --dataset-name random-ids"


class UnknownVocabulary:
    """Knows only the vocabulary size, which is enough for random ids but not for text."""

    def __init__(self, size: int) -> None:
        self.size = size

    async def encode(self, text: str) -> list[int]:
        """Raises ValueError."""
        raise ValueError(_NO_TOKENIZER)

    async def decode(self, ids: Sequence[int]) -> str:
        """Raises ValueError."""
        raise ValueError(_NO_TOKENIZER)


Vocabulary = LocalVocabulary | ServerVocabulary | UnknownVocabulary


def tokenizer_file(name: str) -> Path | None:
    """The `tokenizer.json` of a folder, or of a hub id in the local cache; nothing is downloaded."""
    if os.path.isfile(file := Path(name) / "tokenizer.json"):
        return file
    if os.path.exists(name) or name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "tokenizer.json")
    return Path(cached) if isinstance(cached, str) else None


async def open_vocabulary(client: HttpClient, tokenizer: str | None, model: str, info: dict[str, Any]) -> Vocabulary:
    """Open the first vocabulary available: `tokenizer`, the paths that the server reports, the server's endpoints, or just a size.

    Args:
        client: client of the server under test.
        tokenizer: value of --tokenizer or None.
        model: served model name.
        info: the server's `/get_model_info`; `{}` if it has none.

    Raises:
        ValueError: `tokenizer` has no tokenizer.json, the model's config.json cannot be read, or the vocabulary size is unknown.
    """
    if tokenizer is not None:
        file = tokenizer_file(tokenizer)
        if file is None:
            raise ValueError(f"--tokenizer {tokenizer}: there is no tokenizer.json")
        return LocalVocabulary(file)
    for name in (info.get("tokenizer_path"), info.get("model_path"), model):
        if name and (file := tokenizer_file(str(name))) is not None:
            return LocalVocabulary(file)
    size = _vocab_size(info, model)
    try:
        tokens = (await client.json("POST", "/tokenize", {"model": model, "prompt": "The quick brown fox"}))["tokens"]
        return ServerVocabulary(client, model, size or max(tokens) + 1)
    except (HttpFailure, KeyError, TypeError):
        if size is None:
            raise ValueError("the server reports neither its tokenizer nor its vocabulary size; pass --tokenizer FOLDER") from None
        return UnknownVocabulary(size)


def _vocab_size(info: dict[str, Any], model: str) -> int | None:
    if size := info.get("vocab_size"):
        return int(size)
    for folder in (info.get("model_path"), model):
        if folder and os.path.isfile(file := Path(str(folder)) / "config.json"):
            config = _object(file)
            return config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return None


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not a JSON object")
    return found
