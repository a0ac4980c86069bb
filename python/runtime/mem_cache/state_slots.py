"""Recurrent states of cached prefixes: which are free, which belong to a prefix, and which one is dropped for a new one. No torch."""

from __future__ import annotations

from dataclasses import dataclass

NONE = -1
"""The slot of a cached state that was dropped."""


@dataclass(eq=False, slots=True)
class CachedState:
    """The recurrent state behind a prefix.

    Attributes:
        slot: its number in the state pool; `NONE` when it was dropped for another one.
    """

    slot: int

    @property
    def alive(self) -> bool:
        """Whether a request can begin with it."""
        return self.slot != NONE


class StateSlots:
    """Owner of the slots of cached states. A slot is free, reserved for a state that a prompt is going to leave, or that of a prefix.

    States of prefixes are dropped least recently used first. Steps run in the order in which they are planned, and requests begin with
    cached states before a step's prompts leave new ones, so that a slot can be used again at once.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._of_prefixes: dict[int, CachedState] = {}  # by slot, least recently used first

    @property
    def used(self) -> int:
        """Number of states of prefixes."""
        return len(self._of_prefixes)

    def reserve(self) -> CachedState | None:
        """A slot for a new state; None if all slots are reserved."""
        if not self._free:
            if not self._of_prefixes:
                return None
            self.release(next(iter(self._of_prefixes.values())))
        return CachedState(self._free.pop())

    def attach(self, state: CachedState) -> None:
        """The reserved `state` is that of a prefix from now on."""
        self._of_prefixes[state.slot] = state

    def use(self, state: CachedState) -> None:
        """A request begins with `state`, that of a prefix."""
        self._of_prefixes[state.slot] = self._of_prefixes.pop(state.slot)

    def release(self, state: CachedState) -> None:
        """Free the slot of `state`, if it has one: it is not needed, or its prefix was evicted."""
        if state.alive:
            self._of_prefixes.pop(state.slot, None)
            self._free.append(state.slot)
            state.slot = NONE

    def check(self) -> None:
        """Assert the invariants; for tests."""
        slots = [*self._free, *self._of_prefixes]
        assert len(set(slots)) == len(slots) <= self.count
        assert all(state.slot == slot for slot, state in self._of_prefixes.items())
