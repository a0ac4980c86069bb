"""Token counts of one call while its updates come in."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from runtime.entrypoints.generations import Choice, Generations
from runtime.entrypoints.openai.protocol import OpenAIBody
from runtime.managers.generation import GenerationUpdate
from runtime.managers.telemetry.spec_stats import SpecStats


class UsageCounter:
    """OpenAI's `usage`. Without `output` the generated tokens are not counted, because the client does not see them."""

    def __init__(self, group: Generations, *, output: bool = True) -> None:
        self._output = output
        self._prompt_tokens = sum(len(each.prompt_ids) for each in group.each)
        self._cached = [0] * len(group.each)
        self._generated: dict[tuple[int, int], int] = {}
        self._spec: dict[tuple[int, int], SpecStats] = {}

    def add(self, prompt: int, update: GenerationUpdate | None) -> None:
        """Take the counts of an update; they are totals of its choice."""
        if update is not None:
            progress = update.progress
            self._cached[prompt] = max(self._cached[prompt], progress.cached_tokens)
            self._generated[prompt, update.index] = progress.completion_tokens
            if progress.spec is not None and progress.spec.verify_steps:
                self._spec[prompt, update.index] = progress.spec

    def add_all(self, texts: list[list[Choice]]) -> None:
        """Take the counts of complete choices, a list per prompt."""
        for prompt, choices in enumerate(texts):
            for choice in choices:
                self.add(prompt, choice.last)

    def usage(self) -> dict[str, Any]:
        """The counts so far."""
        generated = sum(self._generated.values()) if self._output else 0
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self._prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    def extension(self, body: OpenAIBody) -> dict[str, Any]:
        """SGLang's `sglext` with the details that `body` asks for; empty if there are none."""
        shown: dict[str, Any] = {}
        if body.return_cached_tokens_details:
            shown["cached_tokens_details"] = {"device": sum(self._cached), "host": 0}
        if body.return_spec_tokens_details and self._spec:
            details = [_spec_details(self._spec[key]) for key in sorted(self._spec)]
            shown["spec_tokens_details"] = details if len(self._generated) > 1 else details[0]
        return {"sglext": shown} if shown else {}


def _spec_details(spec: SpecStats) -> dict[str, Any]:
    reached = [spec.verify_steps, *spec.accepted_by_position, 0]
    return {
        "spec_accept_rate": spec.accept_rate,
        "spec_accept_length": spec.accept_length,
        "spec_num_correct_drafts": spec.accepted_tokens,
        "spec_num_proposed_drafts": spec.draft_tokens,
        "spec_verify_ct": spec.verify_steps,
        "spec_correct_drafts_histogram": [this - further for this, further in pairwise(reached)],
    }
