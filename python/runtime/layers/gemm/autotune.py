"""Autotuning: compiles the candidate kernels of a model's GEMMs in parallel, times them and keeps the fastest."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, zip_longest

import torch
from triton.compiler.compiler import CompiledKernel
from triton.runtime import build
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from runtime.config.device_tuning import DeviceTuning
from runtime.layers.gemm.few_rows_output import MAX_ROWS as FEW_ROWS
from runtime.layers.gemm.fragment_gemm import supports as fragments_support
from runtime.layers.gemm.fully_resident_gemm import fully_resident_config
from runtime.layers.gemm.fully_resident_gemm import supports as can_be_fully_resident
from runtime.layers.gemm.gemm import Gemm, GemmKey, GemmOp, takes_kernels
from runtime.layers.gemm.many_rows import GemmSize, many_rows_config, split_config
from runtime.layers.gemm.resident_gemm import leaves_space, resident_config
from runtime.layers.gemm.resident_gemm import supports as can_be_resident
from runtime.layers.gemm.tilings import wgmma_configs
from runtime.layers.gemm.timings import GemmChoice, GemmTimings, Timed, fastest
from runtime.layers.gemm.triton_gemm import MAX_ROWS
from runtime.layers.gemm.wgmma_gemm import supports
from runtime.layers.gemm.widening_gemm import MOST_ROWS as MOST_WIDENED_ROWS
from runtime.layers.gemm.widening_gemm import supports as widening_supports
from runtime.layers.gemm.widening_gemm import widening_configs
from runtime.layers.kernels.graph_timer import median_micros
from runtime.layers.kernels.triton_threads import kernels_once, launchers_apart
from runtime.layers.linear import Linear

log = logging.getLogger(__name__)
REPLAYS = 5
COMPILE_THREADS = min(2 * len(os.sched_getaffinity(0)) + 4, 32)
"""More than cores, because some threads wait for kernels that others compile; limited so that compilers do not fill the host's memory."""
ENOUGH_BYTES = 400 << 20
"""Bytes of weights to cycle through while timing: several times any L2, so that each GEMM reads from memory as in the model."""
MOST_BETWEEN = 8
"""Maximum rows for which kernels before and after a GEMM decide on its kernel: with more rows its own time counts more."""
SPLITTABLE: tuple[GemmOp, ...] = ("linear", "linear_add")
"""Operations that support split-K within a cluster."""
Run = Callable[[int], object]
"""Runs one GEMM or several; the argument counts calls and selects the layer."""


@dataclass(frozen=True, slots=True)
class GemmGroup:
    """The layers of a model whose GEMMs share one kernel, at one m bucket. `gemm`: the GEMM of the first of them."""

    gemm: Gemm
    linears: Sequence[Linear]
    rows: int

    def __str__(self) -> str:
        linear, behind = self.gemm.linear, " behind a pause" if self.behind_pause else ""
        return f"{self.gemm.op} {linear.out_features}x{linear.in_features} rows {self.rows}{behind}"

    @property
    def takes_residents(self) -> bool:
        """Whether a resident GEMM, which prefetches its weights into shared memory, supports it."""
        if self.gemm.op not in (*SPLITTABLE, "gate_up") or self.rows > FEW_ROWS or self.gemm.linear.is_int4:
            return False
        if self.gemm.linear.is_scaled:
            return _takes_bfloat16(self.gemm, can_be_fully_resident)
        return can_be_resident(self.gemm.linear.weight)

    @property
    def behind_pause(self) -> bool:
        """Whether it is timed after a kernel that leaves the memory idle, as in a pass: only then can resident weights be faster."""
        return self.gemm.after_attention and self.takes_residents

    @property
    def key(self) -> GemmKey:
        """The key by which its kernel is chosen."""
        return self.gemm.key(self.rows)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.gemm.linear.weight.dtype


def group_gemms(gemms: Iterable[Gemm], buckets: Sequence[int], prompts: Collection[int] = ()) -> list[GemmGroup]:
    """The GEMMs of a model by kind, in the order of their first occurrence, at each m bucket with several candidates.

    Args:
        prompts: the `buckets` that only prompt passes have, in which few rows have logits.
    """
    kinds: dict[tuple[object, ...], list[Gemm]] = {}
    for gemm in filter(lambda gemm: takes_kernels(gemm.linear), gemms):
        kinds.setdefault(gemm.key(0), []).append(gemm)
    return [
        GemmGroup(kind[0], [gemm.linear for gemm in kind], rows)
        for kind in kinds.values()
        for rows in buckets
        if rows <= MAX_ROWS or (_takes_many_rows(kind[0], rows) and not (kind[0].op == "logits" and rows in prompts))
    ]


def _takes_many_rows(gemm: Gemm, rows: int) -> bool:
    """Whether a kernel other than cuBLAS supports `rows`, more than `MAX_ROWS`."""
    weight = gemm.linear.weight
    if gemm.linear.is_scaled or gemm.linear.is_int4:
        return rows <= MOST_WIDENED_ROWS and _takes_bfloat16(gemm, widening_supports)
    return weight.dtype is torch.bfloat16 and supports(weight, silu=gemm.op == "gate_up")


def candidates(group: GemmGroup, num_sms: int, tuning: DeviceTuning) -> tuple[GemmChoice, ...]:
    """The choices worth timing, cuBLAS first.

    The projection of a latent's queries has one candidate for few rows if its resident weights leave space: the short kernels after it then
    prefetch their own weights. Kernels that are as fast alone delay them, by 2 µs per layer of GLM-4.7-Flash on an H200.
    """
    op, linear, rows = group.gemm.op, group.gemm.linear, group.rows
    between = group.gemm.q_norm is not None and group.gemm.norm is None
    if between and rows <= MOST_BETWEEN and (resident := _resident_configs(group, num_sms)) and not linear.is_scaled:
        return resident
    if linear.is_scaled:
        return None, *_scaled_candidates(group, num_sms, tuning)
    if linear.is_int4:
        return None, *_int4_candidates(group, num_sms, tuning)
    if rows > MAX_ROWS:
        size = GemmSize(rows, linear.out_features, linear.in_features, gated=op == "gate_up")
        split = split_config(size, tuning.clusters_at_once) if op in SPLITTABLE else None
        return None, many_rows_config(size, num_sms), *(() if split is None else (split,))
    found: tuple[GemmChoice, ...] = tuning.gemm_configs(op, rows)
    if supports(linear.weight, silu=op == "gate_up"):
        wgmma = wgmma_configs(op, rows, linear.out_features, num_sms, tuning)
        found = wgmma if wgmma and rows > tuning.wgmma_only_rows else (*found, *wgmma)
    return None, *found, *_resident_configs(group, num_sms)


def _resident_configs(group: GemmGroup, num_sms: int) -> tuple[GemmChoice, ...]:
    """The tilings of GEMMs that prefetch their weights into shared memory while the preceding kernel is running.

    The resident GEMM, in bfloat16, is a candidate behind attention. For other GEMMs it is one with at most one block per SM, because its
    warps split K, while other kernels with that few blocks process K sequentially; and if it holds all weights in less than half of the
    shared memory, so that the next kernel finds space. The fully resident GEMM is one in e4m3, but not where blocks have several units of
    rows and a deferred norm needs the squares of each.
    """
    if not group.takes_residents:
        return ()
    linear, op = group.gemm.linear, group.gemm.op
    if linear.is_scaled:
        full = fully_resident_config(linear.weight, group.rows, num_sms)
        return () if full is None or (op == "linear_add" and full.tall > 1) else (full,)
    part = resident_config(linear.out_features, linear.in_features, num_sms)
    useful = part is not None and (part.blocks == 1 or group.gemm.after_attention or leaves_space(linear.in_features, part))
    return (part,) if useful else ()


def _scaled_candidates(group: GemmGroup, num_sms: int, tuning: DeviceTuning) -> tuple[GemmChoice, ...]:
    """Candidates for e4m3 weights."""
    linear, rows = group.gemm.linear, group.rows
    found: tuple[GemmChoice, ...] = tuning.scaled_configs(rows) if rows <= MAX_ROWS else ()
    if _takes_bfloat16(group.gemm, fragments_support):
        found += tuning.fragment_configs(rows)
    if _takes_bfloat16(group.gemm, widening_supports):
        found += widening_configs(rows, linear.out_features, linear.in_features, num_sms, tuning)
    return *found, *_resident_configs(group, num_sms)


def _int4_candidates(group: GemmGroup, num_sms: int, tuning: DeviceTuning) -> tuple[GemmChoice, ...]:
    """Candidates for int4 weights: Triton's only where no CUDA C++ kernel supports them, because it is several times slower."""
    linear, rows, found = group.gemm.linear, group.rows, ()
    if _takes_bfloat16(group.gemm, fragments_support):
        found = tuning.int4_fragment_configs(rows)
    if _takes_bfloat16(group.gemm, widening_supports):
        found += widening_configs(rows, linear.out_features, linear.in_features, num_sms, tuning, int4=True)
    return found or tuning.int4_configs(rows)


def _takes_bfloat16(gemm: Gemm, supports: Callable[[torch.Tensor, torch.Tensor, bool], bool]) -> bool:
    """Whether a CUDA C++ kernel that `supports` the quantised weight is a candidate: rows are bfloat16, and there is no argmax."""
    linear, norm, scale = gemm.linear, gemm.norm, gemm.linear.storage.scale
    narrow = linear.weight.dtype if norm is None else norm.weight.dtype
    return gemm.op != "logits" and narrow is torch.bfloat16 and scale is not None and supports(linear.weight, scale, gemm.op == "gate_up")


def autotune_gemms(
    groups: Sequence[GemmGroup],
    trial: Callable[[GemmGroup], Callable[[GemmChoice], Run]],
    timings: GemmTimings,
    num_sms: int,
    others: Iterable[Callable[[], object]],
) -> dict[GemmKey, Timed]:
    """Compile and time the groups that `timings` does not have yet.

    Args:
        trial: creates the runs of a group by choice.
        others: runs of other kernels to compile at the same time.

    Returns:
        The result for each group.
    """
    start = time.perf_counter()
    runs = {}
    for group in groups:
        run, known = trial(group), timings.known(group.dtype, group.key)
        choices = candidates(group, num_sms, timings.tuning) if known is None else (known.choice,)
        runs[group.key] = {choice: run(choice) for choice in choices}
    tried = [run for by_choice in runs.values() for run in by_choice.values()]
    compile_all(_alternately(tried, [lambda _, other=other: other() for other in others]))
    log.info("compiled GEMMs and other kernels in %.1f s", time.perf_counter() - start)
    return {group.key: timings.keep(group.dtype, group.key, lambda g=group: _fastest(g, runs[g.key])) for group in groups}


def compile_all(runs: Iterable[Run]) -> None:
    """Compile the kernels of all runs in parallel: NVRTC, Triton's passes, ptxas and gcc release the GIL."""

    def one(run: Run) -> None:
        torch.cuda.synchronize()  # sets the device's context in a new thread, which TMA descriptors need before any launch
        with torch.inference_mode(), suppress(OutOfResources):  # timing skips kernels that exceed the GPU's resources
            run(0)

    first, *others = runs
    one(first)  # alone, because it initialises Triton's tables of this device
    once = kernels_once(JITFunction, CompiledKernel, OutOfResources)
    with once, launchers_apart(build), ThreadPoolExecutor(COMPILE_THREADS) as pool:
        list(pool.map(one, others))
    torch.cuda.synchronize()


def _alternately(gemms: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    """Interleave both lists: many of the others wait for a kernel that another compiles, which leaves cores for GEMMs."""
    return [run for pair in zip_longest(gemms, others) for run in pair if run is not None]


def _fastest(group: GemmGroup, runs: Mapping[GemmChoice, Run]) -> Timed:
    """Time each choice as a captured graph of calls that read different weights; choices that exceed the GPU's resources are skipped."""
    calls = max(_rotation([linear.weight for linear in group.linears]), 2)
    times = {choice: micros for choice, run in runs.items() if (micros := _microseconds(run, calls)) is not None}
    return Timed(fastest(times, group.rows), times)


def _rotation(weights: Sequence[torch.Tensor]) -> int:
    """The number of weights to cycle through."""
    total = 0
    for number, weight in enumerate(weights, 1):
        total += weight.nbytes
        if total >= ENOUGH_BYTES:
            return number
    return len(weights)


def _microseconds(run: Run, calls: int) -> float | None:
    try:
        run(0)
    except OutOfResources:
        return None
    call = count()
    return median_micros(lambda: run(next(call)), REPLAYS, calls)
