"""Runs prompts that return numbers instead of text, for the pooling endpoints and the offline engine."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from runtime.entrypoints.generations import Call, Generations
from runtime.entrypoints.pooling.protocol import EmbeddingBody, PoolingBody, ScoreBody
from runtime.errors import InvalidField, RequestAborted
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


class Pooler:
    """Runs prompts without generating text. Cancelling a call aborts its running prompts.

    Attributes:
        manager: runs the prompts.
    """

    def __init__(self, manager: TokenizerManager) -> None:
        self.manager = manager

    async def run(self, body: PoolingBody, prompts: Sequence[str | list[int]], pooling: Pooling | None, param: str) -> list[Pooled]:
        """Return the results of all prompts in order.

        Args:
            pooling: how each prompt is pooled; None for the log-probabilities of its tokens.
            param: the field name of the prompts, for errors.
        """
        manager, name = self.manager, f"pool-{uuid.uuid4().hex}"
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

    async def embed(self, body: EmbeddingBody, param: str = "input") -> list[Pooled]:
        """The pooled hidden states of each input, scaled to length 1."""
        size, pooling = self.manager.model_config.hidden_size, Pooling(kind=self.manager.config.server.embedding_pooling)
        dimensions = size if body.dimensions is None else body.dimensions
        if dimensions > size:
            raise InvalidField("dimensions", dimensions, f"at most {size}, the size of the model's hidden states")
        pooled = await self.run(body, body.prompts, pooling, param)
        return [replace(each, vector=unit(each.vector[:dimensions])) for each in pooled]

    async def score(self, body: ScoreBody) -> list[Pooled]:
        """The probabilities of the labels for each item."""
        labels = Pooling(kind="labels", label_ids=tuple(body.label_token_ids))
        # All prompts contain the query, so its length is checked before they are built.
        tokens = len(body.query) // self.manager.tokenizer.longest_token if isinstance(body.query, str) else len(body.query)
        self.manager.new_cost().check_tokens(tokens * (1 if isinstance(body.items, str) else len(body.items)), "query")
        pooled = await self.run(body, body.prompts, labels, "items")
        temperature = body.temperature if body.apply_softmax else None
        return [replace(each, vector=probabilities(each.vector, temperature)) for each in pooled]


def unit(vector: list[float]) -> list[float]:
    """`vector` scaled to length 1; zeros stay zeros."""
    values = np.array(vector, dtype=np.float64)
    return (values / max(float(np.linalg.norm(values)), np.finfo(np.float64).tiny)).tolist()


def probabilities(logprobs: list[float], temperature: float | None) -> list[float]:
    """The probabilities, or with a temperature the softmax over the labels."""
    values = np.array(logprobs, dtype=np.float64)
    if temperature is None:
        return np.exp(values).tolist()
    with np.errstate(over="ignore"):  # at a low temperature the probability of an unlikely label becomes 0
        shares = np.exp((values - values.max()) / temperature)
    return (shares / shares.sum()).tolist()
