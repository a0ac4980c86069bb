"""The data that kernels are timed on: random weights, KV and batches with the sizes of Llama-3-8B, and the roof of its attention."""

from __future__ import annotations

import torch

from benchmark.shapes import TARGET, Shape
from runtime.config.device_tuning import H200
from runtime.layers import forward_batch
from runtime.layers.attention.base import AttentionShape, AttentionSpec
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.linear import Linear
from runtime.mem_cache.kv_pool import KVPool, PageTable
from runtime.mem_cache.kv_spec import KVSpec

SHAPE = Shape.read(TARGET)
H, G, D = SHAPE.q_heads, SHAPE.kv_heads, SHAPE.head_dim
WEIGHTS = {
    "qkv": ((H + 2 * G) * D, SHAPE.hidden),
    "o": (SHAPE.hidden, H * D),
    "gate-up": (2 * SHAPE.intermediate, SHAPE.hidden),
    "down": (SHAPE.hidden, SHAPE.intermediate),
    "head": (SHAPE.vocab, SHAPE.hidden),
}
"""Rows and columns of the weights of a layer and of the head."""
BF16 = torch.bfloat16
KV = KVSpec("gqa", G, D, D, BF16)
CUDA = torch.device("cuda")


def attention_roof_us(batch: int, length: float, rate: float | None) -> float | None:
    """Microseconds to read the keys and values of one layer."""
    return None if rate is None else batch * length * SHAPE.kv_bytes_per_token / SHAPE.layers / rate * 1e6


def linear(name: str, device: torch.device = CUDA) -> Linear:
    """A random weight of `WEIGHTS`, scaled so that the outputs of its GEMM have the magnitude of the inputs."""
    size = WEIGHTS[name]
    return Linear.dense(torch.empty(size, dtype=BF16, device=device).normal_(std=size[1] ** -0.5))


def decode_batch(size: int, width: int, length: int, device: torch.device = CUDA) -> ForwardBatch:
    """`size` requests with `length` tokens each, of which the last `width` are in this pass."""
    return forward_batch.decode_batch(torch.arange(1, size + 1, device=device), width, length)


def page_table(size: int, length: int, page_size: int, device: torch.device = CUDA) -> PageTable:
    """Rows 1..`size` with random pages for `length` tokens each; page 0 is unused."""
    table = PageTable(size + 1, length, page_size, device)
    table.pages[1:] = (torch.randperm(size * table.max_pages, device=device) + 1).view(size, table.max_pages).int()
    return table


def kv_pool(layers: int, pages: int, page_size: int, device: torch.device = CUDA) -> KVPool:
    """Random keys and values."""
    pool = KVPool([KV] * layers, pages, page_size, device)
    for cache in (*pool.k, *pool.v):
        cache.normal_()
    return pool


def attention_shape(layers: int, size: int, width: int, context: int) -> AttentionShape:
    """The attention shape of passes with full attention."""
    return AttentionShape(tuple(AttentionSpec(i, H, KV, D**-0.5) for i in range(layers)), size, width, context, tuning=H200)


def attention_world(
    size: int, width: int, length: int, page_size: int, layers: int, device: torch.device = CUDA
) -> tuple[AttentionShape, KVPool, PageTable]:
    """Shape, pool and page table for a backend, with capacity for a few tokens more than `length`."""
    table = page_table(size, length + 64, page_size, device)
    shape = attention_shape(layers, size, width, table.max_pages * page_size)
    return shape, kv_pool(layers, size * table.max_pages, page_size, device), table
