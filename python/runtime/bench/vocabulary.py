"""How the client counts and makes tokens: a tokenizer on this machine, else the server's own over HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from runtime.bench.http_stream import HttpClient, HttpFailure


class Vocabulary(Protocol):
    """Text to token ids and back."""

    size: int

    async def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens added as the server adds them to a prompt."""
        ...

    async def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        ...


class LocalVocabulary:
    """A `tokenizer.json` on this machine."""

    def __init__(self, file: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(file))
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.folder = file.parent

    async def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens added as the server adds them to a prompt."""
        return self._tokenizer.encode(text).ids

    async def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def count(self, text: str) -> int:
        """Tokens in generated text: no special tokens added."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


class ServerVocabulary:
    """The server's `/tokenize` and `/detokenize`, for models whose tokenizer is not on this machine."""

    def __init__(self, client: HttpClient, model: str, size: int) -> None:
        self._client = client
        self._model = model
        self.size = size

    async def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens added as the server adds them to a prompt."""
        return (await self._client.json("POST", "/tokenize", {"model": self._model, "prompt": text}))["tokens"]

    async def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`."""
        answer = await self._client.json("POST", "/detokenize", {"model": self._model, "tokens": list(ids)})
        return answer["text"] if "text" in answer else answer["prompt"]


class UnknownVocabulary:
    """Only the number of tokens is known: enough for random ids, not for text."""

    def __init__(self, size: int) -> None:
        self.size = size

    async def encode(self, text: str) -> list[int]:
        """Raises ValueError."""
        raise ValueError("no tokenizer to make text with: pass --tokenizer FOLDER, or take --dataset-name random-ids")

    async def decode(self, ids: Sequence[int]) -> str:
        """Raises ValueError."""
        raise ValueError("no tokenizer to make text with: pass --tokenizer FOLDER, or take --dataset-name random-ids")


def tokenizer_file(name: str) -> Path | None:
    """Find `tokenizer.json` in a folder, or in the local cache of a hub id (never over the network)."""
    if (file := Path(name) / "tokenizer.json").is_file():
        return file
    if Path(name).exists() or name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "tokenizer.json")
    return Path(cached) if isinstance(cached, str) else None


async def open_vocabulary(client: HttpClient, tokenizer: str | None, model: str, info: dict[str, Any]) -> Vocabulary:
    """The best vocabulary to be had: `tokenizer`, the paths that the server names, the server's endpoints, a bare size.

    Args:
        client: of the server under test.
        tokenizer: what the user named, else None.
        model: served model name.
        info: the server's `/get_model_info`, `{}` where it has none.

    Raises:
        ValueError: `tokenizer` has no tokenizer.json, or nothing tells the vocabulary's size.
    """
    if tokenizer is not None:
        file = tokenizer_file(tokenizer)
        if file is None:
            raise ValueError(f"--tokenizer {tokenizer}: no tokenizer.json there")
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
            raise ValueError("the server tells neither its tokenizer nor its vocabulary's size: pass --tokenizer FOLDER") from None
        return UnknownVocabulary(size)


def _vocab_size(info: dict[str, Any], model: str) -> int | None:
    if size := info.get("vocab_size"):
        return int(size)
    for folder in (info.get("model_path"), model):
        if folder and (file := Path(str(folder)) / "config.json").is_file():
            return int(json.loads(file.read_text(encoding="utf-8"))["vocab_size"])
    return None
