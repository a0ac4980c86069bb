"""Compares guesses of the draft with the tokens of steps without drafts: that shows acceptance while nothing is drafted."""

from __future__ import annotations

from collections import deque

import torch

from runtime.model_executor.accepter import Accepter
from runtime.model_executor.depth import DepthControl
from runtime.model_executor.drafter import Drafter
from runtime.model_executor.iteration import Iteration
from runtime.model_executor.staging import HostCopy


class GuessCheck:
    """Owner of the comparisons in flight. `of` and `check` run on the thread that submits steps, `read` on the one that reads them."""

    def __init__(self, drafter: Drafter, accepter: Accepter, depths: DepthControl) -> None:
        self._drafter, self._accepter, self._depths = drafter, accepter, depths
        self._pending: deque[tuple[Iteration, HostCopy]] = deque()

    def of(self, iteration: Iteration) -> torch.Tensor | None:
        """int64 [live]: guesses that an iteration that is about to run without drafts can be compared with."""
        wanted = iteration.depth == 0 < iteration.live and iteration.grammar is None and self._depths.controller is not None
        return self._drafter.guesses(iteration.rows[: iteration.live]) if wanted else None

    def check(self, iteration: Iteration, guesses: torch.Tensor | None) -> None:
        """Compare them with the tokens that it commits, after it was launched."""
        if guesses is not None:
            self._pending.append((iteration, HostCopy(self._accepter.agrees(iteration, guesses))))

    def read(self, iteration: Iteration) -> None:
        """Tell the controller, when the iteration is read."""
        if not self._pending or self._pending[0][0] is not iteration:
            return
        _, hits = self._pending.popleft()
        assert self._depths.controller is not None
        assert iteration.greedy is not None
        self._depths.controller.observe_guesses(iteration.greedy, hits.wait()[0].astype(bool))
