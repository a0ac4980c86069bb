"""Ragged windows: the windows of an iteration whose requests have different numbers of drafts.

The target runs over T tokens, the sum of the widths, instead of B * D. Its states are scattered into windows of full width before the LM
head, so acceptance and the drafter see the usual shapes. Drafts beyond a request's width are not verified and never accepted
(`Iteration.caps`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runtime.batch import Int32
from runtime.layers.forward_batch import ForwardBatch

Upload = Callable[..., list[torch.Tensor]]
"""The type of `StagingRing.upload`."""


@dataclass(frozen=True, slots=True)
class RaggedWindows:
    """Widths of B windows, including padding, of at most D tokens each.

    Attributes:
        host: int32 [B], the widths.
        widths: int32 [B], on the device.
        offsets: int32 [B + 1], where each window begins among the T tokens.
        full_index: int64 [T], the index of each token in full windows [B * D].
        ragged_index: int64 [B, D], the index among the T tokens of each position of a full window; beyond a window's width, that of its
            last token.
    """

    host: Int32
    widths: torch.Tensor
    offsets: torch.Tensor
    full_index: torch.Tensor
    ragged_index: torch.Tensor

    @classmethod
    def of(cls, widths: Int32, D: int, upload: Upload) -> RaggedWindows:
        """Make the windows of these widths, int32 [B], each in 1..D, with one upload."""
        offsets = np.concatenate([np.zeros(1, dtype=np.int32), widths.cumsum(dtype=np.int32)])
        columns = np.arange(D, dtype=np.int32)
        full_index = np.flatnonzero(columns < widths[:, None])
        ragged_index = (offsets[:-1, None] + np.minimum(columns, widths[:, None] - 1)).flatten().astype(np.int64)
        widths_d, offsets_d, full_index_d, ragged_index_d = upload(widths, offsets, full_index, ragged_index)
        return cls(widths, widths_d, offsets_d, full_index_d, ragged_index_d.view(-1, D))

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.host.sum())

    def fill(self, batch: ForwardBatch, full: ForwardBatch, kv_lens: torch.Tensor, bounds: Int32) -> None:
        """Fill a ragged batch in place from full windows, which may share its buffers. Outside any graph.

        Args:
            batch: B requests, T tokens.
            full: B windows of D tokens, filled.
            kv_lens: int32 [B], KV lengths before the pass.
            bounds: int32 [B], on the host, upper bounds of `kv_lens`.
        """
        assert batch.extend_lens is not None
        batch.input_ids.copy_(full.input_ids[self.full_index])
        batch.positions.copy_(full.positions[self.full_index])
        batch.out_cache_loc.copy_(full.out_cache_loc[self.full_index])
        torch.add(kv_lens, self.widths, out=batch.seq_lens)
        batch.qo_indptr.copy_(self.offsets)
        batch.extend_lens[:] = self.host
        batch.seq_len_bounds[:] = bounds + self.host


def mean_widths(depth: int) -> Sequence[int]:
    """Mean widths of the ragged passes that have graphs: about half and three quarters of D = `depth` + 1."""
    return sorted({(depth + 1) // 2, 3 * (depth + 1) // 4} - {0, 1})
