"""The end of one choice: how long each phase of it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime.managers.generation import Generation
from runtime.managers.messages import Finish
from runtime.managers.telemetry.progress import Progress

Phase = Literal["queue", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """One choice that ended.

    Attributes:
        index: which of the n choices.
        finish: why it ended; None if it failed or its client disconnected.
        progress: its last known counts.
        began, ended: when it was sent to the scheduler, and when its last text arrived, in monotonic seconds.
    """

    generation: Generation
    index: int
    finish: Finish | None
    progress: Progress
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """Seconds from its start to its end."""
        return self.ended - self.began

    def phases(self) -> dict[Phase, float]:
        """Seconds of each phase that it reached; the phase in which it ended has the remaining time."""
        shown: dict[Phase, float] = {}
        rest, progress = self.seconds, self.progress
        known: tuple[tuple[Phase, float], ...] = (("queue", progress.queue_seconds), ("prefill", progress.prefill_seconds))
        for name, seconds in known:
            if not seconds:
                return {**shown, name: rest}
            shown[name] = min(seconds, rest)
            rest -= shown[name]
        return {**shown, "decode": rest}

    def slowest_phase(self) -> Phase:
        """The phase that took longest."""
        phases = self.phases()
        return max(phases, key=phases.__getitem__)
