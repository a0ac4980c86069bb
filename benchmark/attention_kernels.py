"""Time split attention, cut in several ways, against FA3: microseconds a layer in graphs of 32 layers, each over its own keys.

    PYTHONPATH=python python -m benchmark.attention_kernels --out DIR

Llama-3-8B's heads. The first table says which cut wins where, the second what `SPLIT_MAX_BATCH` should be. Writes attention_kernels.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmark.kernels import BF16, LAYERS, ROOF, D, G, H, decode_batch, microseconds
from runtime.layers.attention import flash_attention
from runtime.layers.attention.base import AttentionShape
from runtime.layers.attention.split_decode import SplitConfig, SplitKeys, SplitShape, SplitWorkspace, split_attention
from runtime.mem_cache.kv_pool import KVPool, PageTable

CUTS = {
    "64x3, 2 a SM": SplitConfig(64, 4, 3, 2, 256),
    "64x3, 1 a SM": SplitConfig(64, 4, 3, 1, 256),
    "64x3, 2 a SM, 512": SplitConfig(64, 4, 3, 2, 512),
    "64x4, 2 a SM": SplitConfig(64, 4, 4, 2, 256),
    "32x4, 2 a SM": SplitConfig(32, 4, 4, 2, 256),
    "128x2 w8, 1 a SM": SplitConfig(128, 8, 2, 1, 256),
    "64x3 w8, 1 a SM": SplitConfig(64, 8, 3, 1, 512),
}
"""Keys of a tile x stages, warps if not 4, programs for each multiprocessor, and the most rows to combine if not 256."""
Case = tuple[int, int, int, int]
"""Page size, width, batch, length."""


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
    keys = SplitKeys(pages, torch.zeros_like(lens), lens, page)
    split_attention(q, cache, cache, keys, shape, SplitWorkspace([shape], device), 1.0, pdl=True)
    torch.cuda.synchronize()


def compile_all(cases: list[Case], workers: int) -> None:
    kinds = {}
    for (page, width, batch, _), config in itertools.product(cases, CUTS.values()):
        padded = 1 << (split_shape(batch, width, config).splits - 1).bit_length()
        kinds[page, width, padded, config.tile, config.num_warps, config.stages] = (page, width, batch, config)
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


def fa3_time(keys: Keys, table: PageTable, q: torch.Tensor, case: Case) -> float:
    _, width, size, length = case
    flash_attention.SPLIT_MAX_BATCH = 0
    shape = AttentionShape(H, G, D, D**-0.5, (-1,) * LAYERS, size, width, 1, length)
    backend, batch = flash_attention.FlashAttention(shape, keys.pool, table), decode_batch(size, width, length)
    backend.plan(batch)
    return microseconds(lambda: [backend.forward(q, layer, batch) for layer in range(LAYERS)]) / LAYERS


def split_time(keys: Keys, table: PageTable, q: torch.Tensor, case: Case, config: SplitConfig) -> float:
    page, width, size, length = case
    shape, pool = split_shape(size, width, config), keys.pool
    workspace = SplitWorkspace([shape], q.device)
    lens = torch.full((size,), length, dtype=torch.int32, device=q.device)
    where = SplitKeys(table.pages, torch.arange(1, size + 1, dtype=torch.int32, device=q.device), lens, page)

    def run() -> list[torch.Tensor]:
        return [split_attention(q, k, v, where, shape, workspace, D**-0.5, pdl=True) for k, v in zip(pool.k, pool.v, strict=True)]

    return microseconds(run) / LAYERS


def measure(keys: Keys, case: Case) -> dict[str, object]:
    page, width, size, length = case
    table = keys.paged(page, size, length)
    q = torch.randn((size * width, H, D), device="cuda").to(BF16)
    fa3 = fa3_time(keys, table, q, case)
    cuts = {name: split_time(keys, table, q, case, config) for name, config in CUTS.items()}
    best = min(cuts, key=lambda name: cuts[name])
    roof = 4 * size * length * G * D / ROOF * 1e6
    times = " ".join(f"{spent:7.1f}" for spent in cuts.values())
    label = f"page {page:2} q {width} B {size:2} L {length:4}"
    print(f"{label}: roof {roof:6.1f} FA3 {fa3:6.1f} | {times} | {fa3 / cuts[best]:.2f}x {best}", flush=True)
    return {"page": page, "width": width, "batch": size, "length": length, "roof us": roof, "FA3 us": fa3, "split us": cuts, "best": best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pages", type=int, nargs="+", default=[64, 1])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1000, 2000, 8000])
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    args = parser.parse_args()
    cases: list[Case] = list(itertools.product(args.pages, args.widths, args.batches, args.lengths))
    started = time.monotonic()
    compile_all(cases, args.workers)
    compiled = time.monotonic() - started
    with torch.inference_mode():
        keys = Keys(max(args.batches) * -(-max(args.lengths) // 64) * 64)
        print("µs a layer: " + ", ".join(CUTS), flush=True)
        rows = [measure(keys, case) for case in cases]
    print(f"compiled in {compiled:.0f} s, all in {time.monotonic() - started:.0f} s")
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "args": {**vars(args), "out": args.out.name}}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "attention_kernels.json").write_text(json.dumps(facts | {"rows": rows}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
