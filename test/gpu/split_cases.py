"""Shared by the tests of split attention: requests over a paged cache, their definition, and a config for each kernel."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch

from runtime.config.kernel_configs import ClusterConfig, SplitConfig
from runtime.layers.attention.kernels import cluster_decode
from runtime.layers.attention.kernels.paged_keys import PagedKeys
from runtime.layers.attention.kernels.split_decode import SplitWorkspace, split_attention
from runtime.layers.attention.kernels.split_shape import SplitShape

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
MARKS = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")]
DTYPE = torch.float16
"""A dtype that both the interpreter and a GPU support."""
BF16 = torch.bfloat16
"""The dtype of the cluster kernel."""
SMALL = SplitConfig(tile=16, num_warps=4, stages=2, programs_per_sm=1, max_partial_rows=256, alone=2)
SCHEDULED = replace(SMALL, scheduled=True)
WHOLE = replace(SMALL, whole=True)
CLUSTER = replace(SMALL, cluster=ClusterConfig(warps=8, stages=2, largest=8))
NEEDS_HOPPER = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
KERNELS = [pytest.param(SMALL, id="triton"), pytest.param(CLUSTER, id="cluster", marks=NEEDS_HOPPER)]
"""A config for each kernel of static splits."""


@dataclass
class Case:
    shape: SplitShape
    keys: PagedKeys
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    workspace: SplitWorkspace
    kv_scales: torch.Tensor | None = None

    def run(
        self, causal: bool = True, window: int = -1, lse: torch.Tensor | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the kernel. With a cluster config, also check that Triton's workspace is not written."""
        in_cluster = self.q.dtype is BF16 and self.shape.config.cluster is not None and lse is None
        if in_cluster:
            assert cluster_decode.supports(self.shape, self.keys.page_size, self.q, self.k, sinks)
            self.workspace.out.fill_(float("nan"))
        out = self.attend(causal=causal, window=window, lse=lse, sinks=sinks)
        assert not in_cluster or self.workspace.out.isnan().all(), "one kernel, without partial results in memory"
        return out

    def attend(
        self,
        causal: bool = True,
        window: int = -1,
        lse: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> torch.Tensor:
        """Call the kernel."""
        return split_attention(
            self.q, self.k, self.v, self.keys, self.shape, self.workspace, self.shape.head_dim**-0.5, causal=causal, window=window,
            sinks=sinks, lse=lse, kv_scales=self.kv_scales, pdl=pdl,
        )  # fmt: skip

    def in_8_bits(self) -> Case:
        """The same keys and values, divided by scales and stored in e4m3."""
        scales = torch.tensor([0.25, 2.0], device=DEVICE)
        k, v = ((cache.float() / scale).to(torch.float8_e4m3fn) for cache, scale in zip((self.k, self.v), scales, strict=True))
        return replace(self, k=k, v=v, kv_scales=scales)


def make_case(
    lens: list[int],
    width: int,
    page_size: int,
    heads: tuple[int, int, int] = (4, 2, 64),
    sms: int = 40,
    config: SplitConfig = SMALL,
) -> Case:
    """Requests of these lengths over a shuffled page table. Slots after a request's end are NaN, so that reading them is detected.

    The dtype is bfloat16 if the config is for clusters, otherwise float16.
    """
    torch.manual_seed(sum(lens) + width)
    (H, G, D), B, dtype = heads, len(lens), DTYPE if config.cluster is None else BF16
    cols = -(-max(lens) // page_size) + 1
    pages = torch.zeros((B + 1, cols), dtype=torch.int32)
    pages[1:] = (torch.randperm(B * cols) + 1).view(B, cols).int()
    k, v = (torch.randn((B * cols + 1, page_size, G, D), device=DEVICE) for _ in range(2))
    for b, length in enumerate(lens):
        positions = torch.arange(length, cols * page_size)
        for cache in (k, v):
            cache[pages[b + 1, positions // page_size].long(), positions % page_size] = float("nan")
    shape = SplitShape(B, width, H, G, D, sms, config)
    ints = {"dtype": torch.int32, "device": DEVICE}
    schedule = shape.empty_schedule(DEVICE)
    keys = PagedKeys(pages.to(DEVICE), torch.arange(1, B + 1, **ints), torch.tensor(lens, **ints), page_size, schedule)
    shape.fill_schedule(keys.seq_lens, schedule)
    q = torch.randn((B * width, H, D)).to(DEVICE, dtype)
    return Case(shape, keys, q, k.to(dtype), v.to(dtype), SplitWorkspace([shape], DEVICE))
