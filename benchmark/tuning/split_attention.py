"""Configurations of split-KV attention compared with FA3: microseconds per layer in graphs of 32 layers, each with its own keys.

    PYTHONPATH=python python -m benchmark.tuning.split_attention

The heads are those of Llama-3-8B. Each result is compared with FA3's before it is timed. The last table shows where split attention should
replace FA3; the best configurations should be the defaults.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmark.record import Record, Row
from benchmark.shapes import read_rate
from benchmark.sweep import numbers
from benchmark.tuning.clock import median_us
from benchmark.tuning.command_line import arguments, parse_on_gpu
from benchmark.tuning.world import (
    BF16,
    CUDA,
    SHAPE,
    D,
    G,
    H,
    attention_roof_us,
    attention_shape,
    decode_batch,
    kv_pool,
    page_table,
)
from runtime.config.device_tuning import H200
from runtime.config.kernel_configs import SplitConfig
from runtime.layers.attention.base import plan_pass
from runtime.mem_cache.kv_pool import PageTable

if TYPE_CHECKING:  # requires Triton, which is installed with a GPU only
    from runtime.layers.attention.kernels.split_shape import SplitShape

NAME = "tuning/split_attention"
LAYERS = SHAPE.layers
CONFIGS: dict[str, dict[str, Any]] = {
    "64x4": {"tile": 64, "num_warps": 4, "stages": 4, "programs_per_sm": 2},
    "64x3 3/SM": {"tile": 64, "num_warps": 4, "stages": 3, "programs_per_sm": 3},
    "128x3 1/SM": {"tile": 128, "num_warps": 4, "stages": 3, "programs_per_sm": 1, "alone": 2},
    "64x4 scheduled": {"tile": 64, "num_warps": 4, "stages": 4, "programs_per_sm": 2, "scheduled": True},
    "64x3 3/SM scheduled": {"tile": 64, "num_warps": 4, "stages": 3, "programs_per_sm": 3, "scheduled": True},
    "64x3 whole": {"tile": 64, "num_warps": 4, "stages": 3, "programs_per_sm": 3, "whole": True},
    "64x4 whole": {"tile": 64, "num_warps": 4, "stages": 4, "programs_per_sm": 2, "whole": True},
    "32x4 whole": {"tile": 32, "num_warps": 4, "stages": 4, "programs_per_sm": 4, "whole": True},
}
"""Fields of `SplitConfig` by name: keys per tile x stages, programs per multiprocessor if not 2, and the schedule."""
TOLERANCE = 2e-2
"""Maximum relative error per query and head in bfloat16."""
POOL_PAGE = 64
"""Slots per unit of the pool; all page sizes divide it."""


class Case(NamedTuple):
    """One kind of pass. Ragged lengths are between 1/4 and 7/4 of `length`."""

    page: int
    width: int
    batch: int
    length: int
    ragged: bool

    def lens(self, device: torch.device = CUDA) -> torch.Tensor:
        """int32 [batch] with mean `length`."""
        spread = torch.linspace(0.25, 1.75, self.batch) if self.ragged else torch.ones(self.batch)
        return (spread[torch.randperm(self.batch)] * self.length).to(device, torch.int32)

    @property
    def longest(self) -> int:
        """Number of keys of the longest request."""
        return self.length * (7 if self.ragged else 4) // 4

    @property
    def slots(self) -> int:
        """Number of KV slots, in whole units of the pool."""
        return self.batch * -(-self.longest // POOL_PAGE) * POOL_PAGE


def cases(args: argparse.Namespace) -> list[Case]:
    """The cases of the command line; a single request is not ragged."""
    lengths = [(length, False) for length in args.lengths] + [(length, True) for length in args.ragged]
    asked = itertools.product(args.pages, args.widths, args.batch_sizes, lengths)
    return [Case(page, width, batch, *length) for page, width, batch, length in asked if batch > 1 or not length[1]]


def that_fit(cases: Sequence[Case], free_bytes: int) -> list[Case]:
    """The cases whose KV leaves a fifth of the free memory unused."""
    room = free_bytes * 4 // 5 // SHAPE.kv_bytes_per_token
    return [case for case in cases if case.slots <= room]


def split_shape(batch: int, width: int, config: SplitConfig) -> SplitShape:
    """The shape of a pass on this GPU."""
    from runtime.layers.attention.kernels.split_shape import SplitShape

    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    return SplitShape(batch, width, H, G, D, num_sms, config)


def configs() -> dict[str, SplitConfig]:
    """`CONFIGS` as kernel configurations."""
    return {name: SplitConfig(**fields) for name, fields in CONFIGS.items()}


def compile_kind(kind: tuple[int, int, int, SplitConfig]) -> None:
    """Run one kind of pass once, to compile its kernel into the cache."""
    from runtime.layers.attention.kernels.split_decode import warm_up

    page, width, batch, config = kind
    warm_up(split_shape(batch, width, config), page, BF16, CUDA, tree=False, window=-1, sinks=False, pdl=True)
    torch.cuda.synchronize()


def compile_all(cases: Iterable[Case], workers: int) -> None:
    """Compile all kernels in parallel processes."""
    kinds = {}
    for (page, width, batch, _, _), config in itertools.product(cases, configs().values()):
        padded = 1 << (split_shape(batch, width, config).splits - 1).bit_length()
        cut = (page, width, padded, config.tile, config.num_warps, config.stages, config.alone, config.scheduled, config.whole)
        kinds[cut] = (page, width, batch, config)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_kind, kinds.values(), chunksize=4))
    print(f"{len(kinds)} kernels compiled", flush=True)


class Keys:
    """KV of all layers, allocated once and viewed as pages of any size."""

    def __init__(self, slots: int) -> None:
        self.pool = kv_pool(LAYERS, slots // POOL_PAGE, POOL_PAGE)
        self._k, self._v = self.pool.k, self.pool.v

    def paged(self, page: int, batch: int, length: int) -> PageTable:
        """Split the pool into pages and assign them to requests at random."""
        self.pool.page_size = page
        self.pool.k, self.pool.v = ([cache.view(-1, page, G, D) for cache in caches] for caches in (self._k, self._v))
        return page_table(batch, length, page)


def runs(keys: Keys, case: Case) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """FA3 and all configurations as functions that attend in all layers, with the same queries, keys and lengths."""
    from runtime.layers.attention.fa3 import FlashAttention
    from runtime.layers.attention.kernels.paged_keys import PagedKeys
    from runtime.layers.attention.kernels.split_decode import SplitWorkspace, split_attention

    page, width, size, _, _ = case
    table, lens, pool = keys.paged(page, size, case.longest), case.lens(), keys.pool
    q = torch.randn((size * width, H, D), device="cuda").to(BF16)
    rows = torch.arange(1, size + 1, dtype=torch.int32, device="cuda")
    fa3_only = replace(H200, split_kv_batches=(), whole_kv_programs=())  # every configuration is compared with FA3
    shape = replace(attention_shape(LAYERS, size, width, case.longest), tuning=fa3_only)
    backend = FlashAttention(shape, pool, table)
    batch = decode_batch(size, width, case.longest)
    batch.seq_lens.copy_(lens)
    plan_pass(backend, batch)

    def fa3() -> list[torch.Tensor]:
        return [backend.forward(q, layer, batch).view(q.shape) for layer in shape.layers]

    def split(config: SplitConfig) -> Callable[[], list[torch.Tensor]]:
        sizes = split_shape(size, width, config)
        workspace = SplitWorkspace([sizes], q.device)
        where = PagedKeys(table.pages, rows, lens, page, sizes.empty_schedule(q.device))
        sizes.fill_schedule(lens, where.schedule)
        return lambda: [split_attention(q, k, v, where, sizes, workspace, D**-0.5, pdl=True) for k, v in zip(pool.k, pool.v, strict=True)]

    return {"FA3": fa3} | {name: split(config) for name, config in configs().items()}


def compare(name: str, case: Case, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    """Raise SystemExit if the output of a layer differs from FA3's."""
    error = torch.stack([((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)).max() for a, b in zip(got, want, strict=True)])
    if not bool((error < TOLERANCE).all()):
        raise SystemExit(f"{name} differs from FA3 for {case}: relative error {float(error.max()):.1e}")


def row(case: Case, times: dict[str, float], rate: float | None) -> Row:
    """A result row of a case. `times`: microseconds per layer of FA3 and of each configuration."""
    roof = attention_roof_us(case.batch, case.length, rate)
    split = {name: round(spent, 1) for name, spent in times.items() if name != "FA3"}
    found: Row = {**case._asdict(), **({} if roof is None else {"roof us": round(roof, 1)})}
    return found | {"FA3 us": round(times["FA3"], 1), "split us": split, "best": min(split, key=lambda name: times[name])}


def line(row: Row) -> str:
    """A case on one line: FA3, the configurations, and the best one."""
    label = f"page {row['page']:2} q {row['width']} B {row['batch']:2} L {row['length']:4}{'~' if row['ragged'] else ' '}"
    roof = f"roof {row['roof us']:6.1f} " if "roof us" in row else ""
    cells = " ".join(f"{spent:6.1f}" for spent in row["split us"].values())
    best = f"{row['FA3 us'] / row['split us'][row['best']]:.2f}x {row['best']}"
    return f"{label}: {roof}FA3 {row['FA3 us']:6.1f} | {cells} | {best}"


def choice(rows: Sequence[Row], config: str) -> list[str]:
    """FA3's time divided by that of one configuration, by width and batch: minimum and mean over the lengths."""
    ratios: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        ratios.setdefault((row["width"], row["batch"]), []).append(row["FA3 us"] / row["split us"][config])
    lines = [f"q {width} B {batch:2}: {min(found):.2f} {sum(found) / len(found):.2f}" for (width, batch), found in ratios.items()]
    return [f"FA3's time / that of {config}: minimum, mean", *lines]


def measure(keys: Keys, case: Case) -> dict[str, float]:
    """Microseconds per layer of FA3 and all configurations, after comparing their results."""
    ways = runs(keys, case)
    torch.cuda.synchronize()
    want = ways["FA3"]()
    for name, run in ways.items():
        compare(name, case, run(), want)
    times = {name: median_us(run) / LAYERS for name, run in ways.items()}
    torch.cuda.empty_cache()  # the memory of their graphs
    return times


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = arguments("split_attention", __doc__)
    found.add_argument("--pages", type=page_sizes, default=[64], help=f"page sizes, powers of two up to {POOL_PAGE}")
    found.add_argument("--widths", type=numbers, default=[1, 4], help="queries per request")
    found.add_argument("--batch-sizes", type=numbers, default=[1, 4, 8, 16, 32, 64])
    found.add_argument("--lengths", type=numbers, default=[128, 1000, 2000, 8000], help="keys per request")
    found.add_argument("--ragged", type=counts_or_none, default=[2000], help="mean lengths of ragged batches, or none")
    found.add_argument("--workers", type=int, default=12, help="processes for compilation")
    return found


def counts_or_none(text: str) -> list[int]:
    """`1,64` as a list, `none` as an empty one."""
    return [] if text == "none" else numbers(text)


def page_sizes(text: str) -> list[int]:
    """`1,64` as a list of page sizes that divide the unit of the pool."""
    found = numbers(text)
    if wrong := [page for page in found if POOL_PAGE % page]:
        raise argparse.ArgumentTypeError(f"page size {wrong[0]}: the value must be a power of two up to {POOL_PAGE}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and record."""
    args = parse_on_gpu(parser(), argv)
    asked = cases(args)
    started = time.monotonic()
    compile_all(asked, args.workers)
    record = Record(NAME, Case._fields, args.out)
    rate, rows = read_rate(record.data["machine"]), []
    with torch.inference_mode():
        fit = that_fit(asked, torch.cuda.mem_get_info()[0])
        if len(fit) < len(asked):
            print(f"{len(asked) - len(fit)} of {len(asked)} cases do not fit into the free memory")
        if not fit:
            raise SystemExit("no case fits into the free memory; choose fewer or shorter requests")
        keys = Keys(max(case.slots for case in fit))
        print("µs per layer: " + ", ".join(CONFIGS), flush=True)
        for case in fit:
            rows.append(row(case, measure(keys, case), rate))
            record.add(rows[-1])
            print(line(rows[-1]), flush=True)
    for config in ("64x4", "64x4 scheduled", "64x3 3/SM scheduled", "64x4 whole"):
        print(*choice(rows, config), sep="\n")
    print(f"took {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
