"""Pooled prompts: the hidden states or label log-probabilities of prompt chunks, on their way to the host."""

from __future__ import annotations

import torch

from runtime.batch import ScheduleBatch
from runtime.model_executor.staging import HostCopy, to_device


def pool_chunks(batch: ScheduleBatch, hidden: torch.Tensor, logits: torch.Tensor) -> dict[int, HostCopy]:
    """Start the copies of the results that `batch.pooling` requests, by index of the chunk.

    Args:
        hidden: [T, hidden], states after the final norm.
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
            vector = hidden[batch.chunk(i)][-1].float()
        else:
            vector = hidden[batch.chunk(i)].sum(0, dtype=torch.float32)
        found[i] = HostCopy(vector)
    return found
