"""Graphs of the target over the tokens of one short prompt, where launching kernel by kernel takes longer than the kernels.

What is short follows the model: a pass launched eagerly takes as long for few tokens as for many, a replayed one as long as the GPU needs,
which grows with tokens and parameters. Prompts of a large model are short up to some hundred tokens, those of a small one up to a whole
chunk. A few short prompts of one batch are replayed one after the other.
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
"""A kernel of an eager pass, at least: on an H200 steps launched kernel by kernel take 30 to 60 µs for each."""
FLOPS = 6e14
"""Of the matrix products of a prompt, a second: seen on an H200 with bfloat16 weights of 8B parameters."""
READ_TOKENS = 128
"""Tokens whose products take as long as reading the weights, which every replay does: on an H200, with two bytes a parameter."""
SMALLEST, LARGEST = 32, 2048
"""Tokens of the smallest graph, and of the largest: a prompt's chunk unless another is asked for. Beyond, attention's share grows with the
square, and the pool of all graphs would hold the activations of a pass that few take."""
MOST_REQUESTS = 3
"""Prompts of one batch that are replayed one after the other, however small the model: its replays are bound by the kernels' number."""


def free_tokens(parameters: int, launches: int) -> int:
    """Tokens of a pass whose kernels take no longer than launching them one by one.

    Args:
        parameters: what every token is multiplied with.
        launches: kernels of the pass.
    """
    return int(launches * LAUNCH_SECONDS * FLOPS / (2 * parameters))


def busy_tokens(free: int) -> int:
    """Tokens with which a pass is bound by computing: twice those that launching hides (`free`), four times those that reading hides."""
    return max(2 * free, 4 * READ_TOKENS)


def prompt_sizes(free: int, most: int) -> list[int]:
    """Tokens to capture graphs for: doubling, no more than `free_tokens`, and up to `most`, which is one of them where it may be."""
    limit = min(free, LARGEST)
    sizes, size = {most} if most <= limit else set[int](), SMALLEST
    while size <= min(limit, most):
        sizes.add(size)
        size *= 2
    return sorted(sizes)


def replays_win(sizes: list[int], free: int) -> bool:
    """Whether replaying a batch's prompts one after the other takes no longer than launching them as one pass.

    A single one always may: its kernels are those of the pass. Of several each reads all weights again, and computes its padding.

    Args:
        sizes: tokens of the graphs.
        free: `free_tokens` of the model.
    """
    return len(sizes) == 1 or (len(sizes) <= MOST_REQUESTS and sum(max(size, READ_TOKENS) for size in sizes) <= free)


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
    """Runs each chunk of a batch through the next larger graph, the rest of it padding, one after the other.

    Padding follows the chunk: it writes slot 0, and no token of the chunk sees it.

    Attributes:
        runner: of the passes, over inputs of its own.
    """

    def __init__(self, runner: GraphRunner, page_table: PageTable, free: int) -> None:
        """`free`: `free_tokens` of the model, what the replays of one batch may take together."""
        self.runner, self._free = runner, free
        self._positions = page_table.max_pages * page_table.page_size

    @property
    def largest(self) -> int:
        """Tokens of the largest graph; 0 where none could be captured."""
        return max(self.runner.sizes, default=0)

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Outside the graph. Fill, plan and replay a ragged EXTEND batch, request by request.

        Returns:
            Hidden [T, hidden] and the layers asked for [T, feature] or None, valid until the next run; None in place of both, and nothing
            has run, where a chunk has no graph or ends too near the end of the page table, or where one eager pass is faster.
        """
        assert batch.extend_lens is not None
        lens = batch.extend_lens.tolist()
        sizes = [self.runner.size_for(length) for length in lens]
        if not set(sizes) <= set(self.runner.sizes) or not replays_win(sizes, self._free) or not self._within_table(batch, lens, sizes):
            return None
        if len(lens) == 1:
            return self._replay(batch, 0, 0, lens[0], sizes[0])
        return self._replay_all(batch, lens, sizes)

    def _within_table(self, batch: ForwardBatch, lens: list[int], sizes: list[int]) -> bool:
        """Whether no padded chunk ends behind the page table; on EXTEND the host's lengths are exact."""
        ends = zip(batch.seq_len_bounds.tolist(), lens, sizes, strict=True)
        return all(seq_len - length + size <= self._positions for seq_len, length, size in ends)

    def _replay_all(self, batch: ForwardBatch, lens: list[int], sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Results of all requests behind each other, copied: a replay overwrites what the one before it gave."""
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
        padded = self.runner.batch(size)
        for name in ("input_ids", "positions", "out_cache_loc"):
            getattr(padded, name)[:length].copy_(getattr(batch, name)[start : start + length])
        padded.out_cache_loc[length:].zero_()
        padded.req_pool_indices.copy_(batch.req_pool_indices[i : i + 1])
        torch.add(batch.seq_lens[i : i + 1], size - length, out=padded.seq_lens)
        padded.seq_len_bounds[:] = batch.seq_len_bounds[i] + size - length
        outputs, _ = self.runner.run(padded)
        aux = outputs["aux"][:length]
        return outputs["hidden"][:length], aux if aux.shape[1] else None
