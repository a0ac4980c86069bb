"""Graphs of the target for short prompts, whose kernels take less time than their launches.

"Short" depends on the model: launching an eager pass takes the same time for any number of tokens, while the time of a replay grows with
tokens and parameters. Prompts of an 8B model are short up to a thousand tokens, those of a small model up to a whole chunk. Several prompts
share one replay if their total is within this limit, so the weights are read once; if attention cannot capture ragged passes, a few prompts
are replayed one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from runtime.batch import ForwardMode
from runtime.config.device_tuning import DeviceTuning
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.graph_runner import Forward, GraphRunner, Outputs, RunnerSpec
from runtime.model_executor.input_buffers import BufferSpec
from runtime.models.decoder import DecoderModel, States

SIZES = (32, 64, 128, 192, *range(256, 1024, 128), *range(1024, 2049, 256))
"""Token counts that may be captured. Padding to the next one costs less than launching kernels one by one. With more tokens, attention's
cost grows quadratically, and the graph pool would hold the activations of rare passes."""
MAX_REQUESTS = 3
"""Maximum number of prompts of a batch that are replayed one after another; for small models the number of kernels is the limit."""
SLOTS = 8
"""Request slots of a pass over several prompts; the last one is for padding."""
SMALLEST_SHARED = 64
"""Tokens of the smallest graph over several prompts: with fewer tokens, reading the weights dominates."""


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Token counts at which the bottleneck of a prompt pass changes.

    Attributes:
        free_tokens: tokens for which the GPU time of a pass equals the host time of launching its kernels one by one.
        read_tokens: tokens for which GEMMs take as long as reading the weights once, which every replay does.
    """

    free_tokens: int
    read_tokens: int

    @classmethod
    def of(cls, tuning: DeviceTuning, parameters: int, launches: int) -> PromptCost:
        """The cost of a model with `parameters` weights per token and `launches` kernels per pass."""
        return cls(int(launches * tuning.launch_seconds * tuning.gemm_flops / (2 * parameters)), tuning.weight_read_tokens)

    @property
    def saturating_tokens(self) -> int:
        """Tokens at which a pass is compute-bound: three quarters of `free_tokens`, at least four times `read_tokens`.

        With more tokens a step ends later, but takes no less time per token.
        """
        return max(self.free_tokens * 3 // 4, 4 * self.read_tokens)

    def sizes(self, most: int) -> list[int]:
        """Token counts to capture: those of `SIZES` up to `free_tokens` and `most`, and `most` if it is not longer than these."""
        limit = min(self.free_tokens, SIZES[-1])
        return sorted({size for size in (*SIZES, most) if size <= min(limit, most)})

    def replays_win(self, sizes: list[int]) -> bool:
        """Whether replaying prompts padded to `sizes` one by one takes no longer than launching them as one eager pass.

        This is always so for a single prompt, which runs the same kernels. With several, each replay reads all weights again and computes
        its padding.
        """
        if len(sizes) == 1:
            return True
        return len(sizes) <= MAX_REQUESTS and sum(max(size, self.read_tokens) for size in sizes) <= self.free_tokens


def prompt_spec(hidden: int, feature_width: int, dtype: torch.dtype, launches: int) -> RunnerSpec:
    """Passes over the tokens of one request. Outputs: `hidden` [T, hidden], `aux` [T, feature_width] of the wanted layers."""
    return RunnerSpec(
        name="short prompts",
        mode=ForwardMode.EXTEND,
        width=0,
        outputs=(BufferSpec("hidden", "token", dtype, (hidden,)), BufferSpec("aux", "token", dtype, (feature_width,))),
        launches=launches,
    )


def shared_spec(single: RunnerSpec) -> RunnerSpec:
    """Ragged passes over up to `SLOTS` - 1 prompts, as `prompt_spec` for one."""
    return replace(single, name="several prompts", requests=SLOTS)


def shared_sizes(sizes: Sequence[int]) -> list[int]:
    """Token counts of the graphs over several prompts: multiples of `SLOTS`, because capture gives all slots equally many tokens."""
    return [size for size in sizes if size >= SMALLEST_SHARED and size % SLOTS == 0]


def prompt_forward(model: DecoderModel, aux_layers: tuple[int, ...]) -> Forward:
    """The function that the graphs record."""

    def forward(batch: ForwardBatch, outputs: Outputs, variant: str) -> None:
        hidden, aux = model.forward(batch, aux_layers)
        outputs["hidden"].copy_(hidden)
        if aux is not None:
            outputs["aux"].copy_(aux)

    return forward


class ShortPrompts:
    """Runs the chunks of a batch through the next larger graph, together or one after another.

    Attributes:
        runner: the graphs over one prompt. Padding follows the chunk: it writes to slot 0, and no token of the chunk attends to it. None
            for a model with recurrent states, which padding would change; then `shared` runs single prompts too.
        shared: the graphs over several prompts; None if attention cannot capture ragged passes.
    """

    def __init__(self, runner: GraphRunner | None, page_table: PageTable, cost: PromptCost, shared: GraphRunner | None = None) -> None:
        self.runner, self.shared, self._cost = runner, shared, cost
        self._positions = page_table.max_pages * page_table.page_size

    @property
    def runners(self) -> list[GraphRunner]:
        """All graph runners."""
        return [runner for runner in (self.runner, self.shared) if runner is not None]

    @property
    def largest(self) -> int:
        """Tokens of the largest graph that runs one prompt; 0 if none could be captured."""
        runner = self.runner or self.shared
        return 0 if runner is None else max(runner.sizes, default=0)

    def run(self, batch: ForwardBatch) -> States | None:
        """Outside the graph. Fill, plan and replay a ragged EXTEND batch.

        Returns:
            Hidden states [T, hidden] and auxiliary states [T, feature_width] or None, valid until the next run. None, without having run
            anything, if there is no graph for the batch, if the padding of a chunk does not fit the page table, or if one eager pass is
            faster.
        """
        assert batch.extend_lens is not None
        lens = batch.extend_lens.tolist()
        if self.shared is not None and (self.runner is None or len(lens) > 1) and len(lens) < SLOTS:
            size = self.shared.size_for(batch.num_tokens)
            if self.shared.has_graph(size):
                return self._replay_together(self.shared, batch, lens, size)
        if self.runner is None:
            return None
        sizes = [self.runner.size_for(length) for length in lens]
        captured = set(sizes) <= set(self.runner.sizes)
        if not (captured and self._cost.replays_win(sizes) and self._within_table(batch, lens, sizes)):
            return None
        if len(lens) == 1:
            return self._replay(self.runner, batch, 0, 0, lens[0], sizes[0])
        return self._replay_all(self.runner, batch, lens, sizes)

    def _replay_together(self, runner: GraphRunner, batch: ForwardBatch, lens: list[int], size: int) -> States:
        """Run all requests at `size` tokens; views of the runner's outputs.

        Unused slots have no tokens. The last slot has the padding: a prompt of the padding row, which reads and writes only page 0.
        """
        padded, B, T = runner.batch(size), len(lens), batch.num_tokens
        assert padded.extend_lens is not None
        _copy_tokens(batch, padded, slice(0, T))
        padded.set_rows(batch.req_pool_indices)
        padded.seq_lens[:B].copy_(batch.seq_lens)
        padded.seq_lens[B:].fill_(max(size - T, 1))
        padded.qo_indptr[: B + 1].copy_(batch.qo_indptr)
        padded.qo_indptr[B + 1 : SLOTS].fill_(T)
        padded.extend_lens[:] = [*lens, *[0] * (SLOTS - 1 - B), size - T]
        padded.seq_len_bounds[:B] = batch.seq_len_bounds
        padded.seq_len_bounds[B:] = max(size - T, 1)
        outputs, _ = runner.run(padded)
        return _states(outputs, T)

    def _within_table(self, batch: ForwardBatch, lens: list[int], sizes: list[int]) -> bool:
        """Whether every padded chunk fits the page table; in EXTEND batches the host's lengths are exact."""
        ends = zip(batch.seq_len_bounds.tolist(), lens, sizes, strict=True)
        return all(seq_len - length + size <= self._positions for seq_len, length, size in ends)

    def _replay_all(self, runner: GraphRunner, batch: ForwardBatch, lens: list[int], sizes: list[int]) -> States:
        """Results of all requests, concatenated; copied, since each replay overwrites the previous result."""
        whole: list[torch.Tensor] = []
        start = 0
        for i, (length, size) in enumerate(zip(lens, sizes, strict=True)):
            parts = [part for part in self._replay(runner, batch, i, start, length, size) if part is not None]
            whole = whole or [part.new_empty((batch.num_tokens, part.shape[1])) for part in parts]
            for kept, part in zip(whole, parts, strict=True):
                kept[start : start + length].copy_(part)
            start += length
        return States(whole[0], whole[1] if len(whole) > 1 else None)

    def _replay(self, runner: GraphRunner, batch: ForwardBatch, i: int, start: int, length: int, size: int) -> States:
        """Run request `i`, whose `length` tokens begin at `start`, at `size`; views of the runner's outputs."""
        padded = runner.batch(size)
        _copy_tokens(batch, padded, slice(start, start + length))
        padded.set_rows(batch.req_pool_indices[i : i + 1])
        torch.add(batch.seq_lens[i : i + 1], size - length, out=padded.seq_lens)
        padded.seq_len_bounds[:] = batch.seq_len_bounds[i] + size - length
        outputs, _ = runner.run(padded)
        return _states(outputs, length)


def _copy_tokens(batch: ForwardBatch, padded: ForwardBatch, chunk: slice) -> None:
    """Copy the inputs of a chunk's tokens to the front; the padding after them writes to slot 0."""
    length = chunk.stop - chunk.start
    padded.input_ids[:length].copy_(batch.input_ids[chunk])
    padded.positions[:length].copy_(batch.positions[chunk])
    padded.out_cache_loc[:length].copy_(batch.out_cache_loc[chunk])
    padded.out_cache_loc[length:].zero_()


def _states(outputs: Outputs, count: int) -> States:
    """The states of the first `count` tokens."""
    aux = outputs["aux"][:count]
    return States(outputs["hidden"][:count], aux if aux.shape[1] else None)
