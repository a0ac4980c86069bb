"""Time every kernel of a decode step on one GPU, in graphs over rotating weights: microseconds and TB/s, against cuBLAS.

    PYTHONPATH=python python -m benchmark.kernels --out benchmark/results --rows 1 4 16 32

Parts: `sweep` tries the cuts of the small matrix product for each product of Llama-3-8B; `step` runs the whole decode step of 32 layers
and the head, each kind of kernel added in turn; `attention` times the backends. Writes kernels.json to the folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmark.gemm_sweep import sweep
from runtime.batch import ForwardMode
from runtime.forward_batch import ForwardBatch
from runtime.layers.attention.base import AttentionShape
from runtime.layers.attention.registry import build_backend
from runtime.layers.cuda_ops import CudaOps
from runtime.layers.gemm_choice import describe
from runtime.layers.linear import Linear
from runtime.layers.ops import HeadLayout, RMSNorm, Rope, Stream
from runtime.mem_cache.kv_pool import KVPool, PageTable

LAYERS, HIDDEN, MIDDLE, VOCAB, H, G, D = 32, 4096, 14336, 128256, 32, 8, 128
ROOF = 4.32e12
"""Bytes a second that an H200 reads, measured."""
BF16 = torch.bfloat16
REPLAYS = 9


@dataclass
class Layer:
    attn_norm: RMSNorm
    mlp_norm: RMSNorm
    qkv_proj: Linear
    o_proj: Linear
    gate_up_proj: Linear
    down_proj: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj


def linear(out: int, width: int) -> Linear:
    return Linear(torch.empty((out, width), dtype=BF16, device="cuda").normal_(std=width**-0.5))


def model(layers: int) -> tuple[list[Layer], Linear]:
    norm = RMSNorm(torch.ones(HIDDEN, dtype=BF16, device="cuda"), 1e-5)
    sizes = (((H + 2 * G) * D, HIDDEN), (HIDDEN, H * D), (2 * MIDDLE, HIDDEN), (HIDDEN, MIDDLE))
    return [Layer(norm, norm, *(linear(*size) for size in sizes)) for _ in range(layers)], linear(VOCAB, HIDDEN)


def microseconds(run: Callable[[], object]) -> float:
    """Median of graph replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return float(np.median([a.elapsed_time(b) for a, b in itertools.pairwise(events)]) * 1000)


def decode_batch(size: int, width: int, length: int) -> ForwardBatch:
    def ints(n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.int64, device="cuda")

    lens = np.full(size, length, dtype=np.int32)
    positions = (torch.arange(width, device="cuda") + length - width).repeat(size)
    return ForwardBatch(
        mode=ForwardMode.DECODE,
        batch_size=size,
        tokens_per_req=width,
        input_ids=ints(size * width),
        positions=positions,
        out_cache_loc=ints(size * width),
        req_pool_indices=torch.arange(1, size + 1, device="cuda"),
        seq_lens=torch.from_numpy(lens).cuda(),
        qo_indptr=torch.arange(size + 1, dtype=torch.int32, device="cuda") * width,
        seq_len_bounds=lens,
    )


def world(size: int, width: int, length: int, page_size: int, layers: int) -> tuple[AttentionShape, KVPool, PageTable]:
    cols = -(-(length + 64) // page_size)
    table = PageTable(size + 1, cols * page_size, page_size, torch.device("cuda"))
    table.pages[1:] = (torch.randperm(size * cols, device="cuda") + 1).view(size, cols).int()
    pool = KVPool(layers, size * cols, page_size, G, D, BF16, torch.device("cuda"))
    for cache in (*pool.k, *pool.v):
        cache.normal_()
    return AttentionShape(H, G, D, D**-0.5, (-1,) * layers, size, width, 1, cols * page_size), pool, table


def step(ops: CudaOps, layers: list[Layer], head: Linear, size: int, width: int, length: int, backend: str) -> dict[str, object]:
    """The decode step of `size` requests of `width` tokens with all its kernels, then without attention, rotary and head in turn."""
    shape, pool, table = world(size, width, length, 1, len(layers))
    attention = build_backend(backend, shape, pool, table)
    batch = decode_batch(size, width, length)
    batch.out_cache_loc.copy_(table.slots(batch.req_pool_indices.repeat_interleave(width), batch.positions))
    rope, layout = Rope(torch.randn((length + 64, D), device="cuda")), HeadLayout(H, G, D)
    start = torch.randn((size * width, HIDDEN), device="cuda")
    q_only = torch.randn((size * width, H, D), device="cuda").to(BF16)
    scores = torch.empty((size * width, VOCAB), device="cuda")
    attention.plan(batch)

    def run(with_rope: bool, with_attention: bool, with_head: bool) -> None:
        stream = Stream(start.clone())
        for i, layer in enumerate(layers):
            q = q_only
            qkv = ops.norm_linear(stream, layer.attn_norm, layer.qkv_proj)
            if with_rope:
                q = ops.rope_and_cache(qkv, layout, rope, None, None, batch.positions, batch.out_cache_loc, *pool.flat(i))
            mixed = attention.forward(q, i, batch) if with_attention else q.flatten(1)
            stream = ops.linear_add(mixed, layer.o_proj, stream, layer.mlp_norm)
            following = layers[i + 1].attn_norm if i + 1 < len(layers) else None
            stream = ops.linear_add(ops.norm_gate_up(stream, layer.mlp_norm, layer.gate_up_proj), layer.down_proj, stream, following)
        if with_head:
            ops.logits(ops.norm(stream.h, layers[0].attn_norm, BF16), head, scores)

    times = {
        "all": microseconds(lambda: run(True, True, True)),
        "without attention": microseconds(lambda: run(True, False, True)),
        "without attention, rotary": microseconds(lambda: run(False, False, True)),
        "products of the layers": microseconds(lambda: run(False, False, False)),
    }
    weights = sum(w.weight.nbytes for layer in layers for w in layer.linears) + head.weight.nbytes
    kv = 2 * len(layers) * size * length * G * D * 2
    roof = (weights + kv) / ROOF * 1e6
    row: dict[str, object] = {
        "batch": size,
        "width": width,
        "length": length,
        "backend": backend,
        "pdl": ops.pdl,
        "roof us": round(roof, 1),
    }
    line = ", ".join(f"{name} {spent / 1000:.3f}" for name, spent in times.items())
    print(f"step batch {size} width {width} {backend} pdl {ops.pdl}: ms {line}; {roof / times['all']:.0%} of the roof", flush=True)
    return row | {name: round(spent, 1) for name, spent in times.items()}


def attention_times(size: int, width: int, length: int, backend: str, page_size: int) -> dict[str, object]:
    shape, pool, table = world(size, width, length, page_size, 4)
    attention, batch = build_backend(backend, shape, pool, table), decode_batch(size, width, length)
    q = torch.randn((size * width, H, D), device="cuda").to(BF16)
    attention.plan(batch)
    spent = microseconds(lambda: [attention.forward(q, i % 4, batch) for i in range(16)]) / 16
    rate = 4 * size * length * G * D / spent / 1e6
    print(f"attention {backend} batch {size} width {width} page {page_size}: {spent:.1f} µs {rate:.2f} TB/s", flush=True)
    return {
        "backend": backend,
        "batch": size,
        "width": width,
        "length": length,
        "page": page_size,
        "us": round(spent, 2),
        "TB/s": round(rate, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["sweep", "step", "attention"], choices=["sweep", "step", "attention"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--backends", nargs="+", default=["fa3"], choices=["fa3", "flashinfer"])
    args = parser.parse_args()
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "args": {**vars(args), "out": args.out.name},
    }
    with torch.inference_mode():
        early = CudaOps()
        if "sweep" in args.parts:
            result["sweep"] = sweep(args.rows)
            torch.cuda.empty_cache()
        if "step" in args.parts:
            layers, head = model(args.layers)
            cases = [(rows, 1) for rows in args.rows] + [(1, 4), (4, 4), (8, 4)]
            result["prepared"] = early.prepare(layers, head, [size * width for size, width in cases], timed=True)
            plain = CudaOps(pdl=False)
            plain.choices = dict(early.choices)
            result["step"] = [
                step(ops, layers, head, size, width, args.length, backend)
                for backend in args.backends
                for size, width in cases
                for ops in (plain, early)
            ]
        if "attention" in args.parts:
            sizes = itertools.product(args.backends, (1, 16), (1, 4), (1, 8, 32))
            result["attention"] = [attention_times(size, width, args.length, name, page) for name, page, width, size in sizes]
    result["choices"] = {" ".join(map(str, key)): describe(choice) for key, choice in early.choices.items()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "kernels.json").write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
