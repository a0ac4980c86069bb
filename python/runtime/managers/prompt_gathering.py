"""Lets short prompts wait a few steps for each other while many requests decode."""

from __future__ import annotations

from runtime.batch import CostModel

MOST_STEPS = 4
"""Decode steps that a prompt waits at most."""
SHARE = 1 / 8
"""A pass over a short prompt takes about half as long as a decode step even if it holds nothing, because it reads all weights, and all
decoding requests wait for it. Prompts wait while the steps that they waited, added up, are at most this share of those requests: then a
pass less gains more than the waiting costs."""
MEMORY = 32
"""Steps over which the arrival of prompts is averaged."""


class PromptGathering:
    """Decides whether waiting prompts run in the next step. Prompts that fill a pass, or come too seldom to meet others, never wait."""

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model
        self._steps = self._waited = 0
        self._per_step = 0.0

    def may_hold(self, decoding: int) -> bool:
        """Whether a prompt is likely to meet another while `decoding` requests decode a few steps."""
        return self._per_step * MOST_STEPS >= 1 and self._waited < decoding * SHARE and self._steps < MOST_STEPS

    def holds(self, decoding: int, prompts: int, tokens: int) -> bool:
        """Whether `prompts` prompts of `tokens` together wait for one more step of `decoding` requests. Called once a step."""
        self._steps, self._waited = self._steps + 1, self._waited + prompts
        return self._waited <= decoding * SHARE and not self._cost_model.saturates(tokens)

    def planned(self, prompts: int) -> None:
        """A step was planned with so many new prompts; 0 where it only decodes."""
        self._per_step += (prompts - self._per_step) / MEMORY
        if prompts:
            self._steps = self._waited = 0
