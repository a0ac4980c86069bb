"""How many prompt tokens one step takes."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.batch import WorkerLimits
from runtime.config.runtime_config import SchedulerConfig

BACKLOG = 4
"""Steps have the largest chunk while this many such chunks wait.

Large chunks take less time per token, but the first prompts of a chunk wait for its last one, which costs little if many chunks follow.
"""
FEW_PROMPTS = 8
"""With more open prompts than this, prompts share steps even if one alone saturates the device.

With one prompt per step, the first of two equal prompts finishes after one step; if they share steps, both finish after two. With many
prompts few gain from that, and long steps are a few percent faster.
"""


@dataclass(slots=True)
class PrefillBudget:
    """Prompt tokens left in one step.

    Attributes:
        left: tokens that the step can still take.
        chunked: whether prompts may be split. If not, only those longer than `max_extend_tokens` are.
        max_extend_tokens: the worker's limit.
        saturating_tokens: from this many prompt tokens on no other prompt is added; 0: prompts always share steps.
        taken: prompt tokens so far.
    """

    left: int
    chunked: bool
    max_extend_tokens: int
    saturating_tokens: int
    taken: int = 0

    @classmethod
    def start(cls, config: SchedulerConfig, limits: WorkerLimits, prompts: int = 0, waiting: int = 0) -> PrefillBudget:
        """The budget of an empty step.

        Args:
            config: gives the chunk sizes; with a chunk size below 1 prompts are not split.
            prompts: number of open prompts.
            waiting: their tokens that have not run.
        """
        chunk = config.chunked_prefill_size
        if config.largest_chunk_size is not None and waiting >= BACKLOG * config.largest_chunk_size:
            chunk = config.largest_chunk_size
        left = min(n for n in (chunk, config.max_prefill_tokens, limits.max_extend_tokens) if n > 0)
        return cls(left, chunk > 0, limits.max_extend_tokens, limits.saturating_tokens if prompts <= FEW_PROMPTS else 0)

    def decode_rows(self, tokens_per_step: int) -> int:
        """Number of requests that may decode in a prompt step, in at most half of its tokens; 0 if prompts are not split."""
        return self.left // 2 // tokens_per_step if self.chunked else 0

    def offer(self, wanted: int, first: bool) -> int:
        """How many of the `wanted` tokens of the next prompt fit; 0 if it must wait. `first`: whether the step is empty."""
        if not first and 0 < self.saturating_tokens <= self.taken:
            return 0
        if self.chunked or wanted <= self.left:
            return min(wanted, self.left)
        return min(wanted, self.max_extend_tokens) if first else 0

    def reserve(self, count: int) -> None:
        """Reserve the tokens of decode rows."""
        self.left = max(0, self.left - count)

    def take(self, count: int) -> None:
        """Add tokens of a prompt."""
        self.reserve(count)
        self.taken += count
