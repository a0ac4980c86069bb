"""Draft vocabularies: which of the target's tokens a draft head can propose."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from runtime.errors import ConfigError

ID_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Dtypes that a token map may have."""


def invert(to_target: torch.Tensor, vocab_size: int, name: str) -> torch.Tensor:
    """Invert `to_target`, int64 [Vd]: returns `to_draft`, int64 [vocab_size], -1 for ids without a draft id. Call it only at load time.

    Raises:
        ConfigError: an id is outside the vocabulary or occurs twice; the message calls the map `name`.
    """
    ids = to_target.cpu()
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ConfigError(f"{name} names token ids outside 0..{vocab_size - 1}, or none")
    if len(ids.unique()) != len(ids):
        raise ConfigError(f"{name} names some token ids twice")
    to_draft = torch.full((vocab_size,), -1, dtype=torch.int64)
    to_draft[ids] = torch.arange(len(ids))
    return to_draft.to(to_target.device)


def load_token_map(path: str | Path) -> torch.Tensor:
    """The hot tokens of a `--speculative-token-map` file: int64 [n] target ids, saved by `torch.save`.

    Raises:
        ConfigError: the file is missing or holds something else.
    """
    flag = f"--speculative-token-map {str(path)!r}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about formats of its own
            ids = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"{flag} cannot be read: {error.strerror or type(error).__name__}") from error
    except Exception as error:  # torch raises any type for damaged bytes, and its message suggests unpickling code
        raise ConfigError(f"{flag} holds no tensor or list that torch.save wrote; save the ids with it again") from error
    if isinstance(ids, list) and all(type(i) is int and abs(i) < 1 << 63 for i in ids):
        ids = torch.tensor(ids, dtype=torch.int64)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 1 or ids.dtype not in ID_TYPES or ids.layout != torch.strided or ids.is_meta:
        raise ConfigError(f"{flag} must hold one list of token ids")
    return ids.to(torch.int64)
