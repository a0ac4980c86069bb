"""What attention backends refuse when they are built, and that the checks on a GPU leave out no value of what they take."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from gpu.attention_kinds import (
    BATCHES,
    CAUSAL_KINDS,
    GROUPS,
    KERNELS,
    KV_HEADS,
    MASKED,
    MAX_LEN,
    PAGE_SIZES,
    STEPS,
    TREE_KINDS,
    WIDTHS,
    WINDOWS,
    Kind,
)
from runtime.errors import ConfigError
from runtime.layers.attention import registry
from runtime.layers.attention.base import AttentionCaps, AttentionShape
from runtime.layers.attention.registry import BACKENDS, backend_class, build_backend
from runtime.mem_cache.kv_pool import KVPool, PageTable

CAPS = AttentionCaps(
    tree_mask=True,
    page_sizes=frozenset((16, 64)),
    head_dims=frozenset((64, 128)),
    cuda_graph=True,
    sliding_window=False,
)
SHAPE = AttentionShape(8, 2, 64, 0.125, (-1, -1), 4, 1, 1, 128)


@dataclass
class Narrow:
    """A backend that takes what `CAPS` say."""

    shape: AttentionShape
    kv_pool: KVPool
    page_table: PageTable
    caps = CAPS


def build(name: str, shape: AttentionShape, page_size: int = 16) -> object:
    pool = KVPool(2, 8, page_size, shape.num_kv_heads, shape.head_dim, torch.float32, torch.device("cpu"))
    return build_backend(name, shape, pool, PageTable(5, 128, page_size, torch.device("cpu")))


@pytest.mark.parametrize(
    ("shape", "page_size", "words"),
    [
        (replace(SHAPE, head_dim=96), 16, "takes head dimensions 64, 128, not 96"),
        (SHAPE, 32, "takes page sizes 16, 64, not 32"),
        (replace(SHAPE, window=(-1, 4095)), 16, "takes layers with full attention, not a sliding window of 4096"),
        (replace(SHAPE, window=(0, 0)), 16, "takes layers with full attention, not a sliding window of 1"),
    ],
)
def test_what_a_backend_does_not_take_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, shape: AttentionShape, page_size: int, words: str
) -> None:
    monkeypatch.setattr(registry, "backend_class", lambda _name: Narrow)
    assert isinstance(build("narrow", SHAPE), Narrow)
    with pytest.raises(ConfigError, match=f"attention backend narrow {words}; use torch_native, with --attention-backend"):
        build("narrow", shape, page_size)


@pytest.mark.parametrize("head_dim", [8, 64, 96])
@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_torch_takes_every_model(head_dim: int, page_size: int) -> None:
    build("torch_native", replace(SHAPE, head_dim=head_dim, window=(-1, 5)), page_size)


def test_an_unknown_backend_is_refused_with_all_names() -> None:
    with pytest.raises(ConfigError, match=f"'triton' is unknown; it must be one of {', '.join(BACKENDS)}"):
        backend_class("triton")


@pytest.mark.parametrize("kinds", [CAUSAL_KINDS, TREE_KINDS], ids=["causal", "trees"])
def test_the_kinds_show_every_value(kinds: list[Kind]) -> None:
    causal = kinds is CAUSAL_KINDS
    assert {kind.kernel for kind in kinds} == {kernel for kernel in KERNELS if causal or kernel[2] == "full"}
    assert {kind.window for kind in kinds} == {-1, *WINDOWS} if causal else {-1}
    assert {kind.group for kind in kinds} == set(GROUPS)
    assert {kind.kv_heads for kind in kinds} == set(KV_HEADS)
    assert {kind.page_size for kind in kinds} == set(PAGE_SIZES)
    assert {kind.width for kind in kinds} == set(WIDTHS)
    assert {kind.batch for kind in kinds} == set(BATCHES)
    assert {kind.steps for kind in kinds} == set(STEPS)
    assert all(kind.longest + (kind.steps - 1) * kind.width + 8 <= MAX_LEN for kind in kinds)
    assert all(max(kind.tail, 1) + (kind.steps - 1) * kind.width <= 64 for kind in kinds if kind.tail), "a mask has 64 bits"
    assert all((kind.tail >= kind.width) != causal for kind in kinds)


def test_the_kernels_show_every_pair_of_type_head_dimension_and_window() -> None:
    windowed = {(dtype, dim, window) for dtype, dim, masked in KERNELS for window in {"full": "n", "mixed": "ny", "window": "y"}[masked]}
    assert {masked for _, _, masked in KERNELS} == set(MASKED)
    for one, other in itertools.combinations(range(3), 2):
        values = [{kernel[i] for kernel in windowed} for i in (one, other)]
        assert {(kernel[one], kernel[other]) for kernel in windowed} == set(itertools.product(*values))
    assert len(windowed) == 7, "FlashInfer compiles a module for each, for up to a minute"
