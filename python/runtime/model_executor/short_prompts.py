"""Graphs of the target over the tokens of one short prompt, for prompts whose kernels take less time than their launches.

"Short" depends on the model: an eager pass takes as long to launch for few tokens as for many; a replay takes as long
as the GPU needs, which grows with tokens and parameters. Prompts of a large model are short up to a few hundred tokens,
those of a small model up to a whole chunk. A few short prompts of one batch are replayed one after the other.
"""

from __future__ import annotations

import torch

from runtime.batch import ForwardMode
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.graph_runner import Forward, GraphRunner, Outputs, RunnerSpec
from runtime.model_executor.input_buffers import BufferSpec
from runtime.models.decoder import DecoderModel

LAUNCH_SECONDS = 30e-6
"""Host time per kernel of an eager pass: 30 to 60 µs in steps launched kernel by kernel on an H200."""
FLOPS = 6e14
"""GEMM throughput of a prompt pass: measured on an H200 with bfloat16 weights of 8B parameters."""
READ_TOKENS = 128
"""Tokens whose GEMMs take as long as reading the weights once, on an H200 with two bytes per parameter."""
SMALLEST, LARGEST = 32, 2048
"""Tokens of the smallest and of the largest graph. Beyond, the cost of attention grows with the square, and the graph
pool would hold the activations of passes that are rare."""
MOST_REQUESTS = 3
"""Prompts of one batch that are replayed one after the other; the kernel count bounds the replays of small models."""


def free_tokens(parameters: int, launches: int) -> int:
    """Tokens of a pass whose kernels take no longer than launching them one by one.

    Args:
        parameters: weights that every token is multiplied with.
        launches: kernels of the pass.
    """
    return int(launches * LAUNCH_SECONDS * FLOPS / (2 * parameters))


def busy_tokens(free: int) -> int:
    """Tokens at which a pass is compute-bound: twice those that launching hides, at least four times `READ_TOKENS`."""
    return max(2 * free, 4 * READ_TOKENS)


def prompt_sizes(free: int, most: int) -> list[int]:
    """Tokens to capture graphs for: powers of two up to `free_tokens` and `most`, and `most` itself if it is not above."""
    limit = min(free, LARGEST)
    sizes, size = {most} if most <= limit else set[int](), SMALLEST
    while size <= min(limit, most):
        sizes.add(size)
        size *= 2
    return sorted(sizes)


def replays_win(sizes: list[int], free: int) -> bool:
    """Whether replaying a batch's prompts one by one takes no longer than launching them as one pass.

    For a single prompt it always does: the kernels are the same. Each of several reads all weights again, and computes
    its padding.

    Args:
        sizes: tokens of the graphs.
        free: `free_tokens` of the model.
    """
    return len(sizes) == 1 or (len(sizes) <= MOST_REQUESTS and sum(max(size, READ_TOKENS) for size in sizes) <= free)


def prompt_spec(hidden: int, feature: int, dtype: torch.dtype, launches: int) -> RunnerSpec:
    """Passes over the tokens of one request. Outputs: `hidden` [T, hidden], `aux` [T, feature] of the wanted layers."""
    return RunnerSpec(
        name="short prompts",
        mode=ForwardMode.EXTEND,
        width=0,
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
    """Runs each chunk of a batch through the next larger graph, one after the other.

    Padding follows the chunk: it writes slot 0, and no token of the chunk sees it.

    Attributes:
        runner: the graphs, over inputs of their own.
    """

    def __init__(self, runner: GraphRunner, page_table: PageTable, free: int) -> None:
        """`free`: `free_tokens` of the model, the limit of one batch's replays together."""
        self.runner, self._free = runner, free
        self._positions = page_table.max_pages * page_table.page_size

    @property
    def largest(self) -> int:
        """Tokens of the largest graph; 0 when none could be captured."""
        return max(self.runner.sizes, default=0)

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Outside the graph. Fill, plan and replay a ragged EXTEND batch, request by request.

        Returns:
            Hidden states [T, hidden] and the wanted layers [T, feature] or None, valid until the next run. None, before
            anything has run, if a chunk has no graph or ends too near the end of the page table, or if one eager pass
            is faster.
        """
        assert batch.extend_lens is not None
        lens = batch.extend_lens.tolist()
        sizes = [self.runner.size_for(length) for length in lens]
        captured = set(sizes) <= set(self.runner.sizes)
        if not (captured and replays_win(sizes, self._free) and self._within_table(batch, lens, sizes)):
            return None
        if len(lens) == 1:
            return self._replay(batch, 0, 0, lens[0], sizes[0])
        return self._replay_all(batch, lens, sizes)

    def _within_table(self, batch: ForwardBatch, lens: list[int], sizes: list[int]) -> bool:
        """Whether every padded chunk fits into the page table; on EXTEND the host's lengths are exact."""
        ends = zip(batch.seq_len_bounds.tolist(), lens, sizes, strict=True)
        return all(seq_len - length + size <= self._positions for seq_len, length, size in ends)

    def _replay_all(self, batch: ForwardBatch, lens: list[int], sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Results of all requests, concatenated; copied, since each replay overwrites the one before."""
        whole: list[torch.Tensor] = []
        start = 0
        for i, (length, size) in enumerate(zip(lens, sizes, strict=True)):
            parts = [part for part in self._replay(batch, i, start, length, size) if part is not None]
            whole = whole or [part.new_empty((batch.num_tokens, part.shape[1])) for part in parts]
            for kept, part in zip(whole, parts, strict=True):
                kept[start : start + length].copy_(part)
            start += length
        return whole[0], whole[1] if len(whole) > 1 else None

    def _replay(self, batch: ForwardBatch, i: int, start: int, length: int, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run request `i`, whose `length` tokens begin at `start`, at `size`; views of the runner's outputs."""
        padded, chunk = self.runner.batch(size), slice(start, start + length)
        padded.input_ids[:length].copy_(batch.input_ids[chunk])
        padded.positions[:length].copy_(batch.positions[chunk])
        padded.out_cache_loc[:length].copy_(batch.out_cache_loc[chunk])
        padded.out_cache_loc[length:].zero_()
        padded.req_pool_indices.copy_(batch.req_pool_indices[i : i + 1])
        torch.add(batch.seq_lens[i : i + 1], size - length, out=padded.seq_lens)
        padded.seq_len_bounds[:] = batch.seq_len_bounds[i] + size - length
        outputs, _ = self.runner.run(padded)
        aux = outputs["aux"][:length]
        return outputs["hidden"][:length], aux if aux.shape[1] else None
