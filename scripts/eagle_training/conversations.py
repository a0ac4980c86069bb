"""Conversations as token ids, stored in shards on disk."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.errors import ConfigError
from runtime.json_file import read_object
from runtime.small_file import write_whole

LONGEST_PERIOD = 64
SHORTEST_LOOP = 48
"""An ending is a loop if at least this many tokens repeat, at least `MIN_REPEATS` times."""
MIN_REPEATS = 3
KEPT_REPEATS = 2


@dataclass(frozen=True, slots=True)
class Conversation:
    """One user turn and its answer.

    Attributes:
        ids: int32 [n]: the tokens of the template, the user turn, and the answer with its end-of-text token, if any.
        answer_start: index of the first token of the answer.
        temperature: sampling temperature of the answer; 0 is greedy.
        prompt: text of the user turn.
        held_out: whether it is excluded from training.
    """

    ids: npt.NDArray[np.int32]
    answer_start: int
    temperature: float
    prompt: str
    held_out: bool

    @property
    def answer_tokens(self) -> int:
        """Number of answer tokens."""
        return len(self.ids) - self.answer_start


def loop_period(ids: Sequence[int] | npt.NDArray[np.int32]) -> tuple[int, int]:
    """(period, repeated tokens) of the loop at the end of `ids`; (0, 0) if there is none."""
    row = np.asarray(ids)
    for period in range(1, min(LONGEST_PERIOD, len(row) // MIN_REPEATS) + 1):
        same = row[period:] == row[:-period]
        run = len(same) if same.all() else int(np.argmin(same[::-1]))
        repeated = run + period if run else 0
        if repeated >= max(SHORTEST_LOOP, MIN_REPEATS * period):
            return period, repeated
    return 0, 0


def cut_loop(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """`ids` with at most `KEPT_REPEATS` repetitions of the loop at its end."""
    period, repeated = loop_period(ids)
    return ids if period == 0 else ids[: len(ids) - repeated + KEPT_REPEATS * period]


class ShardFolder:
    """Conversations in numbered files in a folder and its subfolders, written atomically, and notes about their origin."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def files(self) -> list[Path]:
        """The shards, sorted by number."""
        return sorted(self.folder.rglob("round-*.npz"))

    def next_number(self) -> int:
        """An unused shard number."""
        files = self.files()
        return int(files[-1].stem.split("-")[1]) + 1 if files else 0

    def save(self, number: int, conversations: Sequence[Conversation]) -> None:
        """Write a shard."""
        lengths = np.array([len(c.ids) for c in conversations], dtype=np.int32)
        path = self.folder / f"round-{number:05d}.npz"
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(
                file,
                ids=np.concatenate([c.ids for c in conversations]) if len(conversations) else np.zeros(0, np.int32),
                lengths=lengths,
                starts=np.array([c.answer_start for c in conversations], dtype=np.int32),
                temperatures=np.array([c.temperature for c in conversations], dtype=np.float32),
                held_out=np.array([c.held_out for c in conversations], dtype=bool),
                prompts=np.frombuffer(json.dumps([c.prompt for c in conversations]).encode(), dtype=np.uint8),
            )
        os.replace(partial, path)

    def load(self) -> list[Conversation]:
        """All conversations. Raises `ConfigError` if a shard is damaged."""
        return [conversation for path in self.files() for conversation in load_shard(path)]

    @property
    def note(self) -> dict[str, Any]:
        """The notes: `seconds` spent on the shards, and `made`: command, commit and machine. Raises `ConfigError`."""
        path = self.folder / "data.json"
        return read_object(path) if path.is_file() else {"seconds": 0.0, "made": {}}

    def put_note(self, **values: object) -> None:
        """Update the notes."""
        write_whole(self.folder / "data.json", json.dumps(self.note | values).encode())


def load_shard(path: Path) -> list[Conversation]:
    """The conversations of one file. Raises `ConfigError` if it is damaged."""
    try:
        with np.load(path) as data:
            parts = np.split(data["ids"], np.cumsum(data["lengths"])[:-1]) if len(data["lengths"]) else []
            prompts = json.loads(data["prompts"].tobytes().decode())
            columns = zip(parts, data["starts"].tolist(), data["temperatures"].tolist(), prompts, data["held_out"].tolist(), strict=True)
            return [Conversation(*row) for row in columns]
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is damaged. Remove it and run the generate phase again.") from error
