"""Times decode passes over some layers of a model, before graphs are captured."""

from __future__ import annotations

import statistics

import torch

from runtime.batch import PAD_ROW
from runtime.layers.attention.base import plan_pass
from runtime.layers.forward_batch import ForwardBatch, decode_batch
from runtime.layers.gemm.gemm import PassTimer
from runtime.model_executor.model_runner import ModelRunner

LAYERS = 8
"""Enough layers that their weights do not fit into the L2 cache, so that each is read from memory as in a full pass."""
CONTEXT = 1024
"""Tokens of each request."""
REPLAYS = 9


class DecodeTimer(PassTimer):
    """Passes of requests in the padding row, whose keys all lie in page 0. The model is bound to a pool of any size."""

    def __init__(self, runner: ModelRunner, most_rows: int) -> None:
        """`most_rows`: the largest batch for which the runner has been allocated."""
        self._runner, self.most_rows = runner, most_rows
        self.gemms = [gemm for layer in runner.model.layers[-LAYERS:] for gemm in layer.gemms()]

    def micros(self, rows: int) -> float:
        """The median of some replays of a graph, on a GPU."""
        from runtime.layers.kernels.graph_timer import replay_times

        batch = self.plan(rows)
        self.run(batch)  # compile
        return statistics.median(replay_times(lambda: self.run(batch), REPLAYS))

    def plan(self, rows: int) -> ForwardBatch:
        """A batch of `rows` requests with one token each."""
        length = min(CONTEXT, self._runner.config.max_context_len)
        batch = decode_batch(torch.full((rows,), PAD_ROW, device=self._runner.device), 1, length)
        plan_pass(self._runner.backend, batch)
        return batch

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [rows, hidden] after the last layers and the final norm."""
        model = self._runner.model
        return model.forward(batch, first=max(len(model.layers) - LAYERS, 0))[0]
