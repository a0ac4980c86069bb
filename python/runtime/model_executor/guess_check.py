"""Compares guesses of the draft model with the tokens of steps without drafts, to measure acceptance at depth 0."""

from __future__ import annotations

import torch

from runtime.model_executor.accepter import Accepter
from runtime.model_executor.depth import DepthControl
from runtime.model_executor.drafter import Drafter
from runtime.model_executor.iteration import Iteration
from runtime.model_executor.staging import HostCopy


class GuessCheck:
    """Compares guesses with committed tokens. `of` and `check` run on the thread that submits steps, `read` on the one that reads them."""

    def __init__(self, drafter: Drafter, accepter: Accepter, depths: DepthControl) -> None:
        self._drafter, self._accepter, self._depths = drafter, accepter, depths

    def of(self, iteration: Iteration) -> torch.Tensor | None:
        """int64 [live]: the guesses to compare with an iteration that is about to run without drafts; None if there are none."""
        wanted = iteration.depth == 0 < iteration.live and iteration.grammar is None and self._depths.controller is not None
        return self._drafter.guesses(iteration.rows[: iteration.live]) if wanted else None

    def check(self, iteration: Iteration, guesses: torch.Tensor) -> HostCopy:
        """Compare guesses with the tokens that the iteration, just launched, commits: bool [live], on its way to the host."""
        return HostCopy(self._accepter.agrees(iteration, guesses))

    def read(self, iteration: Iteration, hits: HostCopy | None) -> None:
        """Pass the result on to the controller when the iteration is read; None if nothing was compared."""
        if hits is None:
            return
        assert self._depths.controller is not None
        assert iteration.greedy is not None
        self._depths.controller.observe_guesses(iteration.greedy, hits.wait()[0].astype(bool))
