"""Finds a child process that is alive but does not respond."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from runtime.entrypoints.child import Role

TICK_SECONDS = 0.5
"""Seconds between two calls of `Watchdog.tick`."""
DUMP_SECONDS = 1.0
"""How long a hung child may take to print its stacks."""
SILENT_TICKS = 16
"""Ticks without a heartbeat after which a child counts as hung: 8 s."""
SHARDED_TICKS = 12
"""The same if several ranks share the model: 6 s. Ranks on different nodes detect each other's loss after 5 s, and exit."""
TRACE_TICKS = 1200
"""Ticks for which the scheduler may be silent while it writes a trace, during which torch holds the GIL: 10 min."""


class Watchdog:
    """Counts the ticks since each child's last heartbeat.

    It counts ticks instead of reading a clock, so that a suspended machine causes no false alarm.

    Attributes:
        patience: ticks without a heartbeat after which a child counts as hung.
    """

    def __init__(self, roles: Iterable[Role], patience: int) -> None:
        self.patience = patience
        self._silent = dict.fromkeys(roles, 0)
        self._heard = dict.fromkeys(self._silent, -1)
        self._traced = 0

    def tick(self, beats: Mapping[str, int], writes_trace: bool) -> Role | None:
        """Count one tick.

        Args:
            beats: heartbeats received so far, by child.
            writes_trace: whether the scheduler is writing a trace.

        Returns:
            The first child that hangs, or None.
        """
        self._traced = self._traced + 1 if writes_trace else 0
        hung: list[Role] = []
        for role in self._silent:
            excused = role == "scheduler" and 0 < self._traced <= TRACE_TICKS
            self._silent[role] = self._silent[role] + 1 if beats[role] == self._heard[role] and not excused else 0
            self._heard[role] = beats[role]
            if self._silent[role] >= self.patience:
                hung.append(role)
        return hung[0] if hung else None
