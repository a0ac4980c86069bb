"""Runs the prompts of all pooling endpoints."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.entrypoints.generations import Call, Generations
from runtime.entrypoints.openai.served_model import ServedModel
from runtime.entrypoints.pooling.protocol import PoolingBody
from runtime.errors import RequestAborted
from runtime.managers.generation import RequestOptions
from runtime.managers.messages import TextOut
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.pooling import Pooling
from runtime.sampling_params import SamplingParams

MAX_OPEN = 64
"""Most prompts of one call that are submitted at the same time; the others wait here, not in the scheduler's queue."""
NO_OUTPUT = SamplingParams(max_new_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Pooled:
    """The result of one prompt: its vector or the log-probabilities of its tokens, and its length in tokens."""

    vector: list[float]
    prompt_tokens: int

    @classmethod
    def of(cls, out: TextOut, prompt_tokens: int) -> Pooled:
        """Read the result from a finished request. The first token of a prompt has no log-probability; it counts as 0.

        Raises:
            RequestAborted: the request has no result.
        """
        if out.finish is not None and out.finish.reason == "abort":
            raise RequestAborted
        known = out.prompt_logprobs
        return cls([value or 0.0 for value in known.chosen] if known is not None else out.pooled or [], prompt_tokens)


class PoolingApi:
    """Base of the pooling endpoints, which run prompts without generating text."""

    def __init__(self, manager: TokenizerManager, model: ServedModel) -> None:
        self._manager, self._model = manager, model

    def _check_shared(self, part: str | list[int], prompts: int, param: str) -> None:
        """Raise `RequestError` if a text or token ids that occur in `prompts` prompts are too long, before the prompts are built."""
        tokens = len(part) // self._manager.tokenizer.longest_token if isinstance(part, str) else len(part)
        self._manager.new_cost().check_tokens(tokens * prompts, param)

    async def _run(self, body: PoolingBody, prompts: Sequence[str | list[int]], pooling: Pooling | None, param: str) -> list[Pooled]:
        """Return the results of all prompts in order. Cancelling this aborts running prompts.

        Args:
            pooling: how each prompt is pooled; None for the log-probabilities of its tokens.
            param: the field name of the prompts, for errors.
        """
        manager, name = self._manager, f"pool-{uuid.uuid4().hex}"
        step = min(MAX_OPEN, manager.config.scheduler.max_queued_requests + manager.limits.max_running_requests)
        options = RequestOptions(
            top_logprobs=0 if pooling is None else -1,
            prompt_logprobs=pooling is None,
            priority=body.priority,
            cache_salt=body.cache_salt,
            pooling=pooling,
        )
        done: list[Pooled] = []
        for start in range(0, len(prompts), step):
            part = prompts[start : start + step]
            rids = [f"{name}-{start + index}" for index in range(len(part))]
            params = {"prompt": param, "input_ids": param}
            call = Call(name=name, prompts=part, sampling=[NO_OUTPUT] * len(part), rids=rids, options=options, params=params)
            async with await Generations.start(manager, call) as group:
                for generation, (out,) in zip(group.each, await group.texts(), strict=True):
                    done.append(Pooled.of(out, len(generation.prompt_ids)))
        return done


def usage(pooled: Sequence[Pooled]) -> dict[str, int]:
    """OpenAI's `usage` of a call without output."""
    tokens = sum(each.prompt_tokens for each in pooled)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
