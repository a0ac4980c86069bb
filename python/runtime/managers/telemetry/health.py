"""Whether the server can answer: its processes, its start and its end."""

from __future__ import annotations


class Health:
    """What `/health` and `/ready` report; written by whoever watches the processes, read by everyone. One event loop."""

    def __init__(self) -> None:
        self.dead: str | None = None
        """The process that died or hangs."""
        self.warm = False
        """Whether the server has started and made its first token."""
        self.draining = False
        """Whether it is shutting down."""

    def alive(self) -> bool:
        """Whether every process is there and responds."""
        return self.dead is None

    def ready(self) -> bool:
        """Whether a new request would be taken."""
        return self.alive() and self.warm and not self.draining

    @property
    def reason(self) -> str:
        """Why not ready, or an empty text."""
        if self.dead is not None:
            return f"the {self.dead} process died"
        if self.draining:
            return "the server is shutting down"
        return "" if self.warm else "the server is starting"
