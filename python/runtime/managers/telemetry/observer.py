"""What is told of the life of every choice: the interface of the metrics."""

from __future__ import annotations

from typing import Protocol

from runtime.managers.generation import GenerationUpdate


class Observer(Protocol):
    """Receives the events of every choice. Its methods are fast and do not raise."""

    def started(self, prompt_tokens: int) -> None:
        """A choice was sent to the scheduler."""
        ...

    def first_token(self, seconds: float) -> None:
        """Its first tokens arrived, `seconds` after its start."""
        ...

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """More tokens arrived, `seconds` after the previous ones."""
        ...

    def ended(self, seconds: float, update: GenerationUpdate | None) -> None:
        """It ended, `seconds` after its start; `update` is None if it failed or its client disconnected."""
        ...
