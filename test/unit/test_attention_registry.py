"""What attention backends refuse at start-up, and that the GPU tests cover every supported value."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from runtime.config.attention_caps import ATTENTION_CAPS, AttentionCaps
from runtime.config.device_tuning import H200
from runtime.errors import ConfigError
from runtime.layers.attention import registry, self_check
from runtime.layers.attention.base import AttentionShape, AttentionSpec
from runtime.layers.attention.registry import build_backend
from runtime.layers.attention.self_check import check_backend
from runtime.layers.attention.torch_native import TorchNativeAttention
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import KVPool, PageTable
from runtime.mem_cache.kv_spec import KVSpec

BF16 = torch.bfloat16
CAPS = AttentionCaps(
    dtypes=frozenset({"bfloat16"}),
    head_dims=frozenset({64, 128}),
)
KV = KVSpec("gqa", 2, 64, 64, BF16)
LAYER = AttentionSpec(0, 8, KV, 0.125)


def shape_of(*layers: AttentionSpec) -> AttentionShape:
    return AttentionShape(tuple(replace(layer, layer_id=i) for i, layer in enumerate(layers)), 4, 1, 128, tuning=H200)


SHAPE = shape_of(LAYER, LAYER)


@dataclass
class Narrow:
    """A backend that supports what `CAPS` say."""

    shape: AttentionShape
    kv_pool: KVPool
    page_table: PageTable
    caps = CAPS


def build(name: str, shape: AttentionShape, page_size: int = 16) -> object:
    pool = KVPool([layer.kv for layer in shape.layers], 8, page_size, torch.device("cpu"))
    return build_backend(name, shape, pool, PageTable(5, 128, page_size, torch.device("cpu")))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (shape_of(LAYER, replace(LAYER, kv=replace(KV, key_dim=96))), "head dimension 96, only 64, 128"),
        (shape_of(replace(LAYER, kv=replace(KV, dtype=torch.float16))), "float16, only bfloat16"),
        (shape_of(replace(LAYER, kv=replace(KV, kind="mla"))), "mla KV caches"),
        (shape_of(replace(LAYER, kv=replace(KV, scaled=True))), "scaled KV caches"),
        (shape_of(LAYER, replace(LAYER, sinks=torch.zeros(8))), "attention sinks"),
        (shape_of(replace(LAYER, softcap=50.0)), "a soft cap of attention scores"),
        (shape_of(LAYER, replace(LAYER, num_q_heads=4)), "layers that differ in heads, head dimension or scale"),
        (shape_of(LAYER, replace(LAYER, scale=1.0)), "layers that differ in heads, head dimension or scale"),
    ],
)
def test_unsupported_models_are_refused_with_an_alternative(monkeypatch: pytest.MonkeyPatch, shape: AttentionShape, words: str) -> None:
    monkeypatch.setattr(registry, "backend_class", lambda _name: Narrow)
    assert isinstance(build("narrow", SHAPE), Narrow)
    with pytest.raises(ConfigError, match=f"Attention backend narrow does not support {words}. Use torch_native with --attention-backend"):
        build("narrow", shape)


@pytest.mark.parametrize("head_dim", [8, 64, 96])
@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_torch_supports_every_model(head_dim: int, page_size: int) -> None:
    kv = KVSpec("gqa", 2, head_dim, head_dim, torch.float32)
    layers = (replace(LAYER, kv=kv), replace(LAYER, num_q_heads=4, kv=kv, window=5, sinks=torch.zeros(4)))
    backend: Any = build("torch_native", shape_of(*layers), page_size)
    assert backend.caps == ATTENTION_CAPS["torch_native"]


class Checked(TorchNativeAttention):
    """A sound backend that is checked at start-up."""

    caps = replace(ATTENTION_CAPS["torch_native"], self_check=True)
    error = 0.0

    def forward(self, q: torch.Tensor, layer: AttentionSpec, batch: ForwardBatch) -> torch.Tensor:
        return super().forward(q, layer, batch) * (1 + self.error)


class SlightlyWrong(Checked):
    error = 0.05


class Uncausal(Checked):
    """Wrong in ragged passes only: queries see the whole request."""

    def prepare(self, batch: ForwardBatch, num_passes: int = 1) -> None:
        longer = batch.seq_lens if batch.tokens_per_req else batch.seq_lens + 1
        super().prepare(replace(batch, seq_lens=longer), num_passes)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 8])
def test_a_checked_backend_must_agree_with_torch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int) -> None:
    layers = [replace(LAYER, kv=replace(KV, dtype=dtype), window=window) for window in (-1, -1, 20)]
    for shape in (shape_of(*layers), shape_of(*layers[:2])):
        shape = replace(shape, max_tokens_per_req=width)
        for backend in (Checked, SlightlyWrong, Uncausal):

            def named(name: str, backend: type = backend) -> type:
                return TorchNativeAttention if name == "torch_native" else backend

            monkeypatch.setattr(registry, "backend_class", named)
            monkeypatch.setattr(self_check, "backend_class", named)
            if backend is Checked:
                check_backend("odd", shape, 16, torch.device("cpu"))
                continue
            with pytest.raises(ConfigError, match=r"Attention backend odd gives wrong results .* use another --attention-backend"):
                check_backend("odd", shape, 16, torch.device("cpu"))


def test_the_adapter_is_written_for_the_pinned_flashinfer() -> None:
    """Read as text: FlashInfer is not installed without a GPU."""
    source = (Path(registry.__file__).parent / "flashinfer_adapter.py").read_text()
    (version,) = re.findall(r'PACKAGE, VERSION = "flashinfer-python", "([^"]+)"', source)
    assert f'"flashinfer-python=={version}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


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


def test_the_kernels_cover_every_pair_of_properties() -> None:
    windowed = {(dtype, dim, window) for dtype, dim, masked in KERNELS for window in {"full": "n", "mixed": "ny", "window": "y"}[masked]}
    assert {masked for _, _, masked in KERNELS} == set(MASKED)
    for one, other in itertools.combinations(range(3), 2):
        values = [{kernel[i] for kernel in windowed} for i in (one, other)]
        assert {(kernel[one], kernel[other]) for kernel in windowed} == set(itertools.product(*values))
    assert len(windowed) == 7, "FlashInfer compiles a module for each, for up to a minute"
