"""Times decode passes over some layers of a model, before graphs are captured."""

from __future__ import annotations

import statistics

import numpy as np
import torch

from runtime.batch import PAD_ROW, ForwardMode
from runtime.layers.attention.base import plan_pass
from runtime.layers.forward_batch import ForwardBatch
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
        device, length = self._runner.device, min(CONTEXT, self._runner.config.max_context_len)

        def ints(value: int, count: int = rows) -> torch.Tensor:
            return torch.full((count,), value, dtype=torch.int64, device=device)

        bounds = np.full(rows, length, dtype=np.int32)
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            batch_size=rows,
            tokens_per_req=1,
            input_ids=ints(0),
            positions=ints(length - 1),
            out_cache_loc=ints(0),
            req_pool_indices=ints(PAD_ROW),
            seq_lens=torch.tensor(bounds, device=device),
            qo_indptr=torch.arange(rows + 1, dtype=torch.int32, device=device),
            seq_len_bounds=bounds,
        )
        plan_pass(self._runner.backend, batch)
        return batch

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [rows, hidden] after the layers and the final norm."""
        return self._runner.model.last_layers(batch, LAYERS)
