"""The grammars of the requests in rows: they follow the committed tokens and mask the draft windows, on the host.

Masks need tokens on the host, so a step with constrained requests waits for the tokens of the step before it and for its
own drafts. The masks of its window are computed in a thread while the target runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from runtime.batch import Int32, RowInit
from runtime.constrained.constraint import Constraint
from runtime.constrained.grammar import Grammar, MaskRow, mask_words
from runtime.constrained.window_masks import Path, WindowMasks
from runtime.layers.token_mask import TokenMask
from runtime.model_executor.draft_window import DraftWindow
from runtime.model_executor.staging import HostCopy
from runtime.sampling_params import GrammarSpec

Bool = npt.NDArray[np.bool_]
MaskRows = list[list[MaskRow | None]]
"""For each constrained request and window position a mask row; None where everything is allowed."""


@dataclass(frozen=True, slots=True)
class _Unread:
    """Committed tokens on their way to the host: int64 [B, D], and the accept lengths where there are any."""

    constraints: list[tuple[int, Constraint]]
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
        words: entries of a mask row.
        device: where masks go.
        thread: computes the masks of the window.
    """

    def __init__(
        self, constraints: list[tuple[int, Constraint]], size: int, words: int, device: torch.device, thread: ThreadPoolExecutor
    ) -> None:
        self.constraints = constraints
        self._size, self._words, self._device, self._thread = size, words, device, thread
        self._windows = [WindowMasks(constraint, words) for _, constraint in constraints]
        self._rows: Future[MaskRows] | None = None

    @property
    def restricts(self) -> bool:
        """Whether a grammar restricts the token behind the last committed one."""
        return any(constraint.restricts for _, constraint in self.constraints)

    def first(self) -> TokenMask | None:
        """What may follow the last committed token: W = 1. None where nothing is restricted."""
        rows: MaskRows = [[window.row(())] for window in self._windows]
        return self._mask(rows)

    def behind(self, paths: torch.Tensor) -> TokenMask | None:
        """What may follow each of W paths of n drafts, int64 [size, W, n]. Waits for the device."""
        on_host = paths.tolist()
        rows = [[window.row(tuple(path)) for path in on_host[i]] for window, (i, _) in zip(self._windows, self.constraints, strict=True)]
        return self._mask(rows)

    def guide(self, drafts: Int32) -> None:
        """Put the one token that is allowed into int32 [live, K] drafts wherever there is only one, in place."""
        for window, (request, _) in zip(self._windows, self.constraints, strict=True):
            path: Path = ()
            for column, token in enumerate(drafts[request].tolist()):
                drafts[request, column] = window.guided(path, token)
                path = (*path, int(drafts[request, column]))

    def verify(self, draft: DraftWindow) -> None:
        """Start to compute the masks of a window."""
        copies = HostCopy(draft.tokens) if draft.parents is None else HostCopy(draft.tokens, draft.parents)
        self._rows = self._thread.submit(self._window_rows, copies)

    def window_mask(self) -> TokenMask | None:
        """The mask of the window that `verify` was given: W = D. None where nothing is restricted."""
        assert self._rows is not None, "verify comes first"
        return self._mask(self._rows.result())

    def errors(self, offset: int) -> dict[int, str]:
        """Why grammars cannot be followed any further, by position in the batch, counted from `offset`."""
        pairs = zip(self.constraints, self._windows, strict=True)
        found = {offset + request: constraint.error or window.error for (request, constraint), window in pairs}
        return {request: error for request, error in found.items() if error}

    def _window_rows(self, copies: HostCopy) -> MaskRows:
        tokens, *parents = (array.tolist() for array in copies.wait())
        found: MaskRows = []
        for window, (request, _) in zip(self._windows, self.constraints, strict=True):
            paths = _paths(tokens[request], parents[0][request] if parents else range(-1, len(tokens[request]) - 1))
            found.append([window.row(path) for path in paths])
        return found

    def _mask(self, rows: MaskRows) -> TokenMask | None:
        """The rows on the device."""
        restricted = [n for n, row in enumerate(rows) if any(at is not None for at in row)]
        if not restricted:
            return None
        selected = [self.constraints[n][0] for n in restricted]
        bits = np.full((len(restricted), len(rows[0]), self._words), -1, dtype=np.int32)
        for n, row in zip(range(len(restricted)), (rows[n] for n in restricted), strict=True):
            for position, at in enumerate(row):
                if at is not None:
                    bits[n, position] = at
        index = np.zeros(self._size, dtype=np.int64)
        index[selected] = np.arange(len(selected))
        return TokenMask(self._upload(bits), self._upload(index), selected)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor


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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")

    def reset(self) -> None:
        """Forget every request."""
        self._constraints.clear()
        self._unread.clear()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def admit(self, new_rows: Sequence[RowInit]) -> None:
        """Requests took rows. A resumed one goes on behind the output it has."""
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

    def step(self, rows: Int32, size: int, wanted: Bool | None = None) -> GrammarStep | None:
        """The constrained requests among int32 [B] rows of a batch of `size`; None where there are none.

        Waits for the tokens that were committed to constrained requests before.

        Args:
            wanted: bool [B], requests for which a token is chosen in this step; None for all.
        """
        if not self._constraints:
            return None
        chosen = range(len(rows)) if wanted is None else np.flatnonzero(wanted).tolist()
        constraints = [(i, found) for i in chosen if (found := self._constraints.get(int(rows[i]))) is not None]
        if not constraints:
            return None
        while self._unread:
            self._unread.popleft().commit()
        return GrammarStep(constraints, size, self._words, self._device, self._thread)

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
