"""Compares guesses of the draft with the tokens of steps without drafts: that shows acceptance while nothing is drafted."""

from __future__ import annotations

import torch

from runtime.model_executor.accepter import Accepter
from runtime.model_executor.depth import DepthControl
from runtime.model_executor.drafter import Drafter
from runtime.model_executor.iteration import Iteration
from runtime.model_executor.staging import HostCopy


class GuessCheck:
    """Makes the comparisons. `of` and `check` run on the thread that submits steps, `read` on the one that reads them."""

    def __init__(self, drafter: Drafter, accepter: Accepter, depths: DepthControl) -> None:
        self._drafter, self._accepter, self._depths = drafter, accepter, depths

    def of(self, iteration: Iteration) -> torch.Tensor | None:
        """int64 [live]: guesses that an iteration that is about to run without drafts can be compared with."""
        wanted = iteration.depth == 0 < iteration.live and iteration.grammar is None and self._depths.controller is not None
        return self._drafter.guesses(iteration.rows[: iteration.live]) if wanted else None

    def check(self, iteration: Iteration, guesses: torch.Tensor) -> HostCopy:
        """Compare them with the tokens that it commits, after it was launched: bool [live] on the way to the host."""
        return HostCopy(self._accepter.agrees(iteration, guesses))

    def read(self, iteration: Iteration, hits: HostCopy | None) -> None:
        """Tell the controller, when the iteration is read; None: it was compared with nothing."""
        if hits is None:
            return
        assert self._depths.controller is not None
        assert iteration.greedy is not None
        self._depths.controller.observe_guesses(iteration.greedy, hits.wait()[0].astype(bool))
