"""The limits of a request, checked before it is sent to the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from runtime.errors import ContextTooLong, InvalidField
from runtime.sampling_params import MAX_N, MAX_TOP_LOGPROBS, SamplingParams

MAX_RID = 256
"""Characters of a request's name."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Checks one request against the model and the memory.

    Attributes:
        vocab_size: token ids are 0..vocab_size - 1.
        max_context_len: prompt and output tokens of one request together.
    """

    vocab_size: int
    max_context_len: int

    def check_call(self, n: int, top_logprobs: int, rid: str | None) -> None:
        """Raise `InvalidField` if a parameter of the call is out of bounds."""
        if type(n) is not int or not 1 <= n <= MAX_N:
            raise InvalidField("n", n, f"an integer between 1 and {MAX_N}")
        if type(top_logprobs) is not int or not -1 <= top_logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidField("top_logprobs", top_logprobs, f"an integer between 0 and {MAX_TOP_LOGPROBS}")
        if rid is not None and not 1 <= len(rid) <= MAX_RID:
            raise InvalidField("rid", rid, f"a string of 1 to {MAX_RID} characters")

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raise the `RequestError` for an empty or too long prompt, or a token outside the vocabulary."""
        if not ids:
            raise InvalidField("prompt", 0, "at least 1", subject="The number of prompt tokens")
        if len(ids) >= self.max_context_len:
            raise ContextTooLong(len(ids), self.max_context_len)
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.vocab_size:
            return
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                limit = f"an integer between 0 and {self.vocab_size - 1}"
                raise InvalidField("input_ids", token, limit, subject="A token id")

    def fit(self, sampling: SamplingParams, prompt_len: int, fill_context: bool) -> SamplingParams:
        """`sampling`, checked, with its length cut to the context that a prompt of `prompt_len` tokens leaves.

        Args:
            fill_context: generate to the end of the context, whatever `sampling.max_new_tokens` says.
        """
        room = self.max_context_len - prompt_len
        if fill_context:
            sampling = msgspec.structs.replace(sampling, max_new_tokens=room)
        sampling.check(self.vocab_size)
        if sampling.max_new_tokens > self.max_context_len:
            limit = f"at most {self.max_context_len}, the context length"
            raise InvalidField("max_new_tokens", sampling.max_new_tokens, limit, subject="The number of output tokens")
        if sampling.max_new_tokens > room:
            shortest = min(sampling.min_new_tokens, room)
            sampling = msgspec.structs.replace(sampling, max_new_tokens=room, min_new_tokens=shortest)
        return sampling
