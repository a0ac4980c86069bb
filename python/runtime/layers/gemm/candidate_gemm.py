"""Greedy drafts by a head with candidates: the kernels in their order, and the trial that decides where they are faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from runtime.config.kernel_configs import TritonConfig
from runtime.layers.candidate_head import CandidateHead
from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.gemm.gemm import GemmKey
from runtime.layers.gemm.quantized_rows import quantize_rows
from runtime.layers.gemm.timings import GemmChoice, GemmTimings, Timed, describe
from runtime.layers.gemm.triton_gemm import triton_gemm
from runtime.layers.kernels.candidates import best_of_tiles
from runtime.layers.kernels.graph_timer import median_micros
from runtime.layers.linear import Linear

CANDIDATES = 16
"""Maximum number of tokens that the 16-bit weights score; heads of few tiles have fewer. Rounding weights and rows to e4m3 changes scores
by 4 to 6 % of their standard deviation; if these are normally distributed, the 16th of 128,000 tokens lies 80 % of one below the best."""
REPLAYS = 5


def best_candidate(
    x: torch.Tensor, head: CandidateHead, config: TritonConfig, pdl: bool, logits: torch.Tensor | None = None
) -> torch.Tensor:
    """int64 [M]: the token of each row with the largest score among up to `CANDIDATES`.

    Args:
        x: bfloat16 [M, K] contiguous, M <= 128.
        head: a head that has its copy.
        config: the tiling of the GEMM in e4m3.
        pdl: as in `triton_gemm`.
        logits: float32 [M, V] contiguous; receives the logits of all candidates if given.
    """
    own, narrow = head.own.weight, head.narrow
    assert narrow is not None, "the head has lost its copy"
    rows, _ = quantize_rows(x, pdl=pdl)
    tiles = torch.empty((2, len(x), config.parts(len(own))), dtype=torch.int32, device=x.device)
    triton_gemm(rows, narrow, None, config, Epilogue(argmax=tiles), pdl=pdl)
    out = torch.empty(len(x), dtype=torch.int64, device=x.device)
    return best_of_tiles(tiles, x, own, head.stride, CANDIDATES, out, pdl, logits)


def candidate_runs(
    heads: Iterable[CandidateHead], buckets: Sequence[int], timings: GemmTimings, pdl: bool
) -> Iterator[Callable[[int], object]]:
    """Runs that compile every kernel of the tilings which `choose_candidates` times; of heads that have their copy."""
    for head in heads:
        for rows in buckets if head.narrow is not None else ():
            known = timings.known(torch.float8_e4m3fn, _key(head, rows))
            configs = timings.tuning.candidate_configs(rows) if known is None else [known.choice]
            x = torch.zeros((rows, head.own.in_features), dtype=torch.bfloat16, device=head.own.weight.device)
            for config in configs:
                if isinstance(config, TritonConfig):
                    yield partial(_compile, x, head, config, pdl)


def _compile(x: torch.Tensor, head: CandidateHead, config: TritonConfig, pdl: bool, call: int) -> None:
    """Run the kernels; for a head that is sharded over ranks also those that write logits, which its passes use."""
    best_candidate(x, head, config, pdl)
    if head.own.is_sharded:
        logits = torch.empty((len(x), head.own.out_features), dtype=torch.float32, device=x.device)
        best_candidate(x, head, config, pdl, logits)


def choose_candidates(
    head: CandidateHead, buckets: Sequence[int], timings: GemmTimings, greedy: Callable[[torch.Tensor, Linear], object], pdl: bool
) -> dict[str, str]:
    """Set the `choices` of a head to the tilings that are faster than `greedy`; without any, drop its copy. Returns lines for reports."""
    report = dict[str, str]()
    for rows in buckets if head.narrow is not None else ():
        key = _key(head, rows)
        timed = timings.keep(torch.float8_e4m3fn, key, lambda rows=rows: _timed(head, rows, timings, greedy, pdl))
        report["draft head {}x{} rows {}".format(*key[2:])] = _line(timed)
        if isinstance(timed.choice, TritonConfig):
            head.choices[rows] = timed.choice
    if not head.choices:
        head.narrow = None
    return report


def _line(timed: Timed) -> str:
    """The choice and all times."""
    names = {choice: "all tokens" if choice is None else describe(choice) for choice in timed.micros}
    return f"{names[timed.choice]} ({', '.join(f'{names[choice]} {micros:.0f} µs' for choice, micros in timed.micros.items())})"


def _key(head: CandidateHead, rows: int) -> GemmKey:
    return "candidates", head.own.scheme.name, head.own.out_features, head.own.in_features, rows


def _timed(head: CandidateHead, rows: int, timings: GemmTimings, greedy: Callable[[torch.Tensor, Linear], object], pdl: bool) -> Timed:
    """Microseconds of `greedy`, whose choice is None, and of each tiling that the GPU can run."""
    x = torch.randn((rows, head.own.in_features), device=head.own.weight.device).to(head.own.weight.dtype)
    greedy(x, head.own)  # a head of the draft's own is not among the GEMMs that autotune has compiled
    micros: dict[GemmChoice, float] = {None: median_micros(lambda: greedy(x, head.own), REPLAYS)}
    for config in timings.tuning.candidate_configs(rows):
        run = partial(best_candidate, x, head, config, pdl)
        with suppress(OutOfResources):
            run()
            micros[config] = median_micros(run, REPLAYS)
    return Timed(min(micros, key=micros.__getitem__), micros)
