"""How many prompt tokens one step takes."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.batch import WorkerLimits

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
    def start(cls, chunk_size: int, max_tokens: int, limits: WorkerLimits, prompts: int = 0) -> PrefillBudget:
        """The budget of an empty step, given the number of open `prompts`. With a `chunk_size` below 1 prompts are not split."""
        left = min(n for n in (chunk_size, max_tokens, limits.max_extend_tokens) if n > 0)
        return cls(left, chunk_size > 0, limits.max_extend_tokens, limits.saturating_tokens if prompts <= FEW_PROMPTS else 0)

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
