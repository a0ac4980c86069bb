"""Finds a child process that is alive but does not respond."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from runtime.entrypoints.child import Role

TURN_SECONDS = 0.5
DUMP_SECONDS = 1.0
"""How long a hung child may take to print its stacks."""
SILENT_TURNS = 16
"""Turns without a heartbeat after which a child counts as hung: 8 s."""
SHARDED_TURNS = 12
"""The same where several ranks share the model: 6 s. Ranks of other nodes notice each other after 5 s, and end."""
TRACE_TURNS = 1200
"""Turns for which the scheduler may be silent while it writes a trace, through which torch holds the GIL: 10 min."""


class Watchdog:
    """Counts the turns since each child's last heartbeat.

    It counts turns and reads no clock, so that a machine that was suspended lost no heartbeat.

    Attributes:
        patience: turns without a heartbeat after which a child counts as hung.
    """

    def __init__(self, roles: Iterable[Role], patience: int = SILENT_TURNS) -> None:
        self.patience = patience
        self._silent = dict.fromkeys(roles, 0)
        self._heard = dict.fromkeys(self._silent, -1)
        self._traced = 0

    def turn(self, beats: Mapping[str, int], writes_trace: bool) -> Role | None:
        """Count one turn.

        Args:
            beats: how many heartbeats of each child have come so far.
            writes_trace: whether the scheduler is writing a trace.

        Returns:
            The first child that hangs, or None.
        """
        self._traced = self._traced + 1 if writes_trace else 0
        hung: list[Role] = []
        for role in self._silent:
            excused = role == "scheduler" and 0 < self._traced <= TRACE_TURNS
            self._silent[role] = self._silent[role] + 1 if beats[role] == self._heard[role] and not excused else 0
            self._heard[role] = beats[role]
            if self._silent[role] >= self.patience:
                hung.append(role)
        return hung[0] if hung else None
