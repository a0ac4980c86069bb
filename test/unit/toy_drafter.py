"""A drafter for a test: one class, and the row of its algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from runtime.config.draft_algorithms import ALGORITHM_CAPS, AlgorithmCaps
from runtime.config.flag_parser import flags
from runtime.model_executor.context import WorkerContext
from runtime.model_executor.draft_window import DraftWindow, TreeShape
from runtime.model_executor.drafter import Drafter, DrafterSpec
from runtime.model_executor.iteration import Iteration
from runtime.models.decoder import DecoderModel

TOY = AlgorithmCaps(
    drafter="unit.toy_drafter:RepeatDrafter.make",
    draft="none",
    unused_why="TOY repeats the last token.",
    no_token_map="TOY repeats the last token",
)


class RepeatDrafter(Drafter):
    """Drafts the last token K times."""

    def __init__(self, num_steps: int) -> None:
        self.spec = DrafterSpec(TreeShape(num_steps, 1, num_steps + 1))

    @classmethod
    def make(cls, context: WorkerContext, target: DecoderModel) -> RepeatDrafter:
        return cls(context.speculative.num_steps)

    def propose(self, iteration: Iteration) -> DraftWindow:
        return DraftWindow(iteration.no_drafts.tokens.repeat(1, iteration.depth + 1))


@contextmanager
def toy_row() -> Iterator[None]:
    """The table of algorithms has `TOY` during the `with` block."""
    ALGORITHM_CAPS["TOY"] = TOY
    flags.cache_clear()  # the flags read the names once
    try:
        yield
    finally:
        del ALGORITHM_CAPS["TOY"]
        flags.cache_clear()
