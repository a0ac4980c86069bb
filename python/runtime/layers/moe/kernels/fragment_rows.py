"""Experts for few tokens in CUDA C++: weights go straight from memory into tensor-core fragments (`few_rows.cu`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from runtime.layers.gemm.deferred_norm import DeferredNorm
from runtime.layers.kernels import cuda_driver, fragments
from runtime.layers.kernels.fragments import FORMATS, readable, weights_argument
from runtime.layers.kernels.stages import INT4_COLUMNS, STAGE_COLUMNS, STAGES, TOKEN_PADDING, stage_bytes
from runtime.layers.moe.kernels.down_sums import SHARED_BYTES, down_sums
from runtime.layers.moe.kernels.down_sums import is_faster as sums_are_faster
from runtime.layers.moe.kernels.down_sums import supports as sums_supported
from runtime.layers.moe.kernels.expert_pass import ExpertPass
from runtime.layers.moe.kernels.expert_weights import ExpertWeights
from runtime.layers.moe.kernels.pair_sums import SQUARE_COLUMNS, pair_sums
from runtime.layers.moe.kernels.routing_argument import RoutingArgument, routing_argument

MOST_TOKENS = 256
SMALL_PAIRS = 32
"""Maximum pairs of token and expert that a GEMM warp keeps in registers."""
SCALE_COPY = 8
"""Bytes of MXFP4 scales that a lane copies at once; the size of a tensor must be a multiple."""
MOST_TOP_K = 16
"""Maximum experts per token, because the list of pairs must fit shared memory that sums reuse later."""
SEGMENTS = 12
"""Maximum sets of tokens per block: its cost is up to 5 / 4 of that of `SEGMENTS - 4` passes, and it may share two more with its
neighbours."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """The division of a GEMM into blocks.

    Attributes:
        warps: warps per block.
        blocks: blocks per SM, with 16 warps in total.
        tiles: tiles of eight tokens per work unit.
        depth: stages of a warp's ring of weights.
    """

    warps: int
    blocks: int
    tiles: int
    depth: int


TILE_TOKENS = 8
_ONE_TILE = (_Cut(16, 1, 1, 4), _Cut(16, 1, 1, 3), _Cut(16, 1, 1, 2))
_FEW, _MANY = (_Cut(8, 2, 1, 4), *_ONE_TILE), (_Cut(16, 1, 2, 4), _Cut(16, 1, 2, 3), *_ONE_TILE)
"""Configurations for up to eight tokens, and for more: the best first, then configurations with less shared memory."""


@dataclass(frozen=True, slots=True)
class _Gemm:
    """The compile-time parameters of one of the GEMMs."""

    rows: int
    columns: int
    format: int
    group: int
    act: int
    top_k: int
    experts: int
    gated: bool
    bias: bool
    even: bool
    small: bool
    shared: bool
    cut: _Cut
    early: bool

    @property
    def tokens(self) -> int:
        """Maximum tokens: configurations with few warps are for few tokens."""
        return TILE_TOKENS if self.cut.warps < 16 else MOST_TOKENS


def supports(x: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights, top_k: int, deferred: DeferredNorm | None = None) -> bool:
    """Whether the kernels support these rows with `top_k` experts each on their device, and these buffers."""
    (E, rows, hidden), (_, _, inner) = gate_up.shape, down.shape
    return (
        x.is_cuda
        and (deferred is None or deferred.squares.shape[1] == hidden // SQUARE_COLUMNS)
        and x.dtype is torch.bfloat16
        and 0 < len(x) <= MOST_TOKENS
        and top_k <= MOST_TOP_K
        and hidden % 16 == 0
        and inner % 8 == 0
        and rows == 2 * inner
        and E <= 512
        and all(_readable(w, len(x)) for w in (gate_up, down))
        and cuda_driver.on_hopper(x)
    )


def experts_by_fragments(experts: ExpertPass, *, add: bool = False, deferred: DeferredNorm | None = None) -> torch.Tensor:
    """Like `experts_in_triton`, for arguments that the kernels `supports`; `deferred.squares` has hidden / 16 columns.

    The order of sums depends only on the shapes and the routing of all tokens. Int4 weights are rounded to float16; those beyond its
    largest number, 65504, become infinite.
    """
    x, _, down, routing, _, out, first, pdl, shared, _ = experts
    (T, hidden), (E, _, inner), top_k = x.shape, down.shape, routing.ids.shape[1]
    assert not shared or first == 0, "a shared expert is stacked with all others"
    h = torch.empty((T * top_k, inner), dtype=x.dtype, device=x.device)
    routed = routing_argument(routing, first, E)
    _gemm(experts, routed, x, h, gated=True)
    if sums_supported(down, T, top_k) and sums_are_faster(down.format, T):
        down_sums(h, down, routed, top_k, out, add=add, deferred=deferred, pdl=pdl)
        return out
    y = torch.empty((T * top_k, hidden), dtype=torch.float32, device=x.device)
    _gemm(experts, routed, h, y, gated=False)
    return pair_sums(y, routed, top_k, out, add=add, deferred=deferred, pdl=pdl)


def _gemm(experts: ExpertPass, routed: RoutingArgument, x: torch.Tensor, out: torch.Tensor, *, gated: bool) -> None:
    """Launch one of the GEMMs. The second one starts before the first has ended, and reads the routing immediately."""
    w, act, T, top_k = experts.gate_up if gated else experts.down, experts.act, len(experts.x), experts.routed.ids.shape[1]
    E, rows, columns = w.shape
    cut, pairs = _cut(w, T), T * top_k
    assert cut is not None, f"{columns} columns are too many"
    assert top_k <= MOST_TOP_K, f"expected at most {MOST_TOP_K} experts of a token; got {top_k}"
    blocks = cut.blocks * torch.cuda.get_device_properties(x.device).multi_processor_count
    assert min(E, pairs) + pairs // (TILE_TOKENS * cut.tiles) <= (SEGMENTS - 4) * blocks, f"{E} experts are too many"
    small, even = pairs <= SMALL_PAIRS and TILE_TOKENS * cut.tiles >= T, columns % STAGE_COLUMNS[w.format] == 0
    act_kind, bias, shared, pdl = act.kind if gated else 0, w.bias is not None, gated and small and experts.shared, experts.pdl
    padded, kind = -(-E // 32) * 32, FORMATS[w.format]
    variant = _Gemm(rows, columns, kind, w.group, act_kind, top_k, padded, gated, bias, even, small, shared, cut, pdl)
    kernel = _gemm_kernel(variant, _shared_bytes(w, cut, T))
    hit = E * (1 - (1 - top_k / max(E, top_k)) ** T)  # expected number of experts if tokens choose at random
    split = _split(-(-hit * rows // 16 // blocks), -(-columns // STAGE_COLUMNS[w.format]), cut.warps)
    arguments = weights_argument(w.weight, w.scale, w.bias, (rows, columns), w.scale_layout)
    kernel(blocks, (x, arguments, routed, out, T, split, _stride(w), ctypes.c_float(act.alpha), ctypes.c_float(act.limit)), pdl)


def _readable(w: ExpertWeights, T: int) -> bool:
    """Whether these weights, scales and biases have sizes that lanes can copy, for this many tokens."""
    columns = w.scale_layout[3]
    scales = w.format != "fp8" or columns % 128 == 0
    if w.format == "mxfp4":
        scales = w.scale is not None and w.scale.data_ptr() % SCALE_COPY == 0 and w.scale.is_contiguous()
    if w.format == "int4":
        aligned = w.scale is not None and w.scale.data_ptr() % 16 == 0 and w.scale.is_contiguous()
        scales = aligned and w.group <= INT4_COLUMNS and w.shape[2] % INT4_COLUMNS == 0
    biases = w.bias is None or w.bias.data_ptr() % 16 == 0
    return scales and biases and readable(w.weight, w.format, w.shape[2], columns) and _cut(w, T) is not None


def _cut(w: ExpertWeights, T: int) -> _Cut | None:
    """The best configuration whose blocks fit on an SM; None if none does. MXFP4 for one token is faster in one block than in two; int4 is
    assumed to be too.
    """
    for cut in _MANY if T > TILE_TOKENS else _ONE_TILE if w.format in ("mxfp4", "int4") and T == 1 else _FEW:
        fixed = (512 * cut.tiles + 32 * cut.depth) * cut.warps + 4 * w.shape[0] + 2560
        if _shared_bytes(w, cut, T) + fixed <= SHARED_BYTES // cut.blocks:
            return cut
    return None


def _split(units: float, stages: int, warps: int) -> int:
    """Warps per work unit, for this many units per block and stages per unit. Splitting a unit costs about one stage."""
    return min((n for n in (1, 2, 4, 8, 16) if n <= warps), key=lambda n: -(-units // (warps // n)) * (-(-stages // n) + (n > 1)))


def _stride(w: ExpertWeights) -> int:
    """Bytes from one token to the next in shared memory."""
    size = -(-w.shape[2] // STAGE_COLUMNS[w.format]) * 2 * STAGE_COLUMNS[w.format]  # rounded up to whole stages
    return size + (TOKEN_PADDING[w.format] - size) % 128


def _shared_bytes(w: ExpertWeights, cut: _Cut, T: int) -> int:
    """Bytes of shared memory per block: rings and tokens."""
    tokens = 2 * TILE_TOKENS if cut.tiles == 2 else min(T, TILE_TOKENS)
    return cut.warps * cut.depth * stage_bytes(w.format, w.group) + tokens * _stride(w)


@cache
def _gemm_kernel(variant: _Gemm, shared_bytes: int) -> cuda_driver.Kernel:
    threads = 32 * variant.cut.warps
    return cuda_driver.compile_kernel(gemm_source(variant), "experts_few_rows", threads=threads, shared_bytes=shared_bytes)


def gemm_source(variant: _Gemm) -> str:
    """The CUDA program of a GEMM."""
    v = variant
    constants = dict(
        FORMAT=v.format, ACT=v.act, EARLY=v.early, TOP_K=v.top_k, TOKENS=v.tokens, EXPERTS=v.experts, GATED=v.gated,
        BIAS=v.bias, EVEN=v.even, SMALL=v.small, SHARED=v.shared, TILES=v.cut.tiles, WARPS=v.cut.warps,
        DEPTH=v.cut.depth, SEGMENTS=SEGMENTS, WEIGHT_ROWS=v.rows, WEIGHT_COLUMNS=v.columns,
        **({"GROUP": v.group} if v.group else {}),
    )  # fmt: skip
    return fragments.source(Path(__file__).with_name("few_rows.cu"), constants, STAGES)
