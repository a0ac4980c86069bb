"""The supervisor of child processes: a silent process counts as hung, except a scheduler that writes a trace."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from runtime.entrypoints import processes
from runtime.entrypoints.processes import Runtime

Role = Literal["scheduler", "detokenizer"]


@dataclass(frozen=True)
class Named:
    """A child process of which only the role is read."""

    role: Role


def watched(monkeypatch: pytest.MonkeyPatch, silent: Role, trace_turns: int) -> tuple[list[str], int]:
    """Watch two children, one of them `silent`, during a trace of `trace_turns` turns; returns what hangs, and after how many turns."""
    runtime: Any = Runtime.__new__(Runtime)
    beats = {"scheduler": 0, "detokenizer": 0}
    runtime.manager = SimpleNamespace(beats=beats, writes_trace=True)
    runtime._children = [Named("detokenizer"), Named("scheduler")]
    hung, turns = [], 0

    async def turn(_seconds: float) -> None:
        nonlocal turns
        turns += 1
        runtime.manager.writes_trace = turns <= trace_turns
        for role in beats:
            beats[role] += role != silent

    async def give_up(child: Any) -> None:
        hung.append(child.role)

    monkeypatch.setattr(processes.asyncio, "sleep", turn)
    runtime._give_up = give_up
    asyncio.run(runtime._watch())
    return hung, turns


@pytest.mark.parametrize("trace_turns", [0, 100])
def test_a_silent_scheduler_is_dead_unless_it_writes_a_trace(monkeypatch: pytest.MonkeyPatch, trace_turns: int) -> None:
    hung, turns = watched(monkeypatch, "scheduler", trace_turns)
    assert hung == ["scheduler"]
    assert turns == max(trace_turns, 1) + processes.SILENT_TURNS, "every process is heard in the first turn"


def test_a_trace_excuses_only_the_scheduler_and_only_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    hung, turns = watched(monkeypatch, "detokenizer", 100)
    assert (hung, turns) == (["detokenizer"], processes.SILENT_TURNS + 1)
    hung, turns = watched(monkeypatch, "scheduler", 1 << 30)
    assert (hung, turns) == (["scheduler"], processes.TRACE_TURNS + processes.SILENT_TURNS)
