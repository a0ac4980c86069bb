"""The results of a step's decode rows, on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from runtime.batch import BatchResult, StepStats
from runtime.model_executor.drift_alarm import Pairs
from runtime.model_executor.eager_drafts import Compared, first_of_equal
from runtime.model_executor.iteration import Iteration, VerifyResult
from runtime.model_executor.results import LogprobCopy, copy_logprobs
from runtime.model_executor.staging import HostCopy
from runtime.model_executor.target_model import TargetModel


@dataclass(frozen=True, slots=True)
class DecodesPending:
    """Copies in flight to a rank that reads results. Methods wait for them.

    Attributes:
        emitted: the live rows of `AcceptResult.emitted`; if `checked`, also whether the ranks committed different tokens before.
        logprobs: log-probabilities, if requested.
        stats: how the iteration ran.
        checked: whether ranks were compared.
        experts: the result of `ExpertCounter.sample`, in iterations that count experts.
        compared: the result of `EagerDrafts.compare`, after a sample.
        guessed: bool [live], the result of `Accepter.agrees`; None if no guesses were compared.
    """

    iteration: Iteration
    emitted: HostCopy
    logprobs: LogprobCopy | None
    stats: StepStats
    checked: bool = False
    experts: HostCopy | None = None
    compared: Compared | None = None
    guessed: HostCopy | None = None

    def wait(self) -> BatchResult:
        """The committed tokens of each request."""
        emitted, D = self.emitted.wait()[0], self.stats.draft_tokens + 1
        tokens, lens = emitted[:, :D], emitted[:, D] if D > 1 else np.ones(len(emitted), dtype=np.int32)
        keep = np.arange(tokens.shape[1])[None] < lens[:, None]
        return BatchResult(
            token_ids=tokens[keep].astype(np.int32),
            accept_lens=lens.astype(np.int32),
            logprobs=None if self.logprobs is None else self.logprobs.wait(keep.flatten()),
            stats=self.stats,
        )

    def pairs(self, wanted: npt.NDArray[np.bool_]) -> Pairs | None:
        """The windows of `wanted` requests, bool [live], that were also drafted eagerly; identical requests count once."""
        if self.compared is None:
            return None
        emitted = self.emitted.wait()[0]
        return self.compared.pairs(emitted[:, -1].astype(np.int64), wanted & first_of_equal(emitted))


def send_to_host(
    target: TargetModel,
    iteration: Iteration,
    emitted: torch.Tensor,
    verified: VerifyResult,
    path: torch.Tensor | None = None,
    hit: torch.Tensor | None = None,
    compared: Compared | None = None,
) -> DecodesPending:
    """Start the copies of an iteration's results, on a rank that reads results.

    Args:
        emitted, path: from its `AcceptResult`.
        hit: from `ExpertCounter.sample`.
        compared: from `EagerDrafts.compare`.
    """
    live, reads, agreement = iteration.live, target.reads_results, target.agreement
    emitted = emitted[:live]
    wanted = [emitted, *([agreement.differs] if agreement.active else [])] if reads else []
    logprobs = _logprobs(iteration, emitted, verified, path, reads) if iteration.top_logprobs >= 0 else None
    drafts = () if iteration.ragged is None or iteration.caps is None else tuple(iteration.caps.host.tolist())
    stats = StepStats(verified.graph, iteration.size, verified.tokens.shape[1] - 1, iteration.depth, iteration.unfollowed, drafts)
    experts = HostCopy(hit) if hit is not None and reads else None
    return DecodesPending(iteration, HostCopy(*wanted, by_kernel=True), logprobs, stats, agreement.active, experts, compared)


def _logprobs(
    iteration: Iteration, emitted: torch.Tensor, verified: VerifyResult, path: torch.Tensor | None, reads: bool
) -> LogprobCopy | None:
    """Start the copy of the log-probabilities of `emitted`. All ranks gather the logits together; only ranks that read results copy
    them.
    """
    live, D = iteration.live, verified.tokens.shape[1]
    logits, index = verified.all_logits(live * D), None
    if path is not None:
        index = (torch.arange(live, device=emitted.device)[:, None] * D + path[:live]).flatten()
    return copy_logprobs(logits, emitted[:, :D].flatten(), iteration.top_logprobs, index, iteration.mask) if reads else None
