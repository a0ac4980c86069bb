"""Computes the logits of one request on the GPU pass by pass, in row 2, over scattered pages."""

from __future__ import annotations

import numpy as np
import torch

from runtime.batch import ForwardMode
from runtime.config.device_tuning import H200
from runtime.layers.attention.base import plan_pass
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.model_runner import ModelRunner
from runtime.models.decoder import DecoderModel

DEVICE = torch.device("cuda")
PAGE = 16
PASSES = [(100, 0), (57, 0), (4, 4), (4, 4), *[(1, 1)] * 16]
"""Tokens and row width of each pass: two chunks of a prompt, verify windows, decode steps."""
LENGTH = sum(count for count, _ in PASSES)
PARTS = (slice(0, 157), slice(157, 165), slice(165, LENGTH))
"""Positions of prompts, windows and decode steps."""


class OneRequest:
    """A model with its own KV pages and attention backend."""

    def __init__(self, model: DecoderModel, backend: str, dtype: torch.dtype) -> None:
        self.table = PageTable(3, 256, PAGE, DEVICE)
        pages = np.random.default_rng(0).permutation(64)[: self.table.max_pages] + 1
        self.table.pages[2] = torch.from_numpy(pages.astype(np.int32))
        self.runner = ModelRunner(model, backend, dtype, DEVICE, tuning=H200)
        self.runner.allocate(64, self.table, 4, 4)

    def all_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """float64 [LENGTH, V]: the logits after each of the tokens `ids`, by the passes of `PASSES`."""
        parts, start = [], 0
        with torch.inference_mode():
            for count, width in PASSES:
                parts.append(self._logits(ids[start : start + count], start, width))
                start += count
        return torch.cat(parts)

    def _logits(self, ids: torch.Tensor, start: int, width: int) -> torch.Tensor:
        """Logits of the tokens `ids`, which begin at position `start`; width 0 is a chunk of a prompt."""
        n = len(ids)
        positions, rows = torch.arange(start, start + n, device=DEVICE), torch.full((n,), 2, device=DEVICE)
        mode = {0: ForwardMode.EXTEND, 1: ForwardMode.DECODE}.get(width, ForwardMode.TARGET_VERIFY)
        batch = ForwardBatch(
            mode=mode,
            batch_size=1,
            tokens_per_req=width,
            input_ids=ids.to(DEVICE),
            positions=positions,
            out_cache_loc=self.table.slots(rows, positions),
            req_pool_indices=rows[:1],
            seq_lens=torch.tensor([start + n], dtype=torch.int32, device=DEVICE),
            qo_indptr=torch.tensor([0, n], dtype=torch.int32, device=DEVICE),
            seq_len_bounds=np.array([start + n], dtype=np.int32),
            extend_lens=np.array([n], dtype=np.int32) if width == 0 else None,
        )
        plan_pass(self.runner.backend, batch)
        return self.runner.model.logits(self.runner.model.forward(batch)[0]).double()


def errors(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Relative error of each position's logits."""
    return (got - exact).norm(dim=1) / exact.norm(dim=1)
