"""Graphs of the target over the few tokens of one short prompt, where launching kernel by kernel takes longer than the kernels."""

from __future__ import annotations

import torch

from runtime.batch import ForwardMode
from runtime.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.graph_runner import Forward, GraphRunner, Outputs, RunnerSpec
from runtime.model_executor.input_buffers import BufferSpec
from runtime.models.decoder import DecoderModel

PROMPT_SIZES = (32, 64, 128, 256)
"""Tokens that graphs are captured for: up to the last a pass of a large model takes about as long as reading its weights."""


def prompt_spec(hidden: int, feature: int, dtype: torch.dtype, launches: int) -> RunnerSpec:
    """A size of this runner is the tokens of one request. Outputs: `hidden` [T, hidden], `aux` [T, feature] of the layers asked for."""
    return RunnerSpec(
        name="short prompts",
        mode=ForwardMode.EXTEND,
        width=1,
        outputs=(BufferSpec("hidden", "token", dtype, 0, (hidden,)), BufferSpec("aux", "token", dtype, 0, (feature,))),
        launches=launches,
    )


def prompt_forward(model: DecoderModel, aux_layers: tuple[int, ...]) -> Forward:
    """The function that the graphs record."""

    def forward(batch: ForwardBatch, outputs: Outputs, variant: str) -> None:
        hidden, aux = model.forward(batch, aux_layers)
        outputs["hidden"].copy_(hidden)
        if aux is not None:
            outputs["aux"].copy_(aux)

    return forward


class ShortPrompts:
    """Runs the chunk of a single request through the next larger graph, the rest of it padding.

    Padding follows the chunk: it writes slot 0, and no token of the chunk sees it.

    Attributes:
        runner: of the passes, over inputs of its own.
    """

    def __init__(self, runner: GraphRunner, page_table: PageTable) -> None:
        self.runner = runner
        self._positions = page_table.max_pages * page_table.page_size

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Outside the graph. Fill, plan and replay an EXTEND batch.

        Returns:
            Hidden [T, hidden] and the layers asked for [T, feature] or None, valid until the next run; None in place of both where the
            batch has several requests, is longer than every graph, or ends too near the end of the page table.
        """
        T = batch.num_tokens
        size = self.runner.size_for(T)
        end = int(batch.seq_len_bounds[0]) - T + size  # exact on EXTEND
        if batch.batch_size > 1 or size not in self.runner.sizes or end > self._positions:
            return None
        padded = self.runner.batch(size)
        for name in ("input_ids", "positions", "out_cache_loc"):
            getattr(padded, name)[:T].copy_(getattr(batch, name))
        padded.out_cache_loc[T:].zero_()
        padded.req_pool_indices.copy_(batch.req_pool_indices)
        torch.add(batch.seq_lens, size - T, out=padded.seq_lens)
        padded.seq_len_bounds[:] = end
        outputs, _ = self.runner.run(padded)
        aux = outputs["aux"][:T]
        return outputs["hidden"][:T], aux if aux.shape[1] else None
