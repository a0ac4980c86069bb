"""Token counts of one call, accumulated from its updates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from runtime.entrypoints.generations import Generations
from runtime.entrypoints.openai.protocol import OpenAIBody, SpecTokensDetails, SpeculativeUsage
from runtime.managers.messages import TextOut
from runtime.managers.telemetry.spec_stats import SpecStats


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens of one call.

    Attributes:
        spec: the acceptance statistics of each choice that had drafts.
        reasoning_tokens: how many of `completion_tokens` are thinking; None for a model that does not think.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    spec: tuple[SpecStats, ...] = ()
    reasoning_tokens: int | None = None

    def usage(self, body: OpenAIBody) -> dict[str, Any]:
        """The counts as OpenAI's `usage`, with `speculative` if `body` requests it."""
        thought = self.reasoning_tokens
        spec = reduce(SpecStats.plus, self.spec, SpecStats()) if body.return_spec_tokens_details and self.spec else None
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **({} if thought is None else {"completion_tokens_details": {"reasoning_tokens": thought}}),
            **({} if spec is None else {"speculative": SpeculativeUsage.model_validate(spec).model_dump()}),
        }

    def extension(self, body: OpenAIBody) -> dict[str, Any]:
        """SGLang's `sglext` with the details that `body` requests; empty if there are none."""
        shown: dict[str, Any] = {}
        if body.return_cached_tokens_details:
            shown["cached_tokens_details"] = {"device": self.cached_tokens, "host": 0}
        if body.return_spec_tokens_details and self.spec:
            details = [SpecTokensDetails.model_validate(spec).model_dump() for spec in self.spec]
            shown["spec_tokens_details"] = details if len(details) > 1 else details[0]
        return {"sglext": shown} if shown else {}


class UsageCounter:
    """Counts tokens."""

    def __init__(self, group: Generations) -> None:
        self._prompt_tokens = sum(len(each.prompt_ids) for each in group.each)
        self._cached: dict[int, int] = {}
        self._generated: dict[tuple[int, int], int] = {}
        self._spec: dict[tuple[int, int], SpecStats] = {}

    def add(self, prompt: int, update: TextOut) -> None:
        """Replace the counts of a choice by those of its latest update."""
        cached = update.progress.cached_tokens  # later texts of a prompt also count the tokens that the first text computed
        self._cached[prompt] = min(cached, self._cached.get(prompt, cached))
        self._generated[prompt, update.index] = update.progress.completion_tokens
        if update.progress.spec is not None and update.progress.spec.verify_steps:
            self._spec[prompt, update.index] = update.progress.spec

    def counts(self) -> TokenCounts:
        """The counts so far."""
        generated = sum(self._generated.values())
        return TokenCounts(self._prompt_tokens, generated, sum(self._cached.values()), tuple(self._spec[key] for key in sorted(self._spec)))
