"""What the decode rows of a step emit, on its way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from runtime.batch import BatchResult, StepStats
from runtime.model_executor.eager_drafts import Compared
from runtime.model_executor.iteration import Iteration, VerifyResult
from runtime.model_executor.results import LogprobCopy, copy_logprobs
from runtime.model_executor.staging import HostCopy
from runtime.model_executor.target_model import TargetModel


@dataclass(frozen=True, slots=True)
class DecodesPending:
    """The live rows of `AcceptResult.emitted` on their way to the host, and with several ranks whether they differ."""

    iteration: Iteration
    emitted: HostCopy
    logprobs: LogprobCopy | None
    stats: StepStats
    checked: bool = False
    experts: HostCopy | None = None
    compared: Compared | None = None
    guessed: HostCopy | None = None

    @property
    def ranks_differ(self) -> bool:
        """Whether the ranks committed different tokens before this iteration. Waits for it."""
        return self.checked and bool(self.emitted.wait()[-1].any())

    def wait(self) -> BatchResult:
        """Wait for them."""
        emitted, D = self.emitted.wait()[0], self.stats.draft_tokens + 1
        tokens, lens = emitted[:, :D], emitted[:, D] if D > 1 else np.ones(len(emitted), dtype=np.int32)
        keep = np.arange(tokens.shape[1])[None] < lens[:, None]
        return BatchResult(
            token_ids=tokens[keep].astype(np.int32),
            accept_lens=lens.astype(np.int32),
            logprobs=None if self.logprobs is None else self.logprobs.wait(keep.flatten()),
            stats=self.stats,
        )


def send_to_host(
    target: TargetModel,
    iteration: Iteration,
    emitted: torch.Tensor,
    verified: VerifyResult,
    path: torch.Tensor | None = None,
    hit: torch.Tensor | None = None,
    compared: Compared | None = None,
) -> DecodesPending:
    """Start the copies of what an iteration emits, on a rank that reads results.

    Args:
        emitted, path: of its `AcceptResult`.
        hit: of `ExpertCounter.sample`.
        compared: of `EagerDrafts.compare`.
    """
    live, D = iteration.live, verified.tokens.shape[1]
    emitted = emitted[:live]
    index = None
    if path is not None:
        index = (torch.arange(live, device=emitted.device)[:, None] * D + path[:live]).flatten()
    logprobs, reads, agreement = None, target.reads_results, target.agreement
    if iteration.top_logprobs >= 0:
        logits = verified.all_logits(live * D)
        tokens = emitted[:, :D].flatten()
        logprobs = copy_logprobs(logits, tokens, iteration.top_logprobs, index, iteration.mask) if reads else None
    wanted = [emitted, *([agreement.differs] if agreement.active else [])] if reads else []
    drafts = () if iteration.ragged is None or iteration.caps is None else tuple(iteration.caps.host.tolist())
    stats = StepStats(verified.graph, iteration.size, D - 1, iteration.depth, iteration.unfollowed, drafts)
    experts = HostCopy(hit) if hit is not None and reads else None
    return DecodesPending(iteration, HostCopy(*wanted), logprobs, stats, agreement.active, experts, compared)
