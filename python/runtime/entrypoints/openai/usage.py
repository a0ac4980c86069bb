"""Token counts of one call while its updates come in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.entrypoints.generations import Choice, Generations
from runtime.managers.generation import GenerationUpdate


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens of one call."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def usage(self) -> dict[str, Any]:
        """The counts as OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class UsageCounter:
    """Counts tokens. Without `output` the generated tokens are not counted, because the client does not see them."""

    def __init__(self, group: Generations, *, output: bool = True) -> None:
        self._output = output
        self._prompt_tokens = sum(len(each.prompt_ids) for each in group.each)
        self._cached = [0] * len(group.each)
        self._generated: dict[tuple[int, int], int] = {}

    def add(self, prompt: int, update: GenerationUpdate | None) -> None:
        """Take the counts of an update; they are totals of its choice."""
        if update is not None:
            self._cached[prompt] = max(self._cached[prompt], update.progress.cached_tokens)
            self._generated[prompt, update.index] = update.progress.completion_tokens

    def add_all(self, texts: list[list[Choice]]) -> None:
        """Take the counts of complete choices, a list per prompt."""
        for prompt, choices in enumerate(texts):
            for choice in choices:
                self.add(prompt, choice.last)

    def counts(self) -> TokenCounts:
        """The counts so far."""
        generated = sum(self._generated.values()) if self._output else 0
        return TokenCounts(self._prompt_tokens, generated, sum(self._cached))

    def usage(self) -> dict[str, Any]:
        """The counts so far, as OpenAI's `usage`."""
        return self.counts().usage()
