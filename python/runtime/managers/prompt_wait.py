"""Decides whether short prompts wait for others, so that several share a pass."""

from __future__ import annotations

from collections.abc import Callable

LEAST_DECODES = 16
"""With fewer decoding requests, a row that waits costs more than the pass that it saves."""
FIXED_SHARE = 1 / 3
"""The part of a prompt pass that does not depend on its tokens, mostly the time to read the weights, as a share of a decode step."""
AVERAGED_STEPS = 16
"""Decode steps over which the rate of new prompts is averaged."""
MOST_COUNTED = 2
"""New prompts that count per decode step, so that the first requests of an idle server are not taken for a rate."""


class PromptWait:
    """Whether the waiting prompts wait for one more decode step.

    Requests do not decode during a prompt pass, which takes a fixed time even for few tokens. A prompt that waits for a decode step leaves
    a row unused instead, which costs the step's time divided by the number of requests that decode. The sum of both costs is least if
    prompts run when those that wait have cost as much as a pass (the economic order quantity: Harris 1913, "How many parts to make at
    once").

    Args:
        max_steps: the maximum number of decode steps that a prompt waits.
        enough: prompt tokens from which a pass takes proportionally longer, so that sharing it saves little.
    """

    def __init__(self, max_steps: int, enough: int) -> None:
        self._max_steps, self._enough = max_steps, enough
        self._rate = 0.0  # new prompts per decode step
        self._steps = self._waited = 0  # decode steps since the first of the waiting prompts came, and the sum of waiting prompts over them

    def decoded(self, started: int) -> None:
        """A decode step was submitted, and `started` prompts since the one before."""
        self._rate += (min(started, MOST_COUNTED) - self._rate) / AVERAGED_STEPS

    def holds(self, decodes: int, waiting: Callable[[int], tuple[int, int]]) -> bool:
        """Whether to run a decode step before the waiting prompts.

        Args:
            decodes: number of requests that decode.
            waiting: given a number of tokens that is enough, returns how many prompts could run now, and their uncached tokens, up to that
                number.
        """
        if decodes >= LEAST_DECODES and self._steps < self._max_steps and self._rate * self._max_steps >= 1.0:
            prompts, tokens = waiting(self._enough)
            if prompts and tokens < self._enough and self._waited + prompts <= decodes * FIXED_SHARE:
                self._steps, self._waited = self._steps + 1, self._waited + prompts
                return True
        self._steps = self._waited = 0
        return False
