"""How decode steps ran: counted per request, and for the server."""

from __future__ import annotations

import msgspec


class StepTally(msgspec.Struct, array_like=True):
    """Decode steps, those that replayed a graph, and the rows they computed. Steps over prompts do not count, nor who decodes along.

    On the wire four numbers: what a request's reader is shown follows from them where it is shown.

    Attributes:
        steps, graph_steps: decode steps, and those of them that replayed a captured graph.
        live_rows, padded_rows: requests in those steps, and rows that only filled up a captured graph.
    """

    steps: int = 0
    graph_steps: int = 0
    live_rows: int = 0
    padded_rows: int = 0

    def add(self, graph: bool, live_rows: int, padded_rows: int) -> None:
        """Count one decode step of so many rows."""
        self.steps += 1
        self.graph_steps += graph
        self.live_rows += live_rows
        self.padded_rows += padded_rows

    def since(self, earlier: StepTally) -> StepTally:
        """What was counted after `earlier`, a copy of this one."""
        late = StepTally()
        for name in self.__struct_fields__:
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

    def shares(self) -> dict[str, float | None]:
        """Both, as `meta_info` of an answer names them."""
        return {"graph_hit_rate": self.graph_hit_rate, "padding_waste": self.padding_waste}
