"""Random models and passes for the attention tests, chosen so that a few of them cover all values and most pairs of values."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch

BF16, FP16 = torch.bfloat16, torch.float16
MAX_LEN = 2304
"""The longest KV of any request."""
WINDOWS = (0, 20, 130, 1000)
GROUPS = (1, 2, 3, 4, 5, 7, 8)
KV_HEADS = (1, 2, 3)
PAGE_SIZES = (1, 16, 64, 1024)
WIDTHS = (1, 2, 5, 8, 16)
BATCHES = (1, 4, 7, 13, 26)
STEPS = (1, 3)
MASKED = ("full", "mixed", "window")
"""Which of the two layers have a sliding window: none, the second, both."""
KERNELS = ((BF16, 64, "full"), (FP16, 64, "window"), (BF16, 128, "mixed"), (FP16, 128, "full"), (BF16, 256, "full"), (FP16, 256, "window"))
"""Dtype, head dimension and windows. FlashInfer compiles a module for each, so these cover all pairs with the fewest modules."""


@dataclass(frozen=True)
class Kind:
    """A model of two layers, and the fixed-width passes of one size.

    Attributes:
        kernel: one of `KERNELS`.
        window: number of keys before itself that a query sees in layers with a window.
        group: query heads per KV head.
        kv_heads, page_size: sizes of the pool.
        width: queries per request.
        batch: requests, including padding.
        steps: passes per plan.
        tail: tree tail of the first pass; 0 for causal attention.
        sinks: whether the layers have attention sinks.
    """

    kernel: tuple[torch.dtype, int, str]
    window: int
    group: int
    kv_heads: int
    page_size: int
    width: int
    batch: int
    steps: int
    tail: int = 0
    sinks: bool = False

    def __str__(self) -> str:
        dtype, head_dim, masked = self.kernel
        return (
            f"{str(dtype).removeprefix('torch.')}-d{head_dim}-{masked}-{self.window}-h{self.group * self.kv_heads}of{self.kv_heads}"
            f"-page{self.page_size}-{self.batch}x{self.width}x{self.steps}-tail{self.tail}{'-sinks' if self.sinks else ''}"
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.kernel[0]

    @property
    def head_dim(self) -> int:
        return self.kernel[1]

    @property
    def num_q_heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def windows(self) -> tuple[int, int]:
        """By layer, as `AttentionShape.window`."""
        return {"full": (-1, -1), "mixed": (-1, self.window), "window": (self.window, self.window // 2)}[self.kernel[2]]

    @property
    def longest(self) -> int:
        """The longest request of the first pass. The last pass, and length bounds above the real lengths, stay within `MAX_LEN`."""
        return MAX_LEN - 8 - (self.steps - 1) * self.width


def draw(rng: random.Random, trees: bool) -> Kind:
    """A random kind. Trees have no window, and their tail has the queries of all passes and at most 64 keys."""
    kernel = rng.choice([k for k in KERNELS if not trees or k[2] == "full"])
    width, steps = rng.choice(WIDTHS), rng.choice(STEPS)
    return Kind(
        kernel=kernel,
        window=-1 if kernel[2] == "full" else rng.choice(WINDOWS),
        group=rng.choice(GROUPS),
        kv_heads=rng.choice(KV_HEADS),
        page_size=rng.choice(PAGE_SIZES),
        width=width,
        batch=rng.choice(BATCHES),
        steps=steps,
        tail=rng.choice((width, (width + 64 - (steps - 1) * width) // 2, 64 - (steps - 1) * width)) if trees else 0,
    )


def pairs(kind: Kind) -> set[tuple[object, ...]]:
    """All pairs of (position, value) of a kind's fields."""
    return set(itertools.combinations(enumerate(list(vars(kind).values())[:8]), 2))


def choose(count: int, seed: int, trees: bool = False) -> list[Kind]:
    """Choose kinds greedily: each is, of a thousand random ones, the one with the most pairs of values that were not covered before."""
    rng, shown, chosen = random.Random(seed), set[tuple[object, ...]](), list[Kind]()
    for _ in range(count):
        chosen.append(max((draw(rng, trees) for _ in range(1000)), key=lambda kind: len(pairs(kind) - shown)))
        shown |= pairs(chosen[-1])
    return chosen


CAUSAL_KINDS = choose(16, seed=1)
TREE_KINDS = choose(10, seed=2, trees=True)
SINK_KINDS = [
    Kind((BF16, 64, "mixed"), 127, 8, 2, 1, 1, 4, 3, 0, sinks=True),
    Kind((BF16, 64, "mixed"), 127, 8, 1, 64, 4, 7, 1, 0, sinks=True),
    Kind((FP16, 64, "window"), 127, 8, 2, 16, 8, 13, 1, 0, sinks=True),
    Kind((BF16, 64, "full"), -1, 8, 2, 16, 4, 4, 1, 12, sinks=True),
]
"""Layers with sinks, in the shape of gpt-oss. FlashInfer does not support sinks."""
