"""Eager drafts: the next window drafted without graphs, to be compared with the window drafted through graphs.

After a sampled iteration the draft's passes, and in some samples verification, run a second time, eagerly, over the same window. They
propose the next window, of which only the tokens are kept; draft state and KV are restored to what the graphs wrote. A sample therefore
changes no output, and the next iteration proposes through graphs as usual. The two windows are compared by how many of its committed tokens
each of them has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from runtime.batch import NO_SAMPLE, EagerSample, RowInit
from runtime.layers.sampling_tables import SamplingNeeds
from runtime.mem_cache.kv_pool import KVPool
from runtime.model_executor.draft_window import DraftWindow
from runtime.model_executor.drafter import Drafter
from runtime.model_executor.drift_alarm import Pairs
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.iteration import AcceptResult, CommittedWindow, Iteration, VerifyResult
from runtime.model_executor.staging import HostCopy
from runtime.model_executor.target_model import TargetModel
from runtime.model_executor.verification import Verifier
from runtime.model_executor.window import load_rows

SAMPLED = SamplingNeeds(False, False, False)
MAX_BYTES = 128 << 20
"""No sample is taken if more bytes than this must be restored after it. Prompt steps take more for activations."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison of an iteration's eager drafts with the tokens that it commits, on its way to the host.

    Attributes:
        depth: number of drafts of each window that are compared.
        rows: bool [live], the requests that have eager drafts.
        found: int64 [live] each: leading committed tokens that the eager window has, and whether its first draft differs from that of the
            graphs.
        verify: whether verification was eager too.
    """

    depth: int
    rows: npt.NDArray[np.bool_]
    found: HostCopy
    verify: bool

    def pairs(self, accept_lens: npt.NDArray[np.integer], wanted: npt.NDArray[np.bool_]) -> Pairs:
        """Accepted drafts of both windows. Waits for the copies.

        Args:
            accept_lens: int [live], accept lengths of the windows drafted through graphs.
            wanted: bool [live], the requests to compare.
        """
        both = self.rows & wanted
        hits, mismatched = self.found.wait()
        # The token after the accepted drafts shows whether the eager window has one more right draft; beyond it nothing is known.
        graph, eager = accept_lens[both] - 1, np.minimum(hits, accept_lens)[both]
        graph, eager = (np.minimum(side, self.depth).astype(np.int64) for side in (graph, eager))
        return Pairs(graph, eager, mismatched[both].astype(np.bool_), self.depth, self.verify)


def first_of_equal(emitted: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """bool [live]: requests whose tokens, [live, n], differ from those of all earlier requests. Identical requests are not independent."""
    first = np.zeros(len(emitted), dtype=np.bool_)
    first[np.unique(emitted, axis=0, return_index=True)[1]] = True
    return first


class EagerDrafts:
    """Owner of the eager drafts by request row. Every method runs outside graphs and waits for nothing.

    An iteration calls `begin`, then `compare` with what an earlier sample drafted, and at its end `draft`, which takes a sample.

    Attributes:
        samples: number of samples that were launched.
    """

    def __init__(self, target: TargetModel, inputs: InputBuffers, drafter: Drafter, verifier: Verifier) -> None:
        self._target, self._inputs, self._drafter, self._verifier = target, inputs, drafter, verifier
        rows, shape = len(target.rows.kv_lens), drafter.spec.shape
        D = shape.num_draft_tokens
        self._reach = max(D, drafter.spec.catch_up) + shape.tokens_per_step  # positions that a sample writes
        # The eager windows by request row: tokens, their parents, and whether the first draft differs from that of the graphs.
        # Where a window has fewer than D tokens, the other parents are -1 or those of a longer chain, which no path reaches.
        self._tokens, self._parents = (torch.full((rows, D), -1, dtype=torch.int64, device=target.device) for _ in range(2))
        self._mismatched = torch.zeros(rows, dtype=torch.int64, device=target.device)
        self._has_window = np.zeros(rows, dtype=np.bool_)
        self._depth, self._verified = 0, False  # of the sample that all eager windows belong to
        self._delay, self.samples = NO_SAMPLE, 0  # the sample that ran since the previous iteration

    def admit(self, new_rows: Sequence[RowInit]) -> None:
        """Requests took rows."""
        self._has_window[[init.row for init in new_rows]] = False

    def begin(self, iteration: Iteration) -> Iteration:
        """The iteration with `delay` set, and without a sample if none can be taken. All ranks make the same choice.

        If a catch-up window just ran, the sample repeats that window, now instead of at the end of the iteration.
        """
        if not (iteration.sample.taken or self._delay.taken):
            return iteration
        taken = iteration.sample.taken and self._can_draft(iteration)
        if taken and (catch_up := self._drafter.catch_up_eagerly()) is not None:
            taken = False
            load_rows(self._inputs, iteration.rows, self._target.rows)
            self._draft(replace(iteration, sample=EagerSample(taken=True)), catch_up, self._drafter.spec.catch_up)
        delay, self._delay = self._delay, NO_SAMPLE
        return replace(iteration, sample=iteration.sample if taken else NO_SAMPLE, delay=delay)

    def compare(self, iteration: Iteration, committed: torch.Tensor) -> Compared | None:
        """Compare the eager windows with the tokens that the iteration commits, int64 [size, D or more]. None without eager windows."""
        if not self._depth:
            return None
        depth, compared = self._depth, self._has_window[iteration.host_rows]
        self._has_window[iteration.host_rows] = False
        if not self._has_window.any():
            self._depth = 0  # the following iterations have nothing to look for
        if depth != iteration.depth or not compared.any():  # every draft of a DFlash block depends on the block's size
            return None
        rows = iteration.rows[: iteration.live]
        hits = self._hits(rows, committed[: iteration.live], depth)
        return Compared(depth, compared, HostCopy(hits, self._mismatched[rows]), self._verified)

    def draft(self, iteration: Iteration, committed: CommittedWindow) -> None:
        """Draft the next window eagerly after a sampled iteration that verified and committed the window `committed`."""
        eager = replace(iteration, eager=True)

        def follow() -> None:
            seen = committed
            if iteration.sample.verify:
                seen = replace(committed, features=self._verifier.run(eager, self._verifier.fill(eager, committed.window)).features)
            self._drafter.follow(eager, seen)

        self._draft(iteration, follow)

    def _draft(self, iteration: Iteration, follow: Callable[[], None], behind: int = 0) -> None:
        """Run `follow`, the draft's eager passes over the committed tokens, and keep the window that the draft then proposes.

        Args:
            behind: positions before the KV lengths that `follow` may write; 0 if it writes the iteration's window.
        """
        live, rows = iteration.live, iteration.rows
        with self._restored(iteration, behind) as before:
            follow()
            self._mismatched[rows] = self._differs(iteration, before)
            window = self._drafter.propose(self._next(iteration, 0 if behind else iteration.depth + 1))
            D = window.width
            chain = torch.arange(D, device=rows.device) - 1
            self._tokens[rows[:live], :D] = window.tokens[:live]
            self._parents[rows[:live], :D] = chain if window.parents is None else window.parents[:live]
        self._has_window[:] = False
        self._has_window[iteration.host_rows] = True
        self._depth, self._verified, self._delay = iteration.depth, iteration.sample.verify, iteration.sample
        self.samples += 1

    def _next(self, iteration: Iteration, committed: int) -> Iteration:
        """The next iteration of the same requests, to run eagerly, if this one commits at most `committed` tokens. Fills the inputs."""
        load_rows(self._inputs, iteration.rows, self._target.rows)
        lens, last, bounds = self._inputs.kv_lens(iteration.size), self._inputs.last_tokens(iteration.size), iteration.bounds.copy()
        bounds[: iteration.live] += committed
        return replace(iteration, kv_lens=lens, last_tokens=last, bounds=bounds, grammar=None, eager=True)

    @contextmanager
    def _restored(self, iteration: Iteration, behind: int) -> Iterator[list[torch.Tensor]]:
        """Restore the draft's state of these rows, and KV from `behind` positions before the KV lengths on, after the `with` block. Yields
        the saved state.
        """
        rows, tables, pools = iteration.rows, self._drafter.row_state(iteration.needs), self._written(iteration.sample)
        first = (iteration.kv_lens[:, None].to(torch.int64) - behind).clamp(min=0)
        slots = self._target.page_table.slots(rows[:, None], first + torch.arange(self._reach, device=rows.device)).flatten()
        state, contents = [table[rows] for table in tables], [pool.read(slots) for pool in pools]
        yield state
        for table, kept in zip(tables, state, strict=True):
            table[rows] = kept
        for pool, content in zip(pools, contents, strict=True):
            pool.write(slots, content)

    def _differs(self, iteration: Iteration, before: Sequence[torch.Tensor]) -> torch.Tensor:
        """int64 [size]: whether the first drafts of the next window, in the draft's state, differ from those in `before`."""
        rows, mismatched = iteration.rows, torch.zeros_like(iteration.rows)
        for table, kept in zip(self._drafter.row_state(iteration.needs), before, strict=True):
            if not table.is_floating_point():
                mismatched |= (table[rows] != kept).any(dim=1)
        return mismatched

    def _can_draft(self, iteration: Iteration) -> bool:
        """Whether the draft has passes that would replay graphs."""
        return bool(self._drafter.models()) and self._verifier.has_graph(iteration.depth, iteration.size) and self._fits(iteration)

    def _fits(self, iteration: Iteration) -> bool:
        """Whether at most `MAX_BYTES` must be restored."""
        kv = self._reach * sum(spec.bytes_per_slot for pool in self._written(iteration.sample) for spec in pool.specs)
        return iteration.size * (kv + sum(each[0].nbytes for each in self._drafter.row_state(SAMPLED))) <= MAX_BYTES

    def _written(self, sample: EagerSample) -> list[KVPool]:
        """The pools whose KV a sample overwrites: those of the draft, and the target's if verification runs again."""
        pools = [model.runner.kv_pool for model in self._drafter.models()]
        return [*pools, self._target.runner.kv_pool] if sample.verify else pools

    def _hits(self, rows: torch.Tensor, committed: torch.Tensor, depth: int) -> torch.Tensor:
        """int64 [live]: number of leading tokens of `committed` that are on a path of the eager windows, at most `depth`."""
        tokens, parents = self._tokens[rows], self._parents[rows]
        at, on_path = torch.zeros_like(rows)[:, None], torch.ones_like(rows, dtype=torch.bool)[:, None]
        hits = torch.zeros_like(rows)
        for i in range(min(depth, committed.shape[1])):  # a tree may have fewer nodes than steps
            child = on_path & (parents == at) & (tokens == committed[:, i : i + 1])
            child[:, 0] = False  # the root
            on_path, at = child.any(1, keepdim=True), child.int().argmax(1, keepdim=True)
            hits += on_path[:, 0]
        return hits


def verified_chain(iteration: Iteration, emitted: torch.Tensor, verified: VerifyResult) -> CommittedWindow:
    """The committed window of an iteration graph, from its `emitted`, int64 [size, D + 1]. Beyond the accepted drafts the
    window has arbitrary valid tokens.
    """
    tokens = emitted[:, :-1]
    drafts = torch.cat([iteration.last_tokens[:, None], tokens[:, :-1]], dim=1)
    result = AcceptResult(emitted[:, -1].to(torch.int32), tokens)
    return CommittedWindow(DraftWindow(drafts), result, verified.features)
