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


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer, for R request rows and windows of up to W tokens.

    Attributes:
        matrices: float32 [R, H, key_dim, value_dim], after the applied tokens.
        tail: [R, conv_width - 1, C], the convolution's inputs at the last applied tokens; zeros before the first token.
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
    """

    layers: Sequence[LayerStates]
    rows: torch.Tensor
    pending: torch.Tensor
    fresh: torch.Tensor


class StatePool:
    """Owner of the recurrent states of every linear-attention layer, by request row.

    A matrix cannot be rolled back when drafts are rejected. So a pass of up to W tokens per request, such as a window of drafts, leaves the
    matrix as it was before these tokens and stores what they would change it by: their inputs. The next pass begins where the committed
    tokens end, which says how many of them to apply first. Only longer prompt chunks, whose tokens are all committed, are applied at once.

    A pass may run again with the same start, for example eagerly after a replay: nothing is pending then, and it stores the same window.
    Row 0 is padding.

    Attributes:
        layers: the states of each layer.
        applied: int32 [R], the tokens that the matrices of a row contain.
    """

    def __init__(self, specs: Sequence[StateSpec], rows: int, window: int, device: torch.device) -> None:
        self.applied = torch.zeros(rows, dtype=torch.int32, device=device)
        self.layers = [
            LayerStates(
                zeros((rows, spec.num_heads, spec.key_dim, spec.value_dim), torch.float32, device),
                zeros((rows, spec.conv_width - 1, spec.channels), spec.dtype, device),
                zeros((rows, window, spec.channels), spec.dtype, device),
                zeros((rows, window, 2, spec.num_heads), torch.float32, device),
            )
            for spec in specs
        ]
        self._window = window

    @property
    def num_bytes(self) -> int:
        """Bytes of all states."""
        return sum(tensor.nbytes for layer in self.layers for tensor in (layer.matrices, layer.tail, layer.window, layer.gates))

    def begin(self, rows: torch.Tensor, seq_lens: torch.Tensor, qo_indptr: torch.Tensor) -> StatePass:
        """Begin a pass: find how many tokens of each row are pending, and count them as applied. Inside or outside a graph.

        Args:
            rows: int64 [B], each once, except for padding.
            seq_lens: int32 [B], the length of each request after the pass.
            qo_indptr: int32 [B + 1], offsets of each request's tokens in the pass.
        """
        counts = qo_indptr.diff()
        starts = seq_lens - counts
        pending = (starts - self.applied[rows]).clamp_(0, self._window)  # padding may begin anywhere
        fresh = starts == 0
        pending.masked_fill_(fresh, 0)
        self.applied[rows] = torch.where(counts > self._window, seq_lens, starts)
        return StatePass(self.layers, rows, pending, fresh)
