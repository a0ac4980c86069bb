"""Recurrent states of linear-attention layers, by request row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.mem_cache.zeroed import zeros


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The recurrent state of one layer for one request, as its attention declares it.

    Attributes:
        num_heads: H, the value heads; each has a matrix of key_dim x value_dim.
        key_dim, value_dim: size of a key and of a value.
        channels: C, the columns that the convolution reads.
        conv_width: tokens that the convolution reads, the current one included.
        dtype: of the convolution's inputs; the matrices are float32.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    channels: int
    conv_width: int
    dtype: torch.dtype

    @property
    def cached_bytes(self) -> int:
        """Bytes of the state of a cached prefix."""
        return 4 * self.num_heads * self.key_dim * self.value_dim + (self.conv_width - 1) * self.channels * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer, for R request rows, S cached states and windows of up to W tokens.

    Attributes:
        matrices: float32 [R + S, H, key_dim, value_dim], after the applied tokens.
        tail: [R + S, conv_width - 1, C], the convolution's inputs at the last applied tokens; zeros before the first token.
        window: [R, W, C], the convolution's inputs at the tokens of the latest window.
        gates: float32 [R, W, 2, H], of these tokens: the logarithm of the decay, and the rate of the update.
    """

    matrices: torch.Tensor
    tail: torch.Tensor
    window: torch.Tensor
    gates: torch.Tensor

    @property
    def window_width(self) -> int:
        """W."""
        return self.window.shape[1]


@dataclass(frozen=True, slots=True)
class StatePass:
    """What one pass does with the states of its B requests.

    Attributes:
        layers: the states of each layer.
        rows: int64 [B], the request rows.
        pending: int32 [B], the tokens of the row's latest window that were committed since, which the pass applies before its own.
        fresh: bool [B], whether the pass begins at the request's first token, before which the state is zero.
        kept: int32 [B], the tokens of the pass after which the state is also written to `kept_rows`: a multiple of the tokens that a
            prompt applies together; 0 for none. Nothing is pending then.
        kept_rows: int64 [B], rows of `LayerStates.matrices` and `tail` that no request has.
    """

    layers: Sequence[LayerStates]
    rows: torch.Tensor
    pending: torch.Tensor
    fresh: torch.Tensor
    kept: torch.Tensor
    kept_rows: torch.Tensor


class StatePool:
    """Owner of the recurrent states of every linear-attention layer: those of the request rows, and those of cached prefixes.

    A matrix cannot be rolled back when drafts are rejected. So a pass of up to W tokens per request, such as a window of drafts, leaves the
    matrix as it was before these tokens and stores what they would change it by: their inputs. The next pass begins where the committed
    tokens end, which says how many of them to apply first. Only longer prompt chunks, whose tokens are all committed, are applied at once.

    A pass may run again with the same start, for example eagerly after a replay: nothing is pending then, and it stores the same window.
    Row 0 is padding.

    A prompt chunk can leave a copy of the state at one of its tokens, which a later request with the same prefix begins with.

    Attributes:
        layers: the states of each layer.
        applied: int32 [R], the tokens that the matrices of a row contain.
        kept_lens: int32 [R], the number of tokens at which the row's latest prompt chunk leaves a copy of its state; 0 for none.
        kept_rows: int64 [R], where.
        cached: S.
        window_width: W.
    """

    def __init__(self, specs: Sequence[StateSpec], rows: int, window: int, device: torch.device, cached: int = 0) -> None:
        """
        Args:
            specs: of each layer, all equal.
            rows: R.
            window: W.
            cached: S, the states of cached prefixes, numbered from 0.
        """
        spec, count = specs[0], len(specs)
        assert all(each == spec for each in specs), "linear-attention layers of one model are alike"
        self.applied, self.kept_lens = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))
        self.kept_rows = torch.zeros(rows, dtype=torch.int64, device=device)
        self.cached, self.window_width, self._rows = cached, window, rows
        self._matrices = zeros((count, rows + cached, spec.num_heads, spec.key_dim, spec.value_dim), torch.float32, device)
        self._tails = zeros((count, rows + cached, spec.conv_width - 1, spec.channels), spec.dtype, device)
        windows = zeros((count, rows, window, spec.channels), spec.dtype, device)
        gates = zeros((count, rows, window, 2, spec.num_heads), torch.float32, device)
        self.layers = [LayerStates(*parts) for parts in zip(self._matrices, self._tails, windows, gates, strict=True)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all states."""
        return sum(tensor.nbytes for layer in self.layers for tensor in (layer.matrices, layer.tail, layer.window, layer.gates))

    def keep(self, rows: torch.Tensor, lens: torch.Tensor, cached: torch.Tensor) -> None:
        """Let the next prompt chunks leave copies of their states.

        Args:
            rows: int64 [n], all request rows of these chunks.
            lens: int32 [n], a number of tokens within each chunk, or at its end; 0 for no copy.
            cached: int64 [n], which cached states these become.
        """
        self.kept_lens[rows] = lens
        self.kept_rows[rows] = cached + self._rows

    def restore(self, row: int, cached: int, length: int) -> None:
        """Begin a request with a cached state, which contains `length` tokens, before its first pass."""
        self._matrices[:, row].copy_(self._matrices[:, self._rows + cached])
        self._tails[:, row].copy_(self._tails[:, self._rows + cached])
        self.applied[row].fill_(length)

    def begin(self, rows: torch.Tensor, seq_lens: torch.Tensor, qo_indptr: torch.Tensor) -> StatePass:
        """Begin a pass: find how many tokens of each row are pending, and count them as applied. Inside or outside a graph.

        Args:
            rows: int64 [B], each once, except for padding.
            seq_lens: int32 [B], the length of each request after the pass.
            qo_indptr: int32 [B + 1], offsets of each request's tokens in the pass.
        """
        counts = qo_indptr.diff()
        starts = seq_lens - counts
        pending = (starts - self.applied[rows]).clamp_(0, self.window_width)  # padding may begin anywhere
        fresh = starts == 0
        pending.masked_fill_(fresh, 0)
        kept = self.kept_lens[rows] - starts
        kept.masked_fill_((kept < 0) | (kept > counts), 0)
        self.applied[rows] = torch.where(counts > self.window_width, seq_lens, starts)
        return StatePass(self.layers, rows, pending, fresh, kept, self.kept_rows[rows])
