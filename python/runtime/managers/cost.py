"""The cost of a call: its prompt tokens, samples and log-probabilities are summed and limited before any request is sent."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import RequestError
from runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class CostLimits:
    """The limits of one call.

    Attributes:
        prompt_tokens: tokens of all its prompts (--max-queued-tokens).
        logprob_cells: log-probabilities in all its answers (--max-logprob-cells).
        samples: texts to generate: as many as may run and wait.
    """

    prompt_tokens: int
    logprob_cells: int
    samples: int


class CallCost:
    """Adds up the cost of one call.

    Attributes:
        prompt_tokens: tokens of its prompts; the samples of a prompt share them.
        samples: texts to generate.
        logprob_cells: log-probabilities that the answers may hold.
    """

    def __init__(self, limits: CostLimits) -> None:
        self.limits = limits
        self.prompt_tokens = self.samples = self.logprob_cells = 0

    def check_samples(self, prompts: int, n: int) -> None:
        """Raise `RequestError` for more texts than can run and wait."""
        if prompts * n > self.limits.samples:
            asked = f"{prompts} prompts times {n}"
            raise RequestError(f"One call may ask for at most {self.limits.samples} texts; this one asks for {asked}.", "prompt")

    def check_tokens(self, tokens: int, param: str) -> None:
        """Raise `RequestError` for more prompt tokens than may wait."""
        if tokens > self.limits.prompt_tokens:
            raise RequestError(
                f"The prompts of one call may have {self.limits.prompt_tokens:,} tokens (--max-queued-tokens); these have at least "
                f"{tokens:,}. Send fewer prompts per call.",
                param,
            )

    def add(self, prompt_len: int, n: int, sampling: SamplingParams, top_logprobs: int, prompt_logprobs: bool) -> None:
        """Add one prompt with its `n` samples.

        Args:
            sampling: the parameters that `RequestLimits.fit` returns, whose length fits the context.

        Raises:
            RequestError: the call costs too much; the message names the limit and its flag.
        """
        self.prompt_tokens += prompt_len
        self.samples += n
        shown = (prompt_len if prompt_logprobs else 0) + (sampling.max_new_tokens if top_logprobs >= 0 else 0)
        self.logprob_cells += n * shown * (1 + max(top_logprobs, 0))
        self.check_tokens(self.prompt_tokens, "prompt")
        if self.logprob_cells > self.limits.logprob_cells:
            raise RequestError(
                f"One call may ask for {self.limits.logprob_cells:,} log-probabilities (--max-logprob-cells); this one asks for up to "
                f"{self.logprob_cells:,}. Lower top_logprobs, n or max_tokens, or send fewer prompts per call.",
                "logprobs",
            )
