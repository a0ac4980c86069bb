"""The trial that decides for which numbers of rows an LM head's 8-bit copy is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from runtime.config.device_tuning import DeviceTuning
from runtime.config.kernel_configs import TritonConfig
from runtime.layers.bounded_head import BoundedHead, HeadWithCopy
from runtime.layers.candidate_head import CandidateHead, takes_candidates
from runtime.layers.gemm.bound_gemm import proved_best
from runtime.layers.gemm.candidate_gemm import best_candidate
from runtime.layers.gemm.gemm import GemmKey, takes_kernels
from runtime.layers.gemm.timings import GemmChoice, GemmTimings, Timed, describe
from runtime.layers.kernels.cuda_driver import on_hopper
from runtime.layers.kernels.graph_timer import median_micros
from runtime.layers.linear import Linear

REPLAYS = 5
Greedy = Callable[[torch.Tensor, Linear], object]


class HeadCopies:
    """Owner of the heads with a copy.

    Args:
        pdl: as in `triton_gemm`.
    """

    def __init__(self, timings: GemmTimings, pdl: bool) -> None:
        self._timings, self._pdl = timings, pdl
        self._heads: list[HeadWithCopy] = []

    def candidate_head(self, head: Linear) -> CandidateHead | None:
        """A head with candidates; None where it cannot be."""
        if not _takes_copy(head):
            return None
        self._heads.append(copied := CandidateHead(head))
        return copied

    def bounded_head(self, head: Linear) -> BoundedHead | None:
        """A head with bounds; None where it cannot be."""
        if not _takes_copy(head) or not math.isfinite((copied := BoundedHead(head)).largest):
            return None
        self._heads.append(copied)
        return copied

    def runs(self, buckets: Sequence[int]) -> Iterator[Callable[[int], object]]:
        """`copy_runs` of all heads."""
        return copy_runs(self._heads, buckets, self._timings, self._pdl)

    def choose(self, buckets: Sequence[int], greedy: Greedy) -> dict[str, str]:
        """`choose_copy` for all heads."""
        report = dict[str, str]()
        for head in self._heads:
            report |= choose_copy(head, buckets, self._timings, greedy, self._pdl)
        return report


def _takes_copy(head: Linear) -> bool:
    return takes_candidates(head) and takes_kernels(head) and on_hopper(head.weight)


def best_token(
    x: torch.Tensor,
    head: HeadWithCopy,
    config: TritonConfig,
    pdl: bool,
    tokens: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 [M]: the most likely token of each row by the head's copy and its own weights.

    Args:
        x: bfloat16 [M, K] contiguous.
        head: a head that has its copy.
        config: the tiling of the GEMM in 8 bits.
        pdl: as in `triton_gemm`.
        tokens: written and returned if given.
        logits: float32 [M, V] contiguous; receives at least the logits of these tokens if given.
    """
    out = torch.empty(len(x), dtype=torch.int64, device=x.device) if tokens is None else tokens
    if isinstance(head, BoundedHead):
        return proved_best(x, head, config, pdl, out, logits)
    return best_candidate(x, head, config, pdl, out, logits)


def copy_runs(heads: Iterable[HeadWithCopy], buckets: Sequence[int], timings: GemmTimings, pdl: bool) -> Iterator[Callable[[int], object]]:
    """Runs that compile every kernel of the tilings which `choose_copy` times; of heads that have their copy."""
    for head in heads:
        for rows in _buckets(head, buckets):
            known = timings.known(head.dtype, _key(head, rows))
            configs = _configs(head, timings.tuning, rows) if known is None else [known.choice]
            x = torch.zeros((rows, head.own.in_features), dtype=torch.bfloat16, device=head.own.weight.device)
            for config in configs:
                if isinstance(config, TritonConfig):
                    yield partial(_compile, x, head, config, pdl)


def _compile(x: torch.Tensor, head: HeadWithCopy, config: TritonConfig, pdl: bool, call: int) -> None:
    """Run the kernels; for a head that is sharded over ranks also those that write logits, which its passes use."""
    best_token(x, head, config, pdl)
    if head.own.is_sharded:
        logits = torch.empty((len(x), head.own.out_features), dtype=torch.float32, device=x.device)
        best_token(x, head, config, pdl, None, logits)


def choose_copy(head: HeadWithCopy, buckets: Sequence[int], timings: GemmTimings, greedy: Greedy, pdl: bool) -> dict[str, str]:
    """Set the `choices` of a head to the tilings that are faster than `greedy`; without any, drop its copy. Returns lines for reports."""
    report = dict[str, str]()
    for rows in _buckets(head, buckets):
        key = _key(head, rows)
        timed = timings.keep(head.dtype, key, lambda rows=rows: _timed(head, rows, timings, greedy, pdl))
        report[head.name + " {}x{} rows {}".format(*key[2:])] = _line(timed)
        if isinstance(timed.choice, TritonConfig):
            head.choices[rows] = timed.choice
    if not head.choices:
        head.narrow = None
    return report


def _buckets(head: HeadWithCopy, buckets: Sequence[int]) -> list[int]:
    if head.narrow is None:
        return []
    return [rows for rows in buckets if rows <= head.most_rows]


def _configs(head: HeadWithCopy, tuning: DeviceTuning, rows: int) -> tuple[TritonConfig, ...]:
    return tuning.candidate_configs(head.gemm_rows * rows)


def _line(timed: Timed) -> str:
    """The choice and all times."""
    names = {choice: "all tokens" if choice is None else describe(choice) for choice in timed.micros}
    return f"{names[timed.choice]} ({', '.join(f'{names[choice]} {micros:.0f} µs' for choice, micros in timed.micros.items())})"


def _key(head: HeadWithCopy, rows: int) -> GemmKey:
    return head.op, head.own.scheme.name, head.own.out_features, head.own.in_features, rows


def _timed(head: HeadWithCopy, rows: int, timings: GemmTimings, greedy: Greedy, pdl: bool) -> Timed:
    """Microseconds of `greedy`, whose choice is None, and of each tiling that the GPU can run."""
    x = torch.randn((rows, head.own.in_features), device=head.own.weight.device).to(head.own.weight.dtype)
    greedy(x, head.own)  # a head of the draft's own is not among the GEMMs that autotune has compiled
    micros: dict[GemmChoice, float] = {None: median_micros(lambda: greedy(x, head.own), REPLAYS)}
    for config in _configs(head, timings.tuning, rows):
        run = partial(best_token, x, head, config, pdl)
        with suppress(OutOfResources):
            run()
            micros[config] = median_micros(run, REPLAYS)
    return Timed(min(micros, key=micros.__getitem__), micros)
