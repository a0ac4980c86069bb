"""Routing for few tokens in CUDA C++: a cluster of blocks prefetches the router's weights before the tokens are ready (`route_few.cu`)."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from runtime.layers.gemm.deferred_norm import RowScale, norms_argument
from runtime.layers.kernels import cuda_driver, fragments
from runtime.layers.moe.router import Router, Routing

MOST_TOKENS, MOST_SCORES = 512, 1 << 16
"""Maximum tokens, and maximum tokens times experts, because each cluster reads all of the router's weights."""
PASS = 8
"""Maximum tokens per cluster; there are kernels with shared memory for 1, 2, 4 and 8."""
MOST_EXPERTS = 512
MOST_CHOSEN = 32
"""Maximum experts per token: one per lane of the selecting warp."""
WARPS = 8
"""Warps per block."""
MOST_BLOCKS = 8
"""Maximum blocks per cluster on any GPU with clusters."""
COLUMNS = 4 * fragments.COLUMNS["dense"]
"""Columns per chunk."""
MOST_IN_REGISTERS = 8
"""Maximum chunks of 16 experts that a warp keeps in registers, eight per lane each; more are kept in shared memory."""
MOST_IN_RING = 12
"""Maximum chunks of a ring: 96 KiB per block."""
CHUNK_BYTES = 16 * 2 * COLUMNS
MOST_ROUND = 8
"""Maximum chunks of a token that a warp processes at once: half as many with more than two tiles, whose sums need the registers."""
SCORINGS = ("softmax", "sigmoid", "topk_softmax")


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a cluster splits a router: the constants of the same names in the CUDA source."""

    cluster: int
    parts: int
    own: int
    share: int
    held: int
    ring: bool
    round: int
    token_bytes: int

    def shared_bytes(self, tokens: int) -> int:
        """Bytes of shared memory per block, for this many tokens per cluster."""
        return WARPS * (self.ring * self.held * self.own * CHUNK_BYTES + tokens * self.token_bytes)


@dataclass(frozen=True, slots=True)
class _Variant:
    """The compile-time parameters of a program."""

    experts: int
    columns: int
    top_k: int
    shared: int
    scoring: int
    renormalize: bool
    bias: bool
    correction: bool
    norm: bool
    early: bool


def supports(x: torch.Tensor, router: Router) -> bool:
    """Whether the kernel can route these rows on their device: few rows in bfloat16, by a rule without groups."""
    weight, rule, bias, correction_bias = router.weight, router.rule, router.bias, router.correction_bias
    return (
        x.is_cuda
        and 0 < len(x) <= MOST_TOKENS
        and len(x) * weight.shape[0] <= MOST_SCORES
        and x.dtype is weight.dtype is torch.bfloat16
        and (bias is None or bias.dtype is torch.bfloat16)
        and (correction_bias is None or correction_bias.dtype is torch.float32)
        and x.is_contiguous()
        and weight.is_contiguous()
        and x.shape[1] % 16 == 0
        and rule.num_groups == 1
        and rule.top_k <= weight.shape[0]
        and rule.chosen <= MOST_CHOSEN
        and weight.shape[0] <= MOST_EXPERTS
        and cuda_driver.on_hopper(x)
    )


def route_few(
    x: torch.Tensor, router: Router, routed: Routing, *, norm: RowScale | None = None, normed: torch.Tensor | None = None, pdl: bool = False
) -> Routing:
    """Like `route`, for arguments that the kernel `supports`; fills and returns `routed`.

    A row's result depends only on its own row; the order of summation depends only on the router's shape.
    """
    T, (E, K), rule = len(x), router.weight.shape, router.rule
    scoring, biased, corrected = SCORINGS.index(rule.scoring), router.bias is not None, router.correction_bias is not None
    variant = _Variant(E, K, rule.top_k, rule.shared, scoring, rule.renormalize, biased, corrected, norm is not None, pdl)
    cluster, kernels = _kernels(variant)
    inputs = x, router.weight, router.bias, router.correction_bias, norms_argument(norm, None)
    outputs = normed, routed.ids, routed.weights, routed.masks
    kernels[(min(T, PASS) - 1).bit_length()](-(-T // PASS) * cluster, (*inputs, *outputs, T, ctypes.c_float(rule.scaling)), pdl)
    return routed


@cache
def _kernels(variant: _Variant) -> tuple[int, tuple[cuda_driver.Kernel, ...]]:
    """Blocks per cluster, and the kernels for up to 1, 2, 4 and 8 tokens: one program with different amounts of shared memory."""
    cut, text = _cut(variant.experts, variant.columns), source(variant)
    sizes = map(cut.shared_bytes, (1, 2, 4, PASS))
    compiled = (cuda_driver.compile_kernel(text, "route_few", threads=32 * WARPS, cluster=cut.cluster, shared_bytes=size) for size in sizes)
    return cut.cluster, tuple(compiled)


def _cut(experts: int, columns: int) -> _Cut:
    """The cut for this router: with few experts, several blocks split their columns; with many, each block has several tiles of 16."""
    tiles = -(-experts // 16)
    own = -(-tiles // MOST_BLOCKS)
    parts = max(1, MOST_BLOCKS >> (tiles - 1).bit_length())
    share = -(-columns // (COLUMNS * parts * WARPS))
    ring = share * own > MOST_IN_REGISTERS
    together = min(share, MOST_ROUND if own <= 2 else MOST_ROUND // 2)
    tokens, sums = 64 * (together | 1), 4 * (16 * own + 4)
    held = min(share, MOST_IN_RING // own) if ring else share
    return _Cut(-(-tiles // own) * parts, parts, own, share, held, ring, together, max(tokens, sums))


def source(variant: _Variant) -> str:
    """The CUDA program of a variant."""
    constants = {**asdict(variant), **asdict(_cut(variant.experts, variant.columns)), "warps": WARPS, "format": 0, "act": 0}
    upper = {name.upper(): value for name, value in constants.items()}
    return fragments.source(Path(__file__).with_name("route_few.cu"), upper)
