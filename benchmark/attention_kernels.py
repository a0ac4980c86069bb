"""Time split attention, cut in several ways, against FA3: microseconds a layer in graphs of 32 layers, each over its own keys.

    PYTHONPATH=python python -m benchmark.attention_kernels --out DIR

Llama-3-8B's heads. Every cut's result is compared with FA3's before its time is taken. The last table is what `split_wins` of
flash_attention.py should say. Writes attention_kernels.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmark.kernels import BF16, LAYERS, ROOF, D, G, H, decode_batch, microseconds
from runtime.layers.attention import flash_attention
from runtime.layers.attention.base import AttentionShape
from runtime.layers.attention.deal import deal
from runtime.layers.attention.split_decode import SplitConfig, SplitKeys, SplitShape, SplitWorkspace, split_attention
from runtime.mem_cache.kv_pool import KVPool, PageTable

CUTS = {
    "64x4": SplitConfig(64, 4, 4, 2),
    "64x3 3/SM": SplitConfig(64, 4, 3, 3),
    "128x3 1/SM": SplitConfig(128, 4, 3, 1, alone=2),
    "64x4 dealt": SplitConfig(64, 4, 4, 2, dealt=True),
    "64x3 3/SM dealt": SplitConfig(64, 4, 3, 3, dealt=True),
    "128x3 1/SM dealt": SplitConfig(128, 4, 3, 1, dealt=True),
}
"""Keys of a tile x stages, warps if not 4, programs for each multiprocessor if not 2, tiles taken alone if not 256 keys."""
TOLERANCE = 2e-2
"""Relative error of a query and head between two ways of bfloat16."""


class Case(NamedTuple):
    """One kind of pass. Ragged lengths lie between a quarter and seven quarters of `length`."""

    page: int
    width: int
    batch: int
    length: int
    ragged: bool

    def lens(self) -> torch.Tensor:
        """int32 [batch], of mean `length`."""
        spread = torch.linspace(0.25, 1.75, self.batch) if self.ragged else torch.ones(self.batch)
        return (spread[torch.randperm(self.batch)] * self.length).to("cuda", torch.int32)

    @property
    def longest(self) -> int:
        """Keys of the longest request."""
        return self.length * (7 if self.ragged else 4) // 4


def split_shape(batch: int, width: int, config: SplitConfig) -> SplitShape:
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    return SplitShape(batch, width, H, G, D, num_sms, config)


def compile_kind(kind: tuple[int, int, int, SplitConfig]) -> None:
    """Run one kind of pass once, so that its kernel lies in the compiler's cache."""
    page, width, batch, config = kind
    shape, device = split_shape(batch, width, config), torch.device("cuda")
    cache = torch.zeros((width // page + 2, page, G, D), dtype=BF16, device=device)
    pages = torch.zeros((1, width // page + 1), dtype=torch.int32, device=device)
    lens = torch.full((batch,), width, dtype=torch.int32, device=device)
    q = torch.zeros((batch * width, H, D), dtype=BF16, device=device)
    keys = SplitKeys(pages, torch.zeros_like(lens), lens, page, shape.empty_deal(device))
    if keys.deal is not None:
        deal(lens, shape.splits, config.tile, keys.deal)
    split_attention(q, cache, cache, keys, shape, SplitWorkspace([shape], device), 1.0, pdl=True)
    torch.cuda.synchronize()


def compile_all(cases: list[Case], workers: int) -> None:
    kinds = {}
    for (page, width, batch, _, _), config in itertools.product(cases, CUTS.values()):
        padded = 1 << (split_shape(batch, width, config).splits - 1).bit_length()
        kinds[page, width, padded, config.tile, config.num_warps, config.stages, config.alone, config.dealt] = (page, width, batch, config)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_kind, kinds.values(), chunksize=4))
    print(f"{len(kinds)} kernels compiled", flush=True)


class Keys:
    """KV of all layers, allocated once and looked at as pages of any size."""

    def __init__(self, slots: int) -> None:
        self.pool = KVPool(LAYERS, slots // 64, 64, G, D, BF16, torch.device("cuda"))
        for cache in (*self.pool.k, *self.pool.v):
            cache.normal_()
        self._k, self._v = self.pool.k, self.pool.v

    def paged(self, page: int, batch: int, length: int) -> PageTable:
        """Cut the pool into pages, and deal them to requests at random."""
        self.pool.page_size = page
        self.pool.k, self.pool.v = ([cache.view(-1, page, G, D) for cache in caches] for caches in (self._k, self._v))
        cols = -(-length // page)
        table = PageTable(batch + 1, cols * page, page, torch.device("cuda"))
        table.pages[1:] = (torch.randperm(batch * cols, device="cuda") + 1).view(batch, cols).int()
        return table


def slots(case: Case) -> int:
    """Slots of KV that a case fills, in whole pages of 64."""
    return case.batch * -(-case.longest // 64) * 64


def that_fit(cases: list[Case]) -> list[Case]:
    """The cases whose KV leaves a fifth of the free memory."""
    room = torch.cuda.mem_get_info()[0] * 4 // 5 // (LAYERS * 2 * G * D * 2)
    fit = [case for case in cases if slots(case) <= room]
    if len(fit) < len(cases):
        print(f"{len(cases) - len(fit)} of {len(cases)} cases need more memory than is free")
    return fit


def runs(keys: Keys, case: Case) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """FA3 and every cut, as functions that attend in all layers. All see the same queries, keys and lengths."""
    page, width, size, _, _ = case
    table, lens, pool = keys.paged(page, size, case.longest), case.lens(), keys.pool
    q = torch.randn((size * width, H, D), device="cuda").to(BF16)
    rows = torch.arange(1, size + 1, dtype=torch.int32, device="cuda")
    shape = AttentionShape(H, G, D, D**-0.5, (-1,) * LAYERS, size, width, 1, case.longest)
    backend, batch = flash_attention.FlashAttention(shape, pool, table), decode_batch(size, width, case.longest)
    batch.seq_lens.copy_(lens)
    backend.plan(batch)

    def fa3() -> list[torch.Tensor]:
        return [backend.forward(q, layer, batch).view(q.shape) for layer in range(LAYERS)]

    def split(config: SplitConfig) -> Callable[[], list[torch.Tensor]]:
        cut = split_shape(size, width, config)
        workspace = SplitWorkspace([cut], q.device)
        where = SplitKeys(table.pages, rows, lens, page, cut.empty_deal(q.device))
        if where.deal is not None:
            deal(lens, cut.splits, config.tile, where.deal)
        return lambda: [split_attention(q, k, v, where, cut, workspace, D**-0.5, pdl=True) for k, v in zip(pool.k, pool.v, strict=True)]

    return {"FA3": fa3} | {name: split(config) for name, config in CUTS.items()}


def compare(name: str, case: Case, got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Raise where a layer's output is not FA3's."""
    error = torch.stack([((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)).max() for a, b in zip(got, want, strict=True)])
    if not bool((error < TOLERANCE).all()):
        raise SystemExit(f"{name} computes something else than FA3 for {case}: relative error {float(error.max()):.1e}")


def measure(keys: Keys, case: Case) -> dict[str, object]:
    ways = runs(keys, case)
    torch.cuda.synchronize()
    want = ways["FA3"]()
    for name, run in ways.items():
        compare(name, case, run(), want)
    times = {name: microseconds(run) / LAYERS for name, run in ways.items()}
    fa3 = times.pop("FA3")
    best = min(times, key=lambda name: times[name])
    roof = 4 * case.batch * case.length * G * D / ROOF * 1e6
    label = f"page {case.page:2} q {case.width} B {case.batch:2} L {case.length:4}{'~' if case.ragged else ' '}"
    cells = " ".join(f"{spent:6.1f}" for spent in times.values())
    print(f"{label}: roof {roof:6.1f} FA3 {fa3:6.1f} | {cells} | {fa3 / times[best]:.2f}x {best}", flush=True)
    return {**case._asdict(), "roof us": roof, "FA3 us": fa3, "split us": times, "best": best}


def print_choice(rows: list[dict[str, Any]], cut: str) -> None:
    """How much faster than FA3 one cut is, by width and batch: the least and the mean over the lengths."""
    print(f"FA3's time over that of {cut}: least, mean")
    for (width, batch), group in itertools.groupby(rows, key=lambda row: (row["width"], row["batch"])):
        ratios = [row["FA3 us"] / row["split us"][cut] for row in group]
        print(f"q {width} B {batch:2}: {min(ratios):.2f} {sum(ratios) / len(ratios):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pages", type=int, nargs="+", default=[64])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1000, 2000, 8000])
    parser.add_argument("--ragged", type=int, nargs="*", default=[2000], help="mean lengths of batches of unlike requests")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    args = parser.parse_args()
    lengths = [(length, False) for length in args.lengths] + [(length, True) for length in args.ragged]
    cases = [
        Case(page, width, batch, length, ragged)
        for page, width, batch, (length, ragged) in itertools.product(args.pages, args.widths, args.batches, lengths)
        if not ragged or batch > 1
    ]
    started = time.monotonic()
    compile_all(cases, args.workers)
    compiled = time.monotonic() - started
    flash_attention.split_wins = lambda batch: False
    with torch.inference_mode():
        cases = that_fit(cases)
        keys = Keys(max(map(slots, cases)))
        print("µs a layer: " + ", ".join(CUTS), flush=True)
        rows = [measure(keys, case) for case in cases]
    for cut in ("64x4", "64x4 dealt"):
        print_choice(rows, cut)
    print(f"compiled in {compiled:.0f} s, all in {time.monotonic() - started:.0f} s")
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "args": {**vars(args), "out": args.out.name}}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "attention_kernels.json").write_text(json.dumps(facts | {"rows": rows}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
