"""Whether the server can answer requests."""

from __future__ import annotations


class Health:
    """The state that `/health` and `/ready` report. The process supervisor writes it, in the event loop of its readers."""

    def __init__(self) -> None:
        self.dead: str | None = None
        """The process that died or hangs, if one did."""
        self.warm = False
        """Whether the server has started and generated its first token."""
        self.draining = False
        """Whether it is shutting down."""

    def alive(self) -> bool:
        """Whether every process responds."""
        return self.dead is None

    def ready(self) -> bool:
        """Whether a new request would be accepted."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Why the server is not ready; empty if it is."""
        if self.dead is not None:
            return f"the {self.dead} process died"
        if self.draining:
            return "the server is shutting down"
        return "" if self.warm else "the server is starting"
