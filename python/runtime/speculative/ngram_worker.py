"""NgramWorker: drafts looked up in the request's own text, verified like any other; no draft model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from runtime.batch import BatchResult, ForwardMode, Pending, ScheduleBatch, WorkerLimits
from runtime.model_executor.device_queue import DeviceQueue, Finish
from runtime.model_executor.graph_runner import Outputs
from runtime.model_executor.profiler import Profiler, span
from runtime.model_executor.target import Target
from runtime.speculative.ngram import NgramHistory, propose_batch
from runtime.speculative.verifier import Iteration, Verifier


class NgramWorker:
    """A `Worker` whose drafts are the continuation of the latest earlier occurrence of the text's last words.

    The lookup reads tokens on the host, so a step cannot be submitted before the one before it is read: `limits.overlap` is False.

    Attributes:
        verifier: decides what stands, and counts it.
        runners: all that may replay graphs.
    """

    def __init__(self, target: Target, verifier: Verifier, num_steps: int, limits: WorkerLimits, facts: dict[str, object]) -> None:
        self._target, self._num_steps = target, num_steps
        self.verifier = verifier
        self.runners = (verifier.runner,)
        self._limits, self._facts = limits, facts
        self._histories: dict[int, NgramHistory] = {}
        self._queue = DeviceQueue(self._step, target.device)
        self._profiler = Profiler("scheduler", target.device)

    @property
    def limits(self) -> WorkerLimits:
        """What the device side can hold."""
        return self._limits

    def submit(self, batch: ScheduleBatch) -> Pending:
        """Queue one step and return at once."""
        return self._queue.submit(batch)

    def info(self) -> dict[str, object]:
        """What was chosen and measured at start, and acceptance since."""
        runs = [runner.runs() for runner in self.runners]
        return {**self._facts, "acceptance": self.verifier.info(), "graph_runs": [*runs, *self._target.runs()]}

    def reset(self) -> None:
        """Forget every request and all that was counted, between steps. For checks before serving."""
        self._queue.run(self._reset)

    def start_profile(self, folder: str) -> None:
        """Begin a torch trace."""
        self._queue.run(lambda: self._profiler.start(folder))

    def stop_profile(self) -> str:
        """End the trace; returns its file."""
        return str(self._queue.run(self._profiler.stop))

    def close(self) -> None:
        """Finish what is under way."""
        self._queue.close()

    def _reset(self) -> None:
        self._target.reset()
        self._histories.clear()
        self.verifier.forget()

    def _step(self, batch: ScheduleBatch) -> Finish:
        for init in batch.new_rows:
            assert init.history is not None, "limits.needs_history promises it"
            self._histories[init.row] = NgramHistory()
            self._histories[init.row].extend(init.history)
        if batch.mode is ForwardMode.EXTEND:
            return self._remember(batch, self._target.extend(batch)[1].collect)
        turn = self.verifier.begin(batch)
        with span("draft_decode"):
            drafted = self._look_up(turn)
        with span("verify"):
            _, flight = self.verifier.judge(turn, drafted)
        return self._remember(batch, lambda: self.verifier.collect(flight))

    def _look_up(self, turn: Iteration) -> Outputs:
        drafts = np.zeros((turn.size, self._num_steps), dtype=np.int32)
        histories = [self._histories[r] for r in turn.batch.rows.tolist()]
        drafts[: turn.batch.size] = propose_batch(histories, self._num_steps)
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
