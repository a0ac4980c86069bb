"""The grammars of the requests in rows: on the host, they track the committed tokens and mask the draft windows.

Masks need tokens on the host, so a step with drafts and constrained requests waits for the tokens of the previous step and
for its own drafts. The masks of its window are computed in a thread while the target runs; without drafts that thread also
waits for the tokens.
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

from runtime.batch import Int32, RowInit
from runtime.constrained.constraint import Constraint
from runtime.constrained.grammar import Grammar, mask_words
from runtime.constrained.window_masks import Path, WindowMasks
from runtime.layers.token_mask import TokenMask
from runtime.model_executor.draft_window import DraftWindow
from runtime.model_executor.staging import HostCopy, to_device
from runtime.sampling_params import GrammarSpec

TOO_SLOW = "It takes too long to tell which tokens may come next. Make it simpler."
Bool = npt.NDArray[np.bool_]
Constraints = list[tuple[int, Constraint]]
"""Position in the batch and constraint of each constrained request, rising."""
Paths = Sequence[Sequence[Path]]
"""The paths of drafts of each constrained request, equally many for all."""


@dataclass(frozen=True, slots=True)
class _Unread:
    """Committed tokens on their way to the host: int64 [B, D], and the accept lengths if there are any."""

    constraints: Constraints
    tokens: HostCopy

    def commit(self) -> None:
        """Wait for them, and let the constraints go on."""
        tokens, *lens = self.tokens.wait()
        for request, constraint in self.constraints:
            for token in tokens[request, : int(lens[0][request]) if lens else 1].tolist():
                constraint.commit(token)


class GrammarStep:
    """The constrained requests of one step.

    Args:
        constraints: position in the batch and constraint of each.
        size: requests of the batch, padding included.
        width: D, positions of the draft window.
        words: entries of a mask row.
        device: where masks go.
        thread: computes the masks of the window.
        late: waits for what the constraints have yet to follow; called in the thread.
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

    def behind(self, paths: torch.Tensor) -> TokenMask | None:
        """The tokens that may follow each of W paths of n drafts, int64 [size, W, n]. Waits for the device."""
        on_host = paths.tolist()
        found = [[tuple(path) for path in on_host[request]] for request in self._selected]
        return self._chain_mask(found) if paths.shape[1] == 1 else self._tree_mask(found)

    def guide(self, drafts: Int32) -> None:
        """Put the one token that is allowed into int32 [live, K] drafts wherever there is only one, in place."""
        for window, request in zip(self._windows, self._selected, strict=True):
            path: Path = ()
            for column, token in enumerate(drafts[request].tolist()):
                drafts[request, column] = window.guided(path, token)
                path = (*path, int(drafts[request, column]))

    def verify(self, draft: DraftWindow) -> None:
        """Start to compute the masks of a window."""
        copies = HostCopy(draft.tokens) if draft.parents is None else HostCopy(draft.tokens, draft.parents)
        self._window, self._is_tree = self._thread.submit(self._compute, copies), draft.parents is not None

    def window_mask(self) -> TokenMask | None:
        """The mask of the window that `verify` was given: W = D. None if nothing is restricted."""
        assert self._window is not None, "verify comes first"
        paths = self._window.result()
        return self._tree_mask(paths) if self._is_tree else self._chain_mask(paths)

    def wait_for_masks(self) -> None:
        """Wait until the thread has let go of the constraints. It has, unless the step failed before it read its mask."""
        if self._window is not None:
            wait([self._window])

    def errors(self, offset: int) -> dict[int, str]:
        """Why grammars cannot be followed any further, by position in the batch, counted from `offset`."""
        pairs = zip(self.constraints, self._windows, strict=True)
        found = {
            offset + request: constraint.error or window.error or TOO_SLOW * constraint.too_slow for (request, constraint), window in pairs
        }
        return {request: error for request, error in found.items() if error}

    def _compute(self, copies: HostCopy) -> Paths:
        """The paths of a window, once the masks after them are known; runs in the thread, which uploads nothing to the device."""
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
        """The tokens that may follow each request's paths; each path is one draft longer than the previous."""
        restricted = [window.write(path) for window, found in zip(self._windows, paths, strict=True) for path in found]
        if not any(restricted):
            return None
        start = len(paths[0][0])
        bits = to_device(self._bits[start : start + len(paths[0])], self._device)
        return TokenMask(bits.transpose(0, 1), self._index, self._requests, self._selected)

    def _tree_mask(self, paths: Paths) -> TokenMask | None:
        """What may follow any paths."""
        rows = [[window.row(path) for path in found] for window, found in zip(self._windows, paths, strict=True)]
        if all(row is None for found in rows for row in found):
            return None
        bits = self._empty(len(rows), len(rows[0]))
        for places, found in zip(bits.numpy(), rows, strict=True):
            for place, row in zip(places, found, strict=True):
                place[:] = -1 if row is None else row
        return TokenMask(to_device(bits, self._device), self._index, self._requests, self._selected)

    def _empty(self, *shape: int) -> torch.Tensor:
        """Memory for mask rows, from which copies to the device are not waited for."""
        return torch.empty((*shape, self._words), dtype=torch.int32, pin_memory=self._device.type == "cuda")


class GrammarRows:
    """Owner of the constraints of all request rows, and of the thread that computes masks.

    Args:
        vocab_size: ids of the target.
        device: where masks go.

    Attributes:
        compile: compiles the grammar of a request that comes without it, on a rank that follows another; set once.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words, self._device = mask_words(vocab_size), device
        self.compile: Callable[[GrammarSpec], Grammar] | None = None
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
        """Requests took rows. A resumed request continues after its output so far."""
        for init in new_rows:
            self._constraints.pop(init.row, None)
            grammar, spec = init.grammar, init.sampling.grammar
            if grammar is None and spec is not None and self.compile is not None:
                grammar = self.compile(spec)
            if grammar is not None:
                assert init.history is not None, "a constrained request comes with its tokens"
                constraint = Constraint(grammar.matcher(), frozenset(init.eos_ids.tolist()), init.sampling.grammar_after)
                for token in init.history[init.prompt_len :].tolist():
                    constraint.commit(token)
                self._constraints[init.row] = constraint

    def step(self, rows: Int32, size: int, width: int = 1, wanted: Bool | None = None) -> GrammarStep | None:
        """The constrained requests among int32 [B] rows of a batch of `size`; None if there are none.

        Waits for the tokens that were committed to constrained requests before, unless the first mask is that of the target's
        pass: then there are no drafts, and `GrammarStep.verify` has them waited for in the thread.

        Args:
            width: D, positions of the draft window.
            wanted: bool [B], requests for which a token is chosen in this step; None for all.
        """
        if not self._constraints:
            return None
        chosen = range(len(rows)) if wanted is None else np.flatnonzero(wanted).tolist()
        constraints = [(i, found) for i in chosen if (found := self._constraints.get(int(rows[i]))) is not None]
        if not constraints:
            return None
        if self._latest is not None:
            self._latest.wait_for_masks()
        late = partial(self._catch_up, len(self._unread))
        if width > 1 or wanted is not None:
            late()
            late = partial(self._catch_up, 0)
        self._latest = GrammarStep(constraints, size, width, self._words, self._device, self._thread, late)
        return self._latest

    def _catch_up(self, count: int) -> None:
        """Wait for the `count` oldest of the unread tokens."""
        for _ in range(count):
            self._unread.popleft().commit()

    def follow(self, step: GrammarStep, tokens: torch.Tensor, accept_lens: torch.Tensor | None = None) -> None:
        """Tokens were committed in `step`: the first `accept_lens`, or 1, of each request's int64 [B, D]."""
        copies = HostCopy(tokens) if accept_lens is None else HostCopy(tokens, accept_lens)
        self._unread.append(_Unread(step.constraints, copies))


def _paths(tokens: Sequence[int], parents: Sequence[int]) -> list[Path]:
    """The drafts up to each node of a window; parents come before children."""
    paths: list[Path] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths
