"""The grammars of running requests: on the host, constraints track the committed tokens and compute masks of draft windows.

Masks need tokens on the host, so a step with drafts and constrained requests waits for the tokens of the previous step and for its own
drafts. A thread computes the masks of its window while the target runs; without drafts the thread also waits for the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from runtime.batch import BatchResult, Int32, RowInit
from runtime.constrained.constraint import Constraint
from runtime.constrained.grammar import GrammarFailure, Matcher, mask_words
from runtime.constrained.window_masks import Path, WindowMasks
from runtime.layers.token_mask import TokenMask
from runtime.model_executor.draft_window import DraftWindow
from runtime.model_executor.staging import HostCopy, to_device
from runtime.sampling_params import GrammarSpec

Bool = npt.NDArray[np.bool_]
Constraints = list[tuple[int, Constraint]]
"""Position in the batch and constraint of each constrained request, by increasing position."""
Paths = Sequence[Sequence[Path]]
"""The draft paths of each constrained request; all have the same number of paths."""


@dataclass(frozen=True, slots=True)
class _Unread:
    """Committed tokens on their way to the host: int64 [B, D], and accept lengths unless each request has one token."""

    constraints: Constraints
    tokens: HostCopy

    def commit(self) -> None:
        """Wait for the tokens, and advance the constraints by them."""
        tokens, *lens = self.tokens.wait()
        for request, constraint in self.constraints:
            for token in tokens[request, : int(lens[0][request]) if lens else 1].tolist():
                constraint.commit(token)


class GrammarStep:
    """The constrained requests of one step.

    Args:
        constraints: position in the batch and constraint of each.
        size: requests of the batch, including padding.
        width: D, positions of the draft window.
        words: 32-bit words of a mask row.
        device: the device of the masks.
        thread: computes the masks of the window.
        late: waits for committed tokens that the constraints have not processed; called in the thread.
    """

    def __init__(
        self,
        constraints: Constraints,
        size: int,
        width: int,
        words: int,
        device: torch.device,
        thread: ThreadPoolExecutor,
        late: Callable[[], None],
    ) -> None:
        self.constraints, self._late = constraints, late
        self._words, self._device, self._thread = words, device, thread
        self._bits = self._empty(width, len(constraints))
        rows = self._bits.numpy()
        self._windows = [WindowMasks(constraint, rows[:, n]) for n, (_, constraint) in enumerate(constraints)]
        self._selected = [request for request, _ in constraints]
        requests, index = np.array(self._selected), np.zeros(size, dtype=np.int64)
        index[requests] = np.arange(len(requests))
        self._index, self._requests = (to_device(torch.from_numpy(array), device) for array in (index, requests))
        self._window: Future[Paths] | None = None

    @property
    def restricts(self) -> bool:
        """Whether a grammar restricts the token after the last committed one."""
        return any(constraint.restricts for _, constraint in self.constraints)

    def first(self) -> TokenMask | None:
        """The tokens that may follow the last committed token: W = 1. None if nothing is restricted."""
        return self._chain_mask([[()]] * len(self._windows))

    def after(self, paths: torch.Tensor) -> TokenMask | None:
        """The tokens that may follow each of W paths of n drafts, int64 [size, W, n]. Waits for the device."""
        on_host = paths.tolist()
        found = [[tuple(path) for path in on_host[request]] for request in self._selected]
        return self._chain_mask(found) if paths.shape[1] == 1 else self._tree_mask(found)

    def substitute_forced(self, drafts: Int32) -> None:
        """Substitute forced tokens in drafts, int32 [live, K], in place."""
        for window, request in zip(self._windows, self._selected, strict=True):
            path: Path = ()
            for column, token in enumerate(drafts[request].tolist()):
                drafts[request, column] = window.substitute_forced(path, token)
                path = (*path, int(drafts[request, column]))

    def start_masks(self, window: DraftWindow) -> None:
        """Start computing the masks of a window in the thread."""
        copies = HostCopy(window.tokens) if window.parents is None else HostCopy(window.tokens, window.parents)
        self._window, self._is_tree = self._thread.submit(self._compute, copies), window.parents is not None

    def window_mask(self) -> TokenMask | None:
        """Wait for the mask of the window given to `start_masks`: W = D. None if nothing is restricted."""
        assert self._window is not None, "call start_masks first"
        paths = self._window.result()
        return self._tree_mask(paths) if self._is_tree else self._chain_mask(paths)

    def wait_for_masks(self) -> None:
        """Wait until the thread no longer uses the constraints, in case the step failed before it read its mask."""
        if self._window is not None:
            wait([self._window])

    def failures(self, offset: int, result: BatchResult) -> dict[int, GrammarFailure]:
        """Why requests end with the tokens that they committed in this step, by position in the batch. Call it once.

        Args:
            offset: the position in the batch of the first request of this step.
            result: of the batch.
        """
        found = dict[int, GrammarFailure]()
        for window, request in zip(self._windows, self._selected, strict=True):
            if window.clean:
                continue
            stop, count = result.accept_lens[: offset + request + 1].sum(), result.accept_lens[offset + request]
            if failure := window.failure(tuple(result.token_ids[stop - count : stop].tolist())):
                found[offset + request] = failure
        return found

    def _compute(self, copies: HostCopy) -> Paths:
        """Compute the masks after all paths of a window, and return the paths. Runs in the thread, which uploads nothing to the device."""
        self._late()
        tokens, *parents = (array.tolist() for array in copies.wait())
        paths = [
            _paths(tokens[request], parents[0][request] if parents else range(-1, len(tokens[request]) - 1)) for request in self._selected
        ]
        for window, found in zip(self._windows, paths, strict=True):
            for path in found:
                window.row(path)
        return paths

    def _chain_mask(self, paths: Paths) -> TokenMask | None:
        """The tokens that may follow each path of a chain, where each path is one draft longer than the previous."""
        restricted = [window.write(path) for window, found in zip(self._windows, paths, strict=True) for path in found]
        if not any(restricted):
            return None
        start = len(paths[0][0])
        bits = to_device(self._bits[start : start + len(paths[0])], self._device)
        return TokenMask(bits.transpose(0, 1), self._index, self._requests, self._selected)

    def _tree_mask(self, paths: Paths) -> TokenMask | None:
        """The tokens that may follow each of any paths."""
        rows = [[window.row(path) for path in found] for window, found in zip(self._windows, paths, strict=True)]
        if all(row is None for found in rows for row in found):
            return None
        bits = self._empty(len(rows), len(rows[0]))
        for places, found in zip(bits.numpy(), rows, strict=True):
            for place, row in zip(places, found, strict=True):
                place[:] = -1 if row is None else row
        return TokenMask(to_device(bits, self._device), self._index, self._requests, self._selected)

    def _empty(self, *shape: int) -> torch.Tensor:
        """Memory for mask rows, pinned for a GPU so that copies to it are asynchronous."""
        return torch.empty((*shape, self._words), dtype=torch.int32, pin_memory=self._device.type == "cuda")


class GrammarRows:
    """Owner of the constraints of all request rows, and of the thread that computes masks.

    Args:
        vocab_size: the target's vocabulary size.
        device: the device of the masks.

    Attributes:
        compile: on a follower, compiles the grammar of a request, which rank 0 does not send; set once.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words, self._device = mask_words(vocab_size), device
        self.compile: Callable[[GrammarSpec], Matcher] | None = None
        self._constraints: dict[int, Constraint] = {}
        self._unread: deque[_Unread] = deque()
        self._latest: GrammarStep | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")

    def reset(self) -> None:
        """Forget every request."""
        self._constraints.clear()
        self._unread.clear()
        self._latest = None

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def admit(self, new_rows: Sequence[RowInit]) -> None:
        """Set the constraints of newly assigned rows. A resumed request continues after its output so far."""
        for init in new_rows:
            self._constraints.pop(init.row, None)
            grammar, spec = init.grammar, init.sampling.grammar
            if grammar is None and spec is not None and self.compile is not None:
                grammar = self.compile(spec)
            if grammar is not None:
                assert init.history is not None, "a constrained request comes with its tokens"
                constraint = Constraint(grammar.fork(), frozenset(init.eos_ids.tolist()), init.sampling.grammar_after)
                for token in init.history[init.prompt_len :].tolist():
                    constraint.commit(token)
                self._constraints[init.row] = constraint

    def step(self, rows: Int32, size: int, width: int = 1, wanted: Bool | None = None) -> GrammarStep | None:
        """The constrained requests among int32 [B] rows of a batch of `size`; None if there are none.

        Waits for the tokens that constrained requests committed before. Without drafts the thread does so in `GrammarStep.start_masks`,
        because the first mask needed is that of the target's pass.

        Args:
            width: D, positions of the draft window.
            wanted: bool [B], requests that get a token in this step; None for all.
        """
        if not self._constraints:
            return None
        chosen = range(len(rows)) if wanted is None else np.flatnonzero(wanted).tolist()
        constraints = [(i, found) for i in chosen if (found := self._constraints.get(int(rows[i]))) is not None]
        if not constraints:
            return None
        if self._latest is not None:
            self._latest.wait_for_masks()
        late = partial(self._commit_unread, len(self._unread))
        if width > 1 or wanted is not None:
            late()
            late = partial(self._commit_unread, 0)
        self._latest = GrammarStep(constraints, size, width, self._words, self._device, self._thread, late)
        return self._latest

    def _commit_unread(self, count: int) -> None:
        """Wait for the `count` oldest of the unread tokens."""
        for _ in range(count):
            self._unread.popleft().commit()

    def record(self, step: GrammarStep, tokens: torch.Tensor, accept_lens: torch.Tensor | None = None) -> None:
        """Record the tokens committed in `step`: the first `accept_lens`, or 1, of each request in int64 [B, D]."""
        copies = HostCopy(tokens) if accept_lens is None else HostCopy(tokens, accept_lens)
        self._unread.append(_Unread(step.constraints, copies))


def _paths(tokens: Sequence[int], parents: Sequence[int]) -> list[Path]:
    """The drafts up to each node of a window; parents come before children."""
    paths: list[Path] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths
