"""The second GEMM of a sparse MLP for few tokens, with the sum over each token's experts, in CUDA C++ (`down_sums.cu`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from runtime.config.expert_tuning import WeightFormat
from runtime.layers.gemm.deferred_norm import DeferredNorm, deferred_buffers
from runtime.layers.kernels import cuda_driver, fragments
from runtime.layers.kernels.fragments import FORMATS
from runtime.layers.kernels.stages import STAGE_COLUMNS, STAGES, TOKEN_PADDING, stage_bytes
from runtime.layers.moe.kernels.expert_weights import ExpertWeights
from runtime.layers.moe.kernels.routing_argument import RoutingArgument

MOST_PAIRS = 32
"""Maximum pairs of token and expert: a warp keeps them in registers."""
MOST_TOKENS = 8
DEPTH = 3
"""Stages per warp for weights. With one token, a block fits on an SM together with a block of the preceding GEMM, except for MXFP4."""
ROWS = 16
"""Columns of the output in a tile."""
PASS = 4
"""Tokens of an expert that are multiplied together."""
TOKEN_BYTES = {kind: 2 * columns + TOKEN_PADDING[kind] for kind, columns in STAGE_COLUMNS.items()}
"""Bytes per token in a stage."""
SHARED_BYTES = 226 << 10
"""Shared memory per SM for all its blocks."""
REGISTERS = 1 << 16
"""Registers per SM."""
GEMM_REGISTERS = {"dense": 256 * 88, "fp8": 256 * 88, "mxfp4": 256 * 120, "int4": 256 * 112}
"""Registers per block of the preceding GEMM, for up to 8 tokens; for one token in MXFP4 that block fills its SM."""
LEAST_REGISTERS = 80
"""Registers per thread below which this kernel spills, by the compiler for Hopper, the only architecture that runs it."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """How the output is tiled: a cluster of `blocks` blocks of `warps` warps computes `tiles` tiles."""

    warps: int
    tiles: int
    blocks: int


CUTS = (_Cut(16, 1, 1), _Cut(12, 3, 2))
"""One tile per block, or one and a half if the columns need more blocks than a device runs concurrently."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """The compile-time parameters of the kernel."""

    format: WeightFormat
    group: int
    even: bool
    top_k: int
    bias: bool
    add: bool
    deferred: bool
    float_out: bool
    early: bool
    cut: _Cut


def supports(down: ExpertWeights, tokens: int, top_k: int) -> bool:
    """Whether the kernel supports this many tokens and these weights, which `experts_by_fragments` supports on their device."""
    fits = ring_bytes(CUTS[0].warps, down.format, down.group, tokens) <= SHARED_BYTES  # not with many scales per stage and many tokens
    return down.shape[1] % ROWS == 0 and tokens <= MOST_TOKENS and tokens * top_k <= MOST_PAIRS and fits


def is_faster(weights: WeightFormat, tokens: int) -> bool:
    """Whether this kernel is faster than a GEMM over pairs and a sum, as measured: with several tokens, it may convert weights twice."""
    return weights not in ("mxfp4", "int4") or tokens == 1


def down_sums(
    h: torch.Tensor,
    down: ExpertWeights,
    routing: RoutingArgument,
    top_k: int,
    out: torch.Tensor,
    *,
    add: bool = False,
    deferred: DeferredNorm | None = None,
    pdl: bool = False,
) -> None:
    """`out[t] (+)= sum(down @ h[pair])` over the pairs of each token that this process computed, and their biases times their weights.

    Args:
        h: bfloat16 [T * top_k, inner], each row times the weight of its pair.
        down: weights that the kernel `supports`.
        out: [T, hidden] contiguous, float32 or bfloat16.
        add: add to `out` instead of overwriting it.
        deferred: additional outputs for the norm that reads `out` next; `squares` has hidden / 16 columns.
        pdl: as in `triton_gemm`; the preceding kernel must have read the routing after its wait.
    """
    (_, hidden, inner), tokens = down.shape, len(out)
    cut = best_cut(hidden, torch.cuda.get_device_properties(out.device).multi_processor_count)
    even, float_out = inner % STAGE_COLUMNS[down.format] == 0, out.dtype is torch.float32
    variant = _Variant(down.format, down.group, even, top_k, down.bias is not None, add, deferred is not None, float_out, pdl, cut)
    weights = fragments.weights_argument(down.weight, down.scale, down.bias, (hidden, inner), down.scale_layout)
    arguments = (h, weights, routing, out, *deferred_buffers(deferred), tokens)
    _kernel(variant, ring_bytes(cut.warps, down.format, down.group, tokens))(hidden // (ROWS * cut.tiles) * cut.blocks, arguments, pdl)


def best_cut(hidden: int, multiprocessors: int) -> _Cut:
    """The cut that minimises the work of the busiest SM."""

    def most_tiles(cut: _Cut) -> float:
        return -(-hidden // (ROWS * cut.tiles) * cut.blocks // multiprocessors) * cut.tiles / cut.blocks

    return min((cut for cut in CUTS if hidden % (ROWS * cut.tiles) == 0), key=most_tiles)


def ring_bytes(warps: int, weights: WeightFormat, group: int, tokens: int) -> int:
    """Bytes of shared memory per block: the stages of its warps. `group`: columns of an int4 group."""
    return warps * DEPTH * (stage_bytes(weights, group) + min(tokens, PASS) * TOKEN_BYTES[weights])


@cache
def _kernel(variant: _Variant, size: int) -> cuda_driver.Kernel:
    cut = variant.cut
    return cuda_driver.compile_kernel(source(variant), "down_sums", threads=32 * cut.warps, cluster=cut.blocks, shared_bytes=size)


def registers(weights: WeightFormat, warps: int) -> int:
    """Maximum registers per thread: those that a block of the preceding GEMM leaves free on its SM, if they are enough."""
    return max(LEAST_REGISTERS, (REGISTERS - GEMM_REGISTERS[weights]) // (32 * warps) // 8 * 8)


def source(variant: _Variant) -> str:
    """The CUDA program of one variant."""
    v = variant
    constants = dict(
        FORMAT=FORMATS[v.format], ACT=0, EARLY=v.early, EVEN=v.even, TOP_K=v.top_k, WARPS=v.cut.warps, DEPTH=DEPTH,
        TILES=v.cut.tiles, BLOCKS=v.cut.blocks, REGISTERS=registers(v.format, v.cut.warps), ADD=v.add, DEFER=v.deferred,
        FLOAT_OUT=v.float_out, BIAS=v.bias, **({"GROUP": v.group} if v.group else {}),
    )  # fmt: skip
    return fragments.source(Path(__file__).with_name("down_sums.cu"), constants, STAGES)
