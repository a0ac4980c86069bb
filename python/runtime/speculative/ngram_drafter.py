"""NgramDrafter: drafts looked up in the request's own text; no draft model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from runtime.batch import PAD_ROW, BatchResult, Int32, RowInit
from runtime.model_executor.context import WorkerContext
from runtime.model_executor.draft_window import DraftWindow, TreeShape
from runtime.model_executor.drafter import Drafter, DrafterSpec, DraftSetup
from runtime.model_executor.iteration import Iteration
from runtime.model_executor.target_model import TargetModel
from runtime.models.decoder import DecoderModel
from runtime.speculative.ngram import NgramHistory


class NgramDrafter(Drafter):
    """Drafts the continuation of the latest earlier occurrence of the text's last tokens.

    The lookup reads tokens on the host, so a step cannot be submitted before the previous one is read: `spec.overlap`
    is False.
    """

    def __init__(self, num_steps: int) -> None:
        self.spec = DrafterSpec(TreeShape(num_steps, 1, num_steps + 1), needs_history=True, overlap=False)
        self._target: TargetModel
        self.reset()

    @classmethod
    def make(cls, context: WorkerContext, target: DecoderModel) -> NgramDrafter:
        """The drafter of the configured depth."""
        return cls(context.speculative.num_steps)

    def attach(self, setup: DraftSetup) -> None:
        """Keep the target."""
        self._target = setup.target

    def reset(self) -> None:
        """Forget the texts of all requests."""
        self._histories = {PAD_ROW: NgramHistory()}

    def admit(self, new_rows: Sequence[RowInit]) -> None:
        """Start the texts of new requests."""
        for init in new_rows:
            assert init.history is not None, "limits.needs_history promises it"
            self._histories[init.row] = NgramHistory()
            self._histories[init.row].extend(init.history)

    def propose(self, iteration: Iteration) -> DraftWindow:
        """Look up drafts on the host and upload them."""
        window = iteration.no_drafts
        if iteration.depth == 0:
            return window
        drafts = np.zeros((iteration.size, iteration.depth), dtype=np.int32)
        for at, row in enumerate(iteration.host_rows.tolist()):
            drafts[at] = self._histories[row].propose(iteration.depth) or 0
        if iteration.grammar is not None:
            iteration.grammar.substitute_forced(drafts)
        (on_device,) = self._target.staging.upload(drafts.flatten().astype(np.int64))
        return DraftWindow(torch.cat([window.tokens, on_device.view(iteration.size, -1)], dim=1))

    def observe(self, rows: Int32, result: BatchResult) -> None:
        """Append the committed tokens of each request to its text."""
        parts = np.split(result.token_ids, result.accept_lens.cumsum())[:-1]
        for row, tokens in zip(rows.tolist(), parts, strict=True):
            self._histories[row].extend(tokens)
