"""The adapter to private parts of FlashInfer's paged prefill wrapper.

It is written for one version, which `check_version` asserts and pyproject.toml pins. It does what the public interface does not offer:
stages plans in our own pinned buffers, calls the planner for later plans without the wrapper's copies, and lets a kernel trim the plan on
the device.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

from runtime.errors import ConfigError
from runtime.layers.attention.kernels.flashinfer_plan import PageLists, WorkItems
from runtime.layers.attention.pinned_ring import PinnedRing

PACKAGE, VERSION = "flashinfer-python", "0.6.15.post1"


def check_version() -> None:
    """Raise `ConfigError` if another version of FlashInfer is installed."""
    try:
        found = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        found = "of an unknown version"
    if found != VERSION:
        raise ConfigError(
            f"Attention backend flashinfer needs {PACKAGE} {VERSION}; the installed one is {found}. Install it with pip install "
            f"{PACKAGE}=={VERSION}, or use another --attention-backend."
        )


def offsets(counts: np.ndarray) -> torch.Tensor:
    """int32 [B + 1] on the host: cumulative counts."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))


@dataclass(frozen=True, slots=True)
class PrefillLayout:
    """The sizes, and the scale and soft cap of scores (0 for none), that all passes of a backend share."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    softcap: float
    dtype: torch.dtype


class EagerPrefill:
    """Causal ragged passes with one window, replanned each time. Outside any graph."""

    def __init__(self, layout: PrefillLayout, workspace: torch.Tensor, window: int) -> None:
        self._layout, self._window = layout, window
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")

    @property
    def plan_bytes(self) -> int:
        """Bytes of the staging buffer of a plan."""
        return self._wrapper._pin_memory_int_workspace_buffer.numel()

    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, ring: PinnedRing
    ) -> None:
        """Plan from host offsets int32 [B + 1], pages on the device, and keys on each last page int32 [B]."""
        # The wrapper has one pinned staging buffer, but prompts are planned one step ahead: the device may not have read the previous plan
        # yet.
        self._wrapper._pin_memory_int_workspace_buffer, uploaded = ring.take()
        _plan(self._wrapper, self._layout, (qo_indptr, kv_indptr, indices, last_page_len), True, self._window)
        uploaded.record()

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        """Attend. q and out [T, H, head_dim]; kv [num_pages, page_size, G, head_dim] each."""
        self._wrapper.run(q, kv, out=out)


class FixedPrefill:
    """Passes of one size and width with one window, over buffers that a captured graph reads.

    Attributes:
        lists: the pages of each request.
        window: number of keys before its own that a query sees; -1 for all.
    """

    def __init__(
        self, layout: PrefillLayout, workspace: torch.Tensor, lists: PageLists, width: int, causal: bool, window: int, plan_bytes: int
    ) -> None:
        """`plan_bytes`: bytes of the planner's integers for this size."""
        B, device = len(lists.last_page_len), workspace.device
        self.lists, self.window = lists, window
        self._layout, self._causal = layout, causal
        self._qo_indptr = torch.arange(B + 1, dtype=torch.int32) * width
        self._kv_lens = torch.ones(B, dtype=torch.int32)  # for the fa3 planner; fa2's reads the page offsets
        self._module: Any = None
        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=True, backend="fa2", qo_indptr_buf=torch.zeros(B + 1, dtype=torch.int32, device=device),
            paged_kv_indptr_buf=lists.indptr, paged_kv_indices_buf=lists.indices, paged_kv_last_page_len_buf=lists.last_page_len,
        )  # fmt: skip
        # The wrapper's own buffers take 8 MiB each, per size; a fixed-width plan needs kilobytes.
        wrapper._int_workspace_buffer = torch.zeros(plan_bytes, dtype=torch.uint8, device=device)
        wrapper._pin_memory_int_workspace_buffer = torch.empty(plan_bytes, dtype=torch.uint8, pin_memory=True)
        wrapper._kv_lens_buffer = torch.empty(B, dtype=torch.int32, device=device)
        self._wrapper = wrapper

    def plan(self, offsets: torch.Tensor, ring: PinnedRing) -> WorkItems:
        """Plan from host page offsets int32 [B + 1]. The first plan finds the module that later plans call."""
        module = self._module = self._module or self._plan_first(offsets)
        layout, wrapper, B = self._layout, self._wrapper, len(offsets) - 1
        pinned, uploaded = ring.take()
        info = module.plan(
            wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, pinned, self._qo_indptr, offsets, self._kv_lens,
            int(self._qo_indptr[-1]), B, layout.num_q_heads, layout.num_kv_heads, layout.page_size, True, layout.head_dim,
            layout.head_dim, self._causal, self.window, -1, False, 0,
        )  # fmt: skip
        uploaded.record()
        wrapper._plan_info = info
        return work_items(list(info), pinned, wrapper._int_workspace_buffer)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        """Attend. q and out [B * width, H, head_dim]."""
        self._wrapper.run(q, kv, out=out)

    def run_with_lse(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """Attend, and return the base-2 log-sum-exp of the scores, float32 [B * width, H]."""
        return self._wrapper.run(q, kv, out=out, return_lse=True)[1]

    def _plan_first(self, offsets: torch.Tensor) -> Any:
        """Plan through the wrapper; returns the compiled module that it has chosen."""
        pages = self.lists.indices[: min(int(offsets[-1]), self.lists.indices.numel())]
        ones = torch.ones(len(offsets) - 1, dtype=torch.int32)
        _plan(self._wrapper, self._layout, (self._qo_indptr, offsets, pages, ones), self._causal, self.window)
        return self._wrapper._cached_module


def _plan(
    wrapper: BatchPrefillWithPagedKVCacheWrapper, layout: PrefillLayout, where: tuple[torch.Tensor, ...], causal: bool, window: int
) -> None:
    """Plan through the wrapper. `where`: query offsets, page offsets, pages, and keys on each last page."""
    wrapper.plan(
        *where, layout.num_q_heads, layout.num_kv_heads, layout.head_dim, layout.page_size, causal=causal, sm_scale=layout.scale,
        window_left=window, logits_soft_cap=layout.softcap, q_data_type=layout.dtype, kv_data_type=layout.dtype,
    )  # fmt: skip


def work_items(info: Sequence[int], staged: torch.Tensor, workspace: torch.Tensor) -> WorkItems:
    """Find the work items of a plan in the planner's integer workspace.

    Source: `PrefillPlanInfo` and `PrefillPlanImpl` of flashinfer 0.6.15, attention/scheduler.cuh.

    Args:
        info: the fields of `PrefillPlanInfo`, in order.
        staged: uint8 on the host, the staging buffer that was uploaded.
        workspace: uint8 on the device, its copy.
    """
    words, count = workspace.view(torch.int32), info[0]
    return WorkItems(
        requests=words[info[4] // 4 :],
        chunks=words[info[6] // 4 :],
        merge_indptr=words[info[7] // 4 :],
        out_indptr=words[info[8] // 4 :],
        chunk_size=words[info[9] // 4 :],
        valid=workspace[info[12] :],
        count=count,
        planned=int(staged[info[12] : info[12] + count].count_nonzero()),
        tile=info[3],
    )
