"""Eager drafts: what the draft proposes for the next window without graphs, to be compared with what it proposes through them.

After a sampled iteration the draft's passes, and in some samples verification, run a second time, eagerly, over the same window. They
propose the next window, of which only the tokens are kept: the rows' draft state and the KV are put back as the graphs left them. So a
sample changes no token, and the next iteration proposes through graphs whatever it would have proposed. How many of the tokens that it
commits both windows have tells them apart.
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
from runtime.model_executor.draft_window import DraftWindow
from runtime.model_executor.drafter import Drafter
from runtime.model_executor.drift_alarm import Pairs
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.iteration import Accepted, AcceptResult, Iteration, VerifyResult
from runtime.model_executor.row_inputs import load_rows
from runtime.model_executor.staging import HostCopy
from runtime.model_executor.target_model import TargetModel
from runtime.model_executor.verification import Verifier

SAMPLED = SamplingNeeds(False, False, False, [], [], [])
MOST_BYTES = 128 << 20
"""No sample is taken where more than this would have to be put back. It is less than prompt steps take for activations."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Eager drafts of an iteration on their way to the host.

    Attributes:
        depth: drafts of each window that are compared.
        rows: bool [live], the requests that have eager drafts.
        found: int64 [live] each: leading committed tokens that they have, and whether their first drafts are unlike those of graphs.
        verify: whether verification was eager too.
    """

    depth: int
    rows: npt.NDArray[np.bool_]
    found: HostCopy
    verify: bool

    def pairs(self, accept_lens: npt.NDArray[np.integer], whole: npt.NDArray[np.bool_]) -> Pairs:
        """Accepted drafts of both windows; int [live] and bool [live], the requests that took all drafts. Waits for them."""
        both = self.rows & whole
        hits, unlike = self.found.wait()
        graph, eager = (np.minimum(lens[both], self.depth).astype(np.int64) for lens in (accept_lens - 1, np.minimum(hits, accept_lens)))
        return Pairs(graph, eager, unlike[both].astype(np.bool_), self.depth, self.verify)


class EagerDrafts:
    """Owner of the eager drafts by request row. Every method runs outside graphs and waits for nothing."""

    def __init__(self, target: TargetModel, inputs: InputBuffers, drafter: Drafter, verifier: Verifier) -> None:
        self._target, self._inputs, self._drafter, self._verifier = target, inputs, drafter, verifier
        rows, shape = len(target.rows.kv_lens), drafter.spec.shape
        D = shape.num_draft_tokens
        self._reach = max(D, drafter.spec.catch_up) + shape.tokens_per_step  # positions that a sample writes
        self._tokens, self._parents = (torch.zeros((rows, D), dtype=torch.int64, device=target.device) for _ in range(2))
        self._unlike = torch.zeros(rows, dtype=torch.int64, device=target.device)
        self._drafted = np.zeros(rows, dtype=np.bool_)  # rows whose next window has eager drafts
        self._depth, self._sample, self._delay = 0, NO_SAMPLE, NO_SAMPLE

    def admit(self, new_rows: Sequence[RowInit]) -> None:
        """Requests took rows."""
        self._drafted[[init.row for init in new_rows]] = False

    def begin(self, iteration: Iteration) -> Iteration:
        """An iteration whose inputs are filled, as it runs. All ranks that run together decide alike.

        If the draft just followed steps without drafts, the sample is of that, and is taken now.
        """
        sample = iteration.sample.taken and self._can_draft(iteration)
        catch_up = self._drafter.catch_up_eagerly() if sample else None
        if catch_up is not None:
            self._draft(replace(iteration, eager=True, sample=EagerSample(taken=True)), catch_up, self._drafter.spec.catch_up)
        delay, self._delay = self._delay, NO_SAMPLE
        return replace(iteration, sample=iteration.sample if sample and catch_up is None else NO_SAMPLE, delay=delay)

    def compare(self, iteration: Iteration, committed: torch.Tensor) -> Compared | None:
        """Compare the eager drafts with the tokens that the iteration commits, int64 [size, D or more]. None: there are none."""
        drafted = self._drafted[iteration.host_rows]
        self._drafted[iteration.host_rows] = False
        depth = min(self._depth, iteration.depth)
        if not depth or not drafted.any():
            return None
        rows = iteration.rows[: iteration.live]
        hits = self._hits(rows, committed[: iteration.live], depth)
        return Compared(depth, drafted, HostCopy(hits, self._unlike[rows]), self._sample.verify)

    def draft(self, iteration: Iteration, window: DraftWindow, accepted: Accepted) -> None:
        """Draft what follows an iteration that verified `window` and committed `accepted`."""
        eager = replace(iteration, eager=True)

        def follow() -> None:
            seen = accepted
            if iteration.sample.verify:
                seen = replace(accepted, features=self._verifier.run(eager, self._verifier.fill(eager, window)).features)
            self._drafter.follow(eager, seen)

        self._draft(eager, follow)

    def _draft(self, iteration: Iteration, follow: Callable[[], None], behind: int = 0) -> None:
        """`behind`: positions before the KV lengths that `follow` may write; 0 if it writes the iteration's window."""
        live, inputs, bounds = iteration.live, self._inputs, iteration.bounds.copy()
        bounds[:live] += 0 if behind else iteration.depth + 1
        with self._put_back(iteration, behind):
            follow()
            load_rows(inputs, iteration.rows, self._target.rows)
            state = inputs.kv_lens(iteration.size), inputs.last_tokens(iteration.size)
            window = self._drafter.propose(replace(iteration, kv_lens=state[0], last_tokens=state[1], bounds=bounds, grammar=None))
            D = window.width
            parents = torch.arange(D, device=window.tokens.device) - 1 if window.parents is None else window.parents[:live]
            self._tokens[iteration.rows[:live], :D] = window.tokens[:live]
            self._parents[iteration.rows[:live], :D] = parents
        self._drafted[:] = False
        self._drafted[iteration.host_rows] = True
        self._depth, self._sample, self._delay = iteration.depth, iteration.sample, iteration.sample

    @contextmanager
    def _put_back(self, iteration: Iteration, behind: int) -> Iterator[None]:
        """Within, the draft's state of these rows and KV may be overwritten, from `behind` positions before the KV lengths on."""
        rows, table, tables = iteration.rows, self._target.page_table, self._drafter.row_state(iteration.needs)
        pools = [model.runner.kv_pool for model in self._drafter.models()]
        if iteration.sample.verify:
            pools.append(self._target.runner.kv_pool)
        first = (iteration.kv_lens[:, None].to(torch.int64) - behind).clamp(min=0)
        slots = table.slots(rows[:, None], first + torch.arange(self._reach, device=rows.device)).flatten()
        states, contents = [each[rows] for each in tables], [pool.read(slots) for pool in pools]
        self._unlike[rows] = 0
        yield
        for each, state in zip(tables, states, strict=True):
            if not each.is_floating_point():
                self._unlike[rows] |= (each[rows] != state).any(dim=1)
            each[rows] = state
        for pool, content in zip(pools, contents, strict=True):
            pool.write(slots, content)

    def _can_draft(self, iteration: Iteration) -> bool:
        """Whether the draft has passes, which would replay graphs."""
        return bool(self._drafter.models()) and self._verifier.has_graph(iteration.depth, iteration.size) and self._fits(iteration)

    def _fits(self, iteration: Iteration) -> bool:
        """Whether what has to be put back is small."""
        pools = [self._target.runner.kv_pool, *(model.runner.kv_pool for model in self._drafter.models())]
        kv = self._reach * sum(pool.slot_bytes() for pool in (pools if iteration.sample.verify else pools[1:]))
        return iteration.size * (kv + sum(each[0].nbytes for each in self._drafter.row_state(SAMPLED))) <= MOST_BYTES

    def _hits(self, rows: torch.Tensor, committed: torch.Tensor, depth: int) -> torch.Tensor:
        """int64 [live]: leading tokens of `committed` that are on a path of the eager windows, at most `depth`."""
        tokens, parents = self._tokens[rows], self._parents[rows]
        at, on_path = torch.zeros_like(rows)[:, None], torch.ones_like(rows, dtype=torch.bool)[:, None]
        hits = torch.zeros_like(rows)
        for i in range(depth):
            child = on_path & (parents == at) & (tokens == committed[:, i : i + 1])
            child[:, 0] = False  # the root
            on_path, at = child.any(1, keepdim=True), child.int().argmax(1, keepdim=True)
            hits += on_path[:, 0]
        return hits


def verified_chain(iteration: Iteration, emitted: torch.Tensor, verified: VerifyResult) -> tuple[DraftWindow, Accepted]:
    """What an iteration graph verified and committed, int64 [size, D + 1]: past the accepted drafts the window is anything valid."""
    tokens = emitted[:, :-1]
    window = torch.cat([iteration.last_tokens[:, None], tokens[:, :-1]], dim=1)
    return DraftWindow(window), Accepted(AcceptResult(emitted[:, -1].to(torch.int32), tokens), window, verified.features)
