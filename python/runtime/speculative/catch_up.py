"""Catch-up: the draft processes the positions of several steps without drafts in one window.

A step without drafts stores the draft's inputs for its one position: the token and the target's states. Before the next step
with drafts, and at the latest after `WIDTH` steps, the draft runs over all stored positions together. It computes what it
would have computed step by step; until then its KV and first drafts lag behind. After a prompt that no drafts are expected to
follow, the draft has written KV of all positions, but its first draft is computed in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from runtime.batch import PAD_ROW, ForwardMode, Int32, RowInit
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.graph_runner import GraphRunner, RunnerSpec
from runtime.model_executor.input_buffers import INPUTS, BufferSpec, InputBuffers
from runtime.model_executor.iteration import Iteration
from runtime.model_executor.request_rows import RequestRows
from runtime.model_executor.target_model import TargetModel
from runtime.model_executor.window import fill_window, load_rows

WIDTH = 8
"""Stored positions per row, and tokens per request of the window."""
GUESS_EVERY = 4
"""One in this many windows after which no drafts are needed still computes guesses, which are compared with the next committed tokens. They
measure acceptance at depth 0; the LM head that computes them is a large part of a pass, so not every window does."""
PAD_SLOT = 0
"""The slot that window positions without a token write to."""


def catch_up_spec(variants: tuple[str, ...], launches: int, num_passes: int = 1) -> RunnerSpec:
    """The runner over windows of stored positions, which its function reads itself. Input: `accept_lens` int32 [B], stored positions."""
    inputs = (BufferSpec("accept_lens", "req", torch.int32, pad=1),)
    return RunnerSpec("draft extend K=0", ForwardMode.DRAFT_EXTEND, WIDTH, (), inputs, num_passes, 0, variants, launches)


class StoredInputs:
    """Owner of the stored inputs of the draft, by request row: position p is at index p % `WIDTH`. Row 0 is padding."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, inputs: InputBuffers) -> None:
        """`width`: values of the target's states at one position; `inputs`: holds the KV lengths at which windows begin."""
        self._inputs = inputs
        self._tokens = torch.zeros((rows, WIDTH), dtype=torch.int64, device=inputs.device)
        self._states = torch.zeros((rows, WIDTH, width), dtype=dtype, device=inputs.device)

    def add(self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, states: torch.Tensor) -> None:
        """Store one position of each row; one kernel on a GPU. Inside or outside a graph.

        Args:
            rows: int64 [B].
            positions: int32 or int64 [B].
            tokens: int64 [B].
            states: [B, width], converted to the dtype of the stored states.
        """
        if rows.is_cuda:
            from runtime.speculative.catch_up_kernel import store_position_cuda

            store_position_cuda(rows, positions, tokens, states, self._tokens, self._states)
            return
        at = torch.add(positions % WIDTH, rows, alpha=WIDTH)
        self._tokens.view(-1).index_copy_(0, at, tokens)
        self._states.flatten(0, 1).index_copy_(0, at, states.to(self._states.dtype))

    def states(self, batch: ForwardBatch) -> torch.Tensor:
        """[B * WIDTH, width]: the states of the windows of a batch; one kernel on a GPU. In the graph."""
        rows, starts = batch.req_pool_indices, self._inputs.kv_lens(batch.batch_size)
        if rows.is_cuda:
            from runtime.speculative.catch_up_kernel import gather_states_cuda

            return gather_states_cuda(rows, starts, self._states)
        return self._states[_window(rows, starts)].flatten(0, 1)

    def fill(self, batch: ForwardBatch, rows: torch.Tensor, lens: torch.Tensor, state: RequestRows, page_table: PageTable) -> None:
        """Fill a batch and its inputs with the windows of stored positions that end at each row's KV length; one kernel on a GPU. Outside
        any graph.

        Args:
            batch: persistent buffers of `WIDTH` tokens per request.
            rows: int64 [B]; padding: row 0.
            lens: int32 [B], stored positions of each window; padding: 1. The other tokens write to `PAD_SLOT`.
            state: gives the KV lengths.
            page_table: gives the slots.
        """
        inputs, size = self._inputs, batch.batch_size
        if rows.is_cuda:
            from runtime.speculative.catch_up_kernel import fill_window_cuda

            fill_window_cuda(batch, inputs, rows, lens, self._tokens, state, page_table, PAD_SLOT)
            return
        starts = inputs.kv_lens(size)
        load_rows(inputs, rows, state)
        starts.sub_(lens).clamp_(min=0)  # padding has no KV
        fill_window(batch, page_table, starts, self._tokens[_window(rows, starts)])
        unused = torch.arange(WIDTH, device=lens.device) >= lens[:, None]
        batch.out_cache_loc.view(size, WIDTH).masked_fill_(unused, PAD_SLOT)
        inputs.named("accept_lens", size).copy_(lens)

    def warm_up(self) -> None:
        """Compile the kernels that store positions of decode steps and of prompts, by storing a position of the padding row."""
        row, states = torch.zeros(1, dtype=torch.int64, device=self._tokens.device), self._states[:1, 0]
        for positions in (row.to(torch.int32), row):
            self.add(row, positions, row, states.clone())


def _window(rows: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices of the stored positions of windows that begin at `starts`."""
    return rows[:, None], (starts[:, None] + torch.arange(WIDTH, device=starts.device)) % WIDTH


class CatchUp:
    """Counts how many positions the draft lags in each row, and runs the window over them.

    Attributes:
        stored: the stored positions.
        runner: runs windows of `WIDTH` of them.
        in_step: whether the draft follows each step without drafts immediately, because attention groups share its experts.
        guessed: whether the latest window computed guesses although no drafts follow.
        again: runs the window of the latest `before_iteration` once more, eagerly; None if it ran none.
    """

    def __init__(self, target: TargetModel, inputs: InputBuffers, stored: StoredInputs, runner: GraphRunner) -> None:
        self.runner, self._target, self.stored = runner, target, stored
        self.again: Callable[[], None] | None = None
        self.in_step = target.runner.model.context.exchange is not None
        self._behind = np.zeros(len(target.rows.kv_lens), dtype=np.int32)
        self._windows, self.guessed = 0, False
        # Passes of `WIDTH` tokens per request may be larger than all others.
        inputs.declare(INPUTS, inputs.max_requests, inputs.max_requests * WIDTH)

    def admit(self, new_rows: Sequence[RowInit]) -> None:
        """Reset the counts of newly assigned rows: the draft processes prompts immediately."""
        self._behind[[init.row for init in new_rows]] = 0

    def reset(self) -> None:
        """Forget every request."""
        self._behind[:], self._windows, self.guessed = 0, 0, False

    @property
    def guesses_next(self) -> bool:
        """Whether the next window computes guesses even if no drafts follow. Equal on all ranks."""
        return self._windows % (GUESS_EVERY * WIDTH if self.in_step else GUESS_EVERY) == 0

    def warmup_runs(self) -> list[Callable[[], object]]:
        """Runs that compile the kernels that store positions and fill windows."""
        return [self.stored.warm_up, self._warm_up_window]

    def _warm_up_window(self) -> None:
        """Fill a window of the padding row."""
        row = torch.full((1,), PAD_ROW, dtype=torch.int64, device=self._target.device)
        target, lens = self._target, torch.ones_like(row, dtype=torch.int32)
        self.stored.fill(self.runner.batch(1), row, lens, target.rows, target.page_table)

    # ---- before an iteration, outside any graph

    def before_iteration(self, rows: Int32, bounds: Int32, depth: int, variant: str) -> int:
        """Run the window if an iteration of `rows` needs it, and count the position that it will store.

        Args:
            rows: int32 [live].
            bounds: int32 [live], upper bounds of their KV lengths.
            depth: the depth of the iteration.
            variant: the runner's variant.

        Returns:
            The maximum number of positions at the end of a row's KV that the draft still lags after the iteration.
        """
        self.guessed, self.again = False, None
        if self.in_step:
            self._count_window(depth)
            return 0
        behind = self._behind[rows]
        most = int(behind.max(initial=0))
        if most and (depth or most == WIDTH):
            run = partial(self._run, rows, bounds, behind, variant, size=self.runner.size_for(len(rows)))
            run(eager=False)
            self.again = partial(run, eager=True)
            self._behind[rows] = most = 0
            self._count_window(depth)
        if depth == 0:
            self._behind[rows] += 1
            most += 1
        return most

    def _count_window(self, depth: int) -> None:
        """Count a window before an iteration of `depth`."""
        self.guessed = depth == 0 and self.guesses_next
        self._windows += depth == 0

    def add(self, iteration: Iteration, tokens: torch.Tensor, states: torch.Tensor, variant: str) -> None:
        """Store the inputs of the draft after an iteration without drafts; arguments as for `StoredInputs.add`.

        Attention groups run their draft immediately, in windows of one size.
        """
        self.stored.add(iteration.rows, iteration.kv_lens, tokens, states)
        if self.in_step:
            live = iteration.live
            one = np.ones(live, dtype=np.int32)
            bounds = iteration.bounds[:live] + 1
            self._run(iteration.host_rows, bounds, one, variant, eager=iteration.eager, size=iteration.size)

    def add_prompts(self, ended: Int32, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, states: torch.Tensor) -> None:
        """Store the last position of each prompt chunk instead of computing its first draft; arguments as for `StoredInputs.add`.

        Args:
            ended: int32, the rows whose prompt ends; only their positions will be read.
        """
        self.stored.add(rows, positions, tokens, states)
        self._behind[ended] = 1

    def _run(self, rows: Int32, bounds: Int32, behind: Int32, variant: str, eager: bool, size: int) -> None:
        """One window per row that lags; the other rows are padding."""
        runner, live = self.runner, len(rows)
        batch, padded, lens = runner.batch(size), np.full(size, PAD_ROW, dtype=np.int64), np.ones(size, dtype=np.int32)
        padded[:live], lens[:live] = np.where(behind > 0, rows, PAD_ROW), np.maximum(behind, 1)
        batch.seq_len_bounds[:] = WIDTH
        batch.seq_len_bounds[:live] += np.where(behind > 0, bounds - behind, 0)
        rows_d, lens_d = self._target.staging.upload(padded, lens)
        self.stored.fill(batch, rows_d, lens_d, self._target.rows, self._target.page_table)
        runner.run(batch, variant, eager)
