"""The limits of a request, checked before it is sent to the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from runtime.errors import ContextTooLong, InvalidField, UnknownToken
from runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Checks one request against the model and the memory.

    Attributes:
        vocab_size: token ids are 0..vocab_size - 1.
        max_context_len: prompt and output tokens of one request together.
    """

    vocab_size: int
    max_context_len: int

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raise a `RequestError` for an empty or too long prompt, or a token outside the vocabulary."""
        if not ids:
            raise InvalidField("prompt", 0, "at least 1", subject="The number of prompt tokens")
        if len(ids) >= self.max_context_len:
            raise ContextTooLong(len(ids), self.max_context_len)
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise UnknownToken("input_ids", wrong, self.vocab_size, subject="The prompt has")

    def fit(self, sampling: SamplingParams, prompt_len: int, fill_context: bool) -> SamplingParams:
        """Check `sampling`, and limit its length to what remains of the context after a prompt of `prompt_len` tokens.

        Args:
            fill_context: generate to the end of the context, whatever `sampling.max_new_tokens` says.
        """
        room = self.max_context_len - prompt_len
        if fill_context:
            sampling = msgspec.structs.replace(sampling, max_new_tokens=room)
        sampling.check(self.vocab_size)
        if sampling.min_new_tokens > sampling.max_new_tokens:
            raise InvalidField("min_new_tokens", sampling.min_new_tokens, f"at most max_new_tokens ({sampling.max_new_tokens})")
        if sampling.max_new_tokens > self.max_context_len:
            limit = f"at most {self.max_context_len}, the context length"
            raise InvalidField("max_new_tokens", sampling.max_new_tokens, limit, subject="The number of output tokens")
        if sampling.max_new_tokens > room:
            shortest = min(sampling.min_new_tokens, room)
            sampling = msgspec.structs.replace(sampling, max_new_tokens=room, min_new_tokens=shortest)
        return sampling
