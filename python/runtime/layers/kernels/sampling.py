"""Filters, draws and random numbers of sampling as Triton kernels.

The renormalisation kernels of sgl_kernel 0.4.5 and FlashInfer 0.6.15 are not used. `sgl_kernel.top_k_renorm_prob` calls FlashInfer if it is
installed, which compiles its kernels at first use. FlashInfer keeps every token that ties with the last of top_k instead of the first by
id, changes the bits of rows without a filter, and bisects until two floats meet, with one pass over the row per step. The kernels here keep
exactly top_k tokens, do not change unfiltered rows, take a fixed number of steps, and give a row the same bits in any batch. They do not
synchronise with the host and can be captured.
"""

# pyright: reportIndexIssue=false
# A kernel is launched as kernel[grid](...), which only Triton's own types explain.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.layers.random_streams import POSITION_STEP, STREAM_STEP, signed

GROUPS = tl.constexpr(4096)
"""Groups of columns, by column number modulo this; the maxima of the groups give a lower bound for the likely tokens."""
MOST_LIKELY = tl.constexpr(1024)
"""Minimum number of likely tokens that are copied from a row first."""
PICKED = 4096
"""Capacity for copied tokens: more than `MOST_LIKELY`, because the bound is not exact."""
ROW_BLOCK = tl.constexpr(8192)
"""Entries of a row that a program reads per step."""
CHUNK = 2048
"""Entries of a row that one program of the draw sums. Equal for every batch, because it determines how sums are rounded."""


class TritonSampling:
    """`SamplingOps` on a CUDA GPU."""

    def filter(self, probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
        """Like `sampler.filter_probs`, in place; rows without a filter are not touched.

        Results may differ from `sampler.filter_probs` by rounding, because the probability mass before a token is summed in another order:
        they may differ in a token whose mass is within 1e-5 of top_p, or whose probability equals min_p times the largest. With top_p 1 no
        token is removed, while the running sum of `filter_probs` may reach 1 before the last token. Both break ties by token id.
        """
        N, V = probs.shape
        assert probs.dtype is torch.float32, f"filter takes float32, not {probs.dtype}"
        assert probs.stride(1) == 1, "filter takes contiguous rows"
        if N == 0:
            return probs
        picked = torch.empty((N, PICKED), dtype=torch.float32, device=probs.device)
        columns = torch.empty((N, PICKED), dtype=torch.int32, device=probs.device)
        _filter_kernel[(N,)](
            probs, probs.stride(0), V, top_k, top_k.stride(0), top_p, top_p.stride(0), min_p, min_p.stride(0), picked, columns,
            PICKED=PICKED, num_warps=16,
        )  # fmt: skip
        return probs

    def draw(self, probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Like `sampler.draw`, without storing running sums. The token may differ only for a random number within 1e-15 of a boundary."""
        N, V = probs.shape
        assert probs.dtype is torch.float32, f"draw takes float32, not {probs.dtype}"
        assert probs.stride(1) == 1, "draw takes contiguous rows"
        tokens = torch.empty(N, dtype=torch.int64, device=probs.device)
        if N == 0:
            return tokens
        chunks = triton.cdiv(V, CHUNK)
        sums = torch.empty((N, chunks), dtype=torch.float64, device=probs.device)
        _chunk_sum_kernel[(N, chunks)](probs, probs.stride(0), V, sums, CHUNK=CHUNK, num_warps=4)
        block = triton.next_power_of_2(chunks)
        _draw_kernel[(N,)](probs, probs.stride(0), V, sums, chunks, uniform.contiguous(), tokens, BLOCK=block, CHUNK=CHUNK, num_warps=4)
        return tokens

    def uniforms(self, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
        """Like `sampler.uniforms`, bit for bit."""
        seeds, positions = torch.broadcast_tensors(seeds, positions)
        out = torch.empty(positions.shape, dtype=torch.float32, device=positions.device)
        if out.numel():
            _uniform_kernel[(triton.cdiv(out.numel(), 128),)](
                seeds.contiguous(), positions.to(torch.int64).contiguous(), out, out.numel(), signed(STREAM_STEP * (stream + 1)),
                signed(POSITION_STEP), BLOCK=128, num_warps=1,
            )  # fmt: skip
        return out


# ---- filters
#
# The kept tokens are always a prefix of the tokens sorted by probability and then by id: those above a limit, and the first few that equal
# it. Limits are found bit by bit, because non-negative floats are ordered like their bits.


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _limit(ptr, n, target, least, MASS: tl.constexpr):
    """The largest T such that the probabilities with bits of at least T have a mass, or without `MASS` a number, of `target`; this must
    hold for `least`. Finds two of the 30 bits below 2.0 per step. Numbers are exact in float32.
    """
    column = tl.arange(0, ROW_BLOCK)
    T = tl.full([], 0, tl.int32)
    for step in range(15):
        one = tl.full([], 1, tl.int32) << (28 - 2 * step)
        m1 = tl.zeros([ROW_BLOCK], tl.float32)
        m2 = tl.zeros([ROW_BLOCK], tl.float32)
        m3 = tl.zeros([ROW_BLOCK], tl.float32)
        for start in range(0, n, ROW_BLOCK):
            x = tl.load(ptr + start + column, mask=start + column < n, other=0.0)
            each = x if MASS else 1.0
            m1 += tl.where(_bits(x) >= T + one, each, 0.0)
            m2 += tl.where(_bits(x) >= T + 2 * one, each, 0.0)
            m3 += tl.where(_bits(x) >= T + 3 * one, each, 0.0)
        digit = ((T + one <= least) | (tl.sum(m1, 0) >= target)).to(tl.int32)
        digit += ((T + 2 * one <= least) | (tl.sum(m2, 0) >= target)).to(tl.int32)
        digit += ((T + 3 * one <= least) | (tl.sum(m3, 0) >= target)).to(tl.int32)
        T += one * digit
    return T


@triton.jit
def _above(ptr, n, T):
    """Number and mass of the probabilities above the limit."""
    column = tl.arange(0, ROW_BLOCK)
    count = tl.zeros([ROW_BLOCK], tl.int32)
    mass = tl.zeros([ROW_BLOCK], tl.float32)
    for start in range(0, n, ROW_BLOCK):
        x = tl.load(ptr + start + column, mask=start + column < n, other=0.0)
        above = _bits(x) > T
        count += above.to(tl.int32)
        mass += tl.where(above, x, 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _tie_end(ptr, n, T, ties):
    """Index of the last of the first `ties` entries that equal the limit; n if no more entries do."""
    column = tl.arange(0, ROW_BLOCK)
    seen = tl.full([], 0, tl.int32)
    end = tl.full([], -1, tl.int32)
    for start in range(0, n, ROW_BLOCK):
        x = tl.load(ptr + start + column, mask=start + column < n, other=0.0)
        equal = ((_bits(x) == T) & (start + column < n)).to(tl.int32)
        here = tl.sum(equal, 0)
        if (seen < ties) & (here > 0):
            stay = (equal > 0) & (seen + tl.cumsum(equal, 0) <= ties)
            end = tl.maximum(end, tl.max(tl.where(stay, start + column, -1), 0))
        seen += here
    return tl.where(seen <= ties, n, end)


@triton.jit
def _head(ptr, n, V, k, p, total):
    """The limit of top_k and top_p, and the index of the last kept entry at the limit. `total` is the mass before top_k."""
    T = tl.full([], 0, tl.int32)
    ties = n
    mass = total
    if k < V:
        T = _limit(ptr, n, k, 0, MASS=False)
        count, above = _above(ptr, n, T)
        ties = k - count
        mass = above + ties.to(tl.float32) * T.to(tl.float32, bitcast=True)
    if p < 1.0:
        target = tl.maximum(p * mass, 1e-37)  # the most likely token is always kept
        limit = _limit(ptr, n, target, T, MASS=True)
        count, above = _above(ptr, n, limit)
        each = tl.maximum(limit.to(tl.float32, bitcast=True), 1e-37)
        # A tie is kept while the mass before it is below the target.
        few = tl.maximum(tl.minimum(tl.ceil((target - above) / each), 1.0 * n), 1.0).to(tl.int32)
        ties = tl.where(limit == T, tl.minimum(ties, few), few)
        T = limit
    return T, _tie_end(ptr, n, T, ties)


@triton.jit
def _stays(x, place, T, end, least):
    bits = _bits(x)
    return ((bits > T) | ((bits == T) & (place <= end))) & (x >= least)


@triton.jit
def _kept_mass(ptr, n, T, end, least):
    """Mass of the kept tokens."""
    column = tl.arange(0, ROW_BLOCK)
    kept = tl.zeros([ROW_BLOCK], tl.float32)
    for start in range(0, n, ROW_BLOCK):
        x = tl.load(ptr + start + column, mask=start + column < n, other=0.0)
        kept += tl.where(_stays(x, start + column, T, end, least), x, 0.0)
    return tl.sum(kept, 0)


@triton.jit
def _likely_limit(ptr, V, want):
    """A lower bound, as bits, of at least `want` probabilities (want <= GROUPS) and few more; and the largest probability.

    `want` groups have a maximum of at least this bound. Its last 10 bits are 0.
    """
    column = tl.arange(0, GROUPS)
    largest = tl.zeros([GROUPS], tl.float32)
    for start in range(0, V, 4 * GROUPS):
        at = start + tl.arange(0, 4)[:, None] * GROUPS + column[None, :]
        largest = tl.maximum(largest, tl.max(tl.load(ptr + at, mask=at < V, other=0.0), 0))
    bits = _bits(largest)
    T = tl.full([], 0, tl.int32)
    for step in range(10):
        one = tl.full([], 1, tl.int32) << (28 - 2 * step)
        digit = (tl.sum((bits >= T + one).to(tl.int32), 0) >= want).to(tl.int32)
        digit += (tl.sum((bits >= T + 2 * one).to(tl.int32), 0) >= want).to(tl.int32)
        digit += (tl.sum((bits >= T + 3 * one).to(tl.int32), 0) >= want).to(tl.int32)
        T += one * digit
    return T, tl.max(largest, 0)


@triton.jit
def _pick(ptr, V, T, picked_ptr, column_ptr, CAPACITY: tl.constexpr):
    """Copy the probabilities of at least T and their columns, in column order, up to the capacity.

    Returns their number and mass, and the mass of the row.
    """
    column = tl.arange(0, ROW_BLOCK)
    count = tl.full([], 0, tl.int32)
    mass = tl.zeros([ROW_BLOCK], tl.float32)
    total = tl.zeros([ROW_BLOCK], tl.float32)
    for start in range(0, V, ROW_BLOCK):
        x = tl.load(ptr + start + column, mask=start + column < V, other=0.0)
        likely = (_bits(x) >= T) & (x > 0.0)
        total += x
        mass += tl.where(likely, x, 0.0)
        here = tl.sum(likely.to(tl.int32), 0)
        if here > 0:
            at = count + tl.cumsum(likely.to(tl.int32), 0) - 1
            tl.store(picked_ptr + at, x, mask=likely & (at < CAPACITY))
            tl.store(column_ptr + at, start + column, mask=likely & (at < CAPACITY))
        count += here
    return count, tl.sum(mass, 0), tl.sum(total, 0)


@triton.jit
def _filter_kernel(
    probs_ptr, stride, V, top_k_ptr, top_k_stride, top_p_ptr, top_p_stride, min_p_ptr, min_p_stride, picked_ptr, column_ptr,
    PICKED: tl.constexpr,
):  # fmt: skip
    """One program processes one row. It searches only the most likely tokens if these include all kept ones, else the whole row."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.maximum(tl.load(top_k_ptr + row * top_k_stride), 1)
    p = tl.load(top_p_ptr + row * top_p_stride)
    m = tl.load(min_p_ptr + row * min_p_stride)
    if (k < V) | (p < 1.0) | (m > 0.0):
        ptr = probs_ptr + row * stride
        values = picked_ptr + row * PICKED
        columns = column_ptr + row * PICKED
        floor, largest = _likely_limit(ptr, V, tl.minimum(k, MOST_LIKELY))
        count, mass, total = _pick(ptr, V, floor, values, columns, PICKED)
        least = m * largest
        enough = (k <= count) | (floor == 0) | ((k >= V) & (p < 1.0) & (mass >= p * total))
        enough |= (k >= V) & (m > 0.0) & (least >= floor.to(tl.float32, bitcast=True))
        tl.debug_barrier()  # other threads stored the picked tokens
        column = tl.arange(0, ROW_BLOCK)
        if enough & (count <= PICKED):
            T, end = _head(values, count, V, k, p, total)
            kept = _kept_mass(values, count, T, end, least)
            for start in range(0, V, ROW_BLOCK):
                tl.store(ptr + start + column, tl.zeros([ROW_BLOCK], tl.float32), mask=start + column < V)
            tl.debug_barrier()
            place = tl.arange(0, PICKED)
            x = tl.load(values + place, mask=place < count, other=0.0)
            at = tl.load(columns + place, mask=place < count, other=0)
            tl.store(ptr + at, x / kept, mask=(place < count) & _stays(x, place, T, end, least))
        else:
            T, end = _head(ptr, V, V, k, p, total)
            kept = _kept_mass(ptr, V, T, end, least)
            for start in range(0, V, ROW_BLOCK):
                inside = start + column < V
                x = tl.load(ptr + start + column, mask=inside, other=0.0)
                tl.store(ptr + start + column, tl.where(_stays(x, start + column, T, end, least), x / kept, 0.0), mask=inside)


# ---- draws


@triton.jit
def _chunk_sum_kernel(probs_ptr, stride, V, sums_ptr, CHUNK: tl.constexpr):
    """One program sums one chunk of one row."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(probs_ptr + row * stride + column, mask=column < V, other=0.0)
    tl.store(sums_ptr + row * tl.num_programs(1) + chunk, tl.sum(x.to(tl.float64), 0))


@triton.jit(do_not_specialize_on_alignment=["uniform_ptr"])
def _draw_kernel(
    probs_ptr, stride, V, sums_ptr, chunks, uniform_ptr, tokens_ptr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """One program processes one row. It finds the first chunk whose running sum exceeds the number, then the first such entry in it."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    sums = tl.load(sums_ptr + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    running = tl.cumsum(sums, 0)
    number = tl.load(uniform_ptr + row).to(tl.float64) * tl.sum(tl.where(chunk == chunks - 1, running, 0.0), 0)
    last = tl.max(tl.where(sums > 0.0, chunk, 0), 0)
    # The order of summation changes the last bits: if no running sum exceeds the number, take the last chunk with any mass.
    found = tl.min(tl.where((sums > 0.0) & (running > number), chunk, last), 0)
    before = tl.sum(tl.where(chunk == found - 1, running, 0.0), 0)
    column = found * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(probs_ptr + row * stride + column, mask=column < V, other=0.0)
    last = tl.max(tl.where(x > 0.0, column, found * CHUNK), 0)
    passed = (x > 0.0) & (before + tl.cumsum(x.to(tl.float64), 0) > number)
    tl.store(tokens_ptr + row, tl.min(tl.where(passed, column, last), 0).to(tl.int64))


# ---- random numbers


@triton.jit
def _logical_shift(x, BITS: tl.constexpr):
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _mix(x):
    """`sampler._mix`."""
    x = (x ^ _logical_shift(x, 30)) * -4658895280553007687
    x = (x ^ _logical_shift(x, 27)) * -7723592293110705685
    return x ^ _logical_shift(x, 31)


@triton.jit
def hashed_uniform(seed, position, stream_key, position_step):
    """`sampler.uniforms` of int64 seeds and positions."""
    x = _mix(_mix(seed + stream_key) + position * position_step)
    return ((x >> 40) & 0xFFFFFF).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit(do_not_specialize=["n"])
def _uniform_kernel(seeds_ptr, positions_ptr, out_ptr, n, stream_key, position_step, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds_ptr + i, mask=i < n, other=0)
    position = tl.load(positions_ptr + i, mask=i < n, other=0)
    tl.store(out_ptr + i, hashed_uniform(seed, position, stream_key, position_step), mask=i < n)
