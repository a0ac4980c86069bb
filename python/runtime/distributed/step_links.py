"""How encoded steps travel from rank 0 to the other ranks. No torch."""

from __future__ import annotations

from typing import Protocol


class StepSender(Protocol):
    """Rank 0's end."""

    def send(self, message: bytes) -> None:
        """Hand one message to every rank that it reaches, in order. Raises `ServingError` if a rank does not read."""
        ...

    def close(self) -> None:
        """Close after messages that were sent have left."""
        ...


class StepReceiver(Protocol):
    """The end of another rank."""

    def receive(self) -> bytes:
        """Wait for the next message."""
        ...
