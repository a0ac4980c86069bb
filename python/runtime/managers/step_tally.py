"""How decode steps ran: counted per request, and for the server."""

from __future__ import annotations


class StepTally:
    """Decode steps, those that replayed a graph, and the rows they computed. Steps over prompts do not count, nor who decodes along.

    Attributes:
        steps, graph_steps: decode steps, and those of them that replayed a captured graph.
        live_rows, padded_rows: requests in those steps, and rows that only filled up a captured graph.
    """

    __slots__ = ("graph_steps", "live_rows", "padded_rows", "steps")

    def __init__(self) -> None:
        self.steps = self.graph_steps = self.live_rows = self.padded_rows = 0

    def add(self, graph: bool, live_rows: int, padded_rows: int) -> None:
        """Count one decode step of so many rows."""
        self.steps += 1
        self.graph_steps += graph
        self.live_rows += live_rows
        self.padded_rows += padded_rows

    def since(self, earlier: StepTally) -> StepTally:
        """What was counted after `earlier`, a copy of this one."""
        late = StepTally()
        for name in self.__slots__:
            setattr(late, name, getattr(self, name) - getattr(earlier, name))
        return late

    @property
    def graph_hit_rate(self) -> float | None:
        """Share of the steps that replayed a graph; None before the first one."""
        return self.graph_steps / self.steps if self.steps else None

    @property
    def padding_waste(self) -> float | None:
        """Share of the rows computed that were padding; None before the first one."""
        computed = self.padded_rows + self.live_rows
        return self.padded_rows / computed if computed else None
