"""NgramWorker: drafts looked up in the request's own text, verified like any other; no draft model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from runtime.batch import BatchResult, ScheduleBatch, WorkerLimits
from runtime.model_executor.device_queue import Finish
from runtime.model_executor.device_worker import DeviceWorker
from runtime.model_executor.graph_runner import Outputs
from runtime.model_executor.profiler import span
from runtime.model_executor.target import Target
from runtime.speculative.ngram import NgramHistory, propose_batch
from runtime.speculative.verifier import Iteration, Verifier


class NgramWorker(DeviceWorker):
    """A `Worker` whose drafts are the continuation of the latest earlier occurrence of the text's last words.

    The lookup reads tokens on the host, so a step cannot be submitted before the one before it is read: `limits.overlap` is False.

    Attributes:
        verifier: decides what stands, and counts it.
    """

    def __init__(self, target: Target, verifier: Verifier, num_steps: int, limits: WorkerLimits, facts: dict[str, object]) -> None:
        runners = (verifier.runner,) if verifier.pause is None else (verifier.runner, verifier.pause.runner)
        super().__init__(target, runners, limits, facts)
        self.verifier, self._num_steps = verifier, num_steps
        self._histories: dict[int, NgramHistory] = {}

    def info(self) -> dict[str, object]:
        """What was chosen and measured at start, and acceptance since."""
        return {**super().info(), "acceptance": self.verifier.info()}

    def _forget(self) -> None:
        self._target.reset()
        self._histories.clear()
        self.verifier.forget()

    def _step(self, batch: ScheduleBatch) -> Finish:
        for init in batch.new_rows:
            assert init.history is not None, "limits.needs_history promises it"
            self._histories[init.row] = NgramHistory()
            self._histories[init.row].extend(init.history)
        live = batch.num_decodes
        chunks, rows = self._target.stage_rows(batch, self.verifier.padded_size(live) if live else 0)
        if batch.num_prompts:
            assert live == 0, "limits.mixed is False"
            return self._remember(batch, self._target.extend(batch, chunks)[1].collect)
        turn = self.verifier.begin(batch, rows)
        with span("draft_decode"):
            drafted = self.verifier.bare_window(turn.rows) if turn.paused else self._look_up(turn)
        with span("verify"):
            _, flight = self.verifier.judge(turn, drafted)
        return self._remember(batch, lambda: self.verifier.collect(flight))

    def _look_up(self, turn: Iteration) -> Outputs:
        drafts = np.zeros((turn.size, self._num_steps), dtype=np.int32)
        histories = [self._histories[r] for r in turn.rows_on_host.tolist()]
        drafts[: turn.live] = propose_batch(histories, self._num_steps)
        (on_device,) = self._target.staging.upload(drafts.flatten())
        last = self._target.rows.last_tokens[turn.rows]
        return {"tokens": torch.cat([last[:, None], on_device.to(torch.int64).view(turn.size, -1)], dim=1)}

    def _remember(self, batch: ScheduleBatch, collect: Callable[[], BatchResult]) -> Finish:
        def finish() -> BatchResult:
            result = collect()
            for row, tokens in zip(batch.rows.tolist(), np.split(result.token_ids, result.accept_lens.cumsum()[:-1]), strict=True):
                self._histories[row].extend(tokens)
            return result

        return finish
