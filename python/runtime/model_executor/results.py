"""Results of a step: on their way to the host, and joined from prompt chunks and decode rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from runtime.batch import BatchResult, Logprobs, ScheduleBatch
from runtime.layers.sampler import top_logprobs
from runtime.layers.token_mask import TokenMask
from runtime.model_executor.staging import HostCopy, to_device

Mask = npt.NDArray[np.bool_]


class LogprobCopy:
    """Log-probabilities of N tokens on their way to the host: the tensors that `top_logprobs` returns."""

    def __init__(self, chosen: torch.Tensor, ids: torch.Tensor, top: torch.Tensor) -> None:
        self._copy = HostCopy(chosen, ids, top)

    def wait(self, keep: Mask | None = None) -> Logprobs:
        """Wait for the copies; `keep` bool [N] selects tokens."""
        chosen, ids, top = self._copy.wait()
        if keep is not None:
            chosen, ids, top = chosen[keep], ids[keep], top[keep]
        return Logprobs(chosen=chosen.astype(np.float32), top_ids=ids.astype(np.int32), top=top.astype(np.float32))


def copy_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, k: int, index: torch.Tensor | None = None, mask: TokenMask | None = None
) -> LogprobCopy | None:
    """Start the copy of `top_logprobs(logits, tokens, k, index)`; None if k < 0.

    Constrained requests report the distribution over the tokens that their grammar allows.

    Args:
        mask: the tokens that grammars allow at the W positions of each request; `logits` has W rows per request.
    """
    if k < 0:
        return None
    return LogprobCopy(*top_logprobs(logits if mask is None else mask.apply(logits), tokens, k, index))


def pool_chunks(batch: ScheduleBatch, hidden: torch.Tensor, last: torch.Tensor, logits: torch.Tensor) -> dict[int, HostCopy]:
    """Start the copies of the results that `batch.pooling` requests, by index of the chunk.

    Args:
        hidden: [T, hidden], states after the final norm, if the sum over a chunk is asked for.
        last: [E, hidden], those of the last token of each chunk.
        logits: float32 [E, V], after each chunk.

    Returns:
        float32 vectors: `mean` the sum over the chunk's tokens, `last` the state of its last token, `labels` the
        log-probabilities of the labels after it.
    """
    found: dict[int, HostCopy] = {}
    for i, pooling in batch.pooling.items():
        if pooling.kind == "labels":
            vector = logits[i].index_select(0, to_device(torch.tensor(pooling.label_ids), logits.device)) - logits[i].logsumexp(0)
        elif pooling.kind == "last":
            vector = last[i].float()
        else:
            vector = hidden[batch.chunk(i)].sum(0, dtype=torch.float32)
        found[i] = HostCopy(vector)
    return found


def join(prompts: BatchResult | None, decodes: BatchResult | None) -> BatchResult:
    """The result of one step, from the results of its prompt chunks and of its decode rows, at least one of which is given."""
    if prompts is None or decodes is None:
        only = prompts or decodes
        assert only is not None
        return only
    return BatchResult(
        token_ids=np.concatenate([prompts.token_ids, decodes.token_ids]),
        accept_lens=np.concatenate([prompts.accept_lens, decodes.accept_lens]),
        logprobs=_join_logprobs(prompts.logprobs, decodes.logprobs),
        prompt_logprobs=prompts.prompt_logprobs,
        stats=decodes.stats,
        pooled=prompts.pooled,
    )


def _join_logprobs(first: Logprobs | None, second: Logprobs | None) -> Logprobs | None:
    if first is None or second is None:
        return None
    return Logprobs(
        chosen=np.concatenate([first.chosen, second.chosen]),
        top_ids=np.concatenate([first.top_ids, second.top_ids]),
        top=np.concatenate([first.top, second.top]),
    )
