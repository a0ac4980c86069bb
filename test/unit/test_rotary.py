from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import Stream
from runtime.layers.pass_context import PassContext
from runtime.layers.rope import Rope, RotaryHeads
from runtime.layers.torch_ops import TorchOps, rotate
from runtime.mem_cache.kv_pool import KVPool
from runtime.mem_cache.kv_spec import KVSpec
from runtime.models.config import RopeScaling
from runtime.models.rotary import inverse_frequencies


def table(head_dim: int, positions: int) -> Rope:
    angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(head_dim, 10000.0, None))
    return Rope(torch.cat((angles.cos(), angles.sin()), dim=1))


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The definition: pair i of a head is a complex number rotated by position * theta ** (-2i / head_dim)."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = positions.double()[:, None, None] * 10000.0 ** (-torch.arange(half).double() / half)
    out = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((out.real, out.imag), dim=-1).float()


@pytest.mark.parametrize("head_dim", [2, 16, 64])
def test_rotation_rotates_each_pair_by_its_angle(head_dim: int) -> None:
    x, positions = torch.randn(5, 3, head_dim), torch.tensor([0, 1, 7, 30, 99])
    torch.testing.assert_close(rotate(x, table(head_dim, 100), positions), rotated(x, positions), rtol=1e-4, atol=1e-4)


def reference_frequencies(kind: str, parameters: dict[str, float]) -> torch.Tensor:
    rope = {"rope_type": kind, "rope_theta": 500000.0, **parameters}
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, head_dim=64, max_position_embeddings=4096, rope_parameters=rope)
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]


def test_llama3_scaling_matches_the_reference() -> None:
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 1024)
    expected = reference_frequencies(
        "llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
    )
    torch.testing.assert_close(inverse_frequencies(64, 500000.0, scaling), expected, rtol=1e-6, atol=0)


def test_linear_scaling_matches_the_reference() -> None:
    expected = reference_frequencies("linear", {"factor": 4.0})
    torch.testing.assert_close(inverse_frequencies(64, 500000.0, RopeScaling("linear", 4.0)), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_cache_writes_only_its_slots(normed: bool) -> None:
    positions, slots = torch.tensor([3, 4, 9]), torch.tensor([7, 1, 5])
    qkv = torch.randn(3, 8 * 16)
    pool = KVPool([KVSpec("gqa", 2, 16, 16, torch.float32)] * 2, 9, 1, torch.device("cpu"))
    for k, v in zip(pool.k, pool.v, strict=True):
        k.fill_(5.0)
        v.fill_(6.0)
    norm = RMSNorm(torch.rand(16) + 0.5, 1e-6) if normed else None
    batch: Any = SimpleNamespace(positions=positions, out_cache_loc=slots)
    context = PassContext(batch, pool, SimpleNamespace())  # type: ignore[arg-type]
    q = TorchOps().rope_and_cache(qkv, RotaryHeads(4, 2, 16, table(16, 20), norm, norm), 1, context)
    k_cache, v_cache = pool.flat(1)
    assert torch.all(pool.k[0] == 5.0), "another layer was written"
    heads = qkv.view(3, 8, 16)
    before = heads[:, :6]
    if norm is not None:
        before = before / (before.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    expected = rotated(before, positions)
    torch.testing.assert_close(q, expected[:, :4], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(k_cache[slots], expected[:, 4:], rtol=1e-4, atol=1e-4)
    assert torch.equal(v_cache[slots], heads[:, 6:])
    others = [0, 2, 3, 4, 6, 8, 9]
    assert torch.all(k_cache[others] == 5.0)
    assert torch.all(v_cache[others] == 6.0)


def test_the_residual_stream_stays_float32_beside_narrow_layers() -> None:
    h = torch.full((2, 8), 20000.0)
    linear = Linear.dense(torch.eye(8, dtype=torch.bfloat16))
    out = TorchOps().linear_add(torch.ones(2, 8, dtype=torch.bfloat16), linear, Stream(h)).h
    assert out.dtype == torch.float32
    assert torch.all(out == 20001.0)
