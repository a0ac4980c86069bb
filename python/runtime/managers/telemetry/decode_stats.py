"""How decode steps ran: counted per request, and for the server."""

from __future__ import annotations

from operator import sub

import msgspec


class DecodeStats(msgspec.Struct, array_like=True):
    """Decode steps, graph replays and padding. Steps that hold prompt tokens are not counted.

    Attributes:
        steps, graph_steps: decode steps, and those of them that replayed a captured graph.
        live_rows, padded_rows: requests in those steps, and rows that only padded the batch to a captured size.
    """

    steps: int = 0
    graph_steps: int = 0
    live_rows: int = 0
    padded_rows: int = 0

    def add(self, graph: bool, live_rows: int, padded_rows: int, times: int = 1) -> None:
        """Count one decode step, or `times` equal ones."""
        self.steps += times
        self.graph_steps += graph * times
        self.live_rows += live_rows * times
        self.padded_rows += padded_rows * times

    def since(self, earlier: DecodeStats) -> DecodeStats:
        """The difference to `earlier`, a copy of this one."""
        return DecodeStats(*map(sub, msgspec.structs.astuple(self), msgspec.structs.astuple(earlier)))

    @property
    def graph_hit_rate(self) -> float | None:
        """Fraction of the steps that replayed a graph; None before the first step."""
        return self.graph_steps / self.steps if self.steps else None

    @property
    def padding_waste(self) -> float | None:
        """Fraction of the computed rows that were padding; None before the first step."""
        computed = self.padded_rows + self.live_rows
        return self.padded_rows / computed if computed else None

    def shares(self) -> dict[str, float | None]:
        """Both rates, by the names of `meta_info`."""
        return {"graph_hit_rate": self.graph_hit_rate, "padding_waste": self.padding_waste}
