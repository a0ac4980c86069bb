"""The location of each request's keys, or latent rows, and of its queries, for kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.layers.attention.kernels.split_schedule import WorkSchedule


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """Location of the keys of each request. Tensors are on the device.

    Attributes:
        pages: int32 [rows, max_pages], the page table.
        rows: int32 [B], the row of `pages` of each request.
        seq_lens: int32 [B], keys of each request.
        page_size: slots of a page.
        schedule: the shares of each program, for scheduled split-KV attention; else None.
    """

    pages: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    page_size: int
    schedule: WorkSchedule | None = None


@dataclass(frozen=True, slots=True)
class CausalQueries:
    """The queries of a causal pass. Tensors are on the device.

    Attributes:
        cu_seqlens: int32 [B + 1], cumulative query counts.
        most: maximum queries of a request.
    """

    cu_seqlens: torch.Tensor
    most: int

    @classmethod
    def uniform(cls, requests: int, width: int, device: torch.device) -> CausalQueries:
        """`width` queries of each request."""
        return cls(torch.arange(requests + 1, dtype=torch.int32, device=device) * width, width)
