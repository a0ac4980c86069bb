"""One iteration of the decoding requests: the data that its stages, from proposal to commit, pass on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from runtime.batch import NO_SAMPLE, EagerSample
from runtime.layers.linear import Linear
from runtime.layers.sampling_tables import SamplingNeeds
from runtime.layers.token_mask import TokenMask
from runtime.model_executor.draft_window import DraftWindow
from runtime.model_executor.grammar_rows import GrammarStep
from runtime.model_executor.ragged_windows import RaggedWindows


@dataclass(frozen=True, slots=True)
class DraftCaps:
    """The draft limit of each request, if that of any is below the iteration's depth.

    Attributes:
        host: int [live].
        device: int64 [size]; padding: 0.
    """

    host: npt.NDArray[np.integer]
    device: torch.Tensor


@dataclass(frozen=True, slots=True)
class Iteration:
    """The decode rows of one step: `live` requests, padded to `size`.

    Attributes:
        depth: K, drafts on a path; 0 for none.
        host_rows: int32 [live], on the host: request rows.
        rows: int64 [size], request rows; padding: row 0.
        kv_lens: int32 [size], KV lengths before the iteration; padding: 0.
        last_tokens: int64 [size], the last committed token of each request.
        bounds: int32 [size], on the host: upper bounds of `kv_lens`.
        needs: the sampling stages of the requests.
        top_logprobs: number of most likely tokens to report for each token; -1 for no log-probabilities.
        sample: the passes that run again eagerly after it.
        delay: the sample that was launched between the previous iteration and this one.
        eager: whether draft and verification run without graphs.
        grammar: the constrained requests; None if there are none.
        mask: the tokens that grammars allow at the positions of the window, once known; None if nothing is restricted.
        caps: draft limits; None if no request has a limit below `depth`.
        ragged: the windows if they differ in width; None if all have `depth` + 1 tokens.
        greedy: bool [live], which requests are greedy; None if the depth is fixed.
        started: when it was submitted to the device, in seconds.
        shared_tokens: keys at the front of all live requests that lie in the same pages, to which verification attends once; 0 for none.
        unfollowed: upper bound of the positions at the end of a row's KV that have no draft KV after it.
    """

    depth: int
    host_rows: npt.NDArray[np.int32]
    rows: torch.Tensor
    kv_lens: torch.Tensor
    last_tokens: torch.Tensor
    bounds: npt.NDArray[np.int32]
    needs: SamplingNeeds
    top_logprobs: int = -1
    sample: EagerSample = NO_SAMPLE
    delay: EagerSample = NO_SAMPLE
    eager: bool = False
    grammar: GrammarStep | None = None
    mask: TokenMask | None = None
    caps: DraftCaps | None = None
    ragged: RaggedWindows | None = None
    greedy: npt.NDArray[np.bool_] | None = None
    started: float = 0.0
    shared_tokens: int = 0
    unfollowed: int = 0

    @property
    def live(self) -> int:
        """Requests without padding."""
        return len(self.host_rows)

    @property
    def size(self) -> int:
        """Requests with padding."""
        return len(self.bounds)

    @property
    def no_drafts(self) -> DraftWindow:
        """Windows of the last committed token alone."""
        return DraftWindow(self.last_tokens[:, None])

    @property
    def greedy_only(self) -> bool:
        """Whether only the most likely tokens are needed, without logits."""
        return self.needs.all_greedy and not self.needs.adjusts and self.top_logprobs < 0

    def part(self, start: int, stop: int) -> Iteration:
        """Requests `start` to `stop`."""
        one = slice(start, stop)
        return replace(
            self,
            host_rows=self.host_rows[one],
            rows=self.rows[one],
            kv_lens=self.kv_lens[one],
            last_tokens=self.last_tokens[one],
            bounds=self.bounds[one],
            needs=self.needs.part(start, stop),
            mask=None if self.mask is None else self.mask.part(start, stop),
        )


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The target's outputs for the windows of an iteration. Valid until the next verify pass.

    Attributes:
        logits: float32 [size * D, V], or this rank's columns of them; None from a pass that finds only the most likely tokens.
        tokens: int64 [size, D], the argmax at each position.
        features: [size * D, feature_width], the states that the drafter reads.
        graph: whether a graph was replayed.
        head: the LM head that computed the logits.
    """

    logits: torch.Tensor | None
    tokens: torch.Tensor
    features: torch.Tensor
    graph: bool
    head: Linear

    def all_logits(self, count: int) -> torch.Tensor:
        """float32 [count, V]: the logits of the first `count` window positions. All ranks must call it together."""
        assert self.logits is not None, "a pass without logits"
        return self.head.gather(self.logits[:count])

    def part(self, start: int, stop: int) -> VerifyResult:
        """Requests `start` to `stop`."""
        D = self.tokens.shape[1]
        window = slice(start * D, stop * D)
        logits = None if self.logits is None else self.logits[window]
        return VerifyResult(logits, self.tokens[start:stop], self.features[window], self.graph, self.head)


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """The tokens that an iteration commits. Padding rows have arbitrary valid values.

    Attributes:
        accept_lens: int32 [size], each in 1..D.
        tokens: int64 [size, D]: the committed tokens, then arbitrary valid ones.
        path: int64 [size, D]: window index of each committed position (trees); None for 0, 1, 2, …
    """

    accept_lens: torch.Tensor
    tokens: torch.Tensor
    path: torch.Tensor | None = None

    def emitted(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The values that the host reads, written to `out` if given: int64 [size, D + 1], the tokens and then the accept length, or only
        the tokens if D = 1.
        """
        if self.tokens.shape[1] == 1:
            return self.tokens if out is None else out.copy_(self.tokens)
        return torch.cat([self.tokens, self.accept_lens.to(torch.int64)[:, None]], dim=1, out=out)


@dataclass(frozen=True, slots=True)
class CommittedWindow:
    """A window after its commit: what `Drafter.follow` reads.

    Attributes:
        window: the window that the target verified.
        result: the committed tokens.
        features: [size * D, feature_width]: the target's states over the window.
    """

    window: DraftWindow
    result: AcceptResult
    features: torch.Tensor
