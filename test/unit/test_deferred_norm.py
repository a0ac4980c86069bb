"""Models announce the norm that reads the stream next, so that operations may defer it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from runtime.batch import ForwardMode
from runtime.layers.gemm.deferred_norm import DeferredNorm
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import BlockOps, Stream
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.weight_loader import dummy_weights
from runtime.models.decoder import DecoderModel
from runtime.models.registry import build_model
from unit.test_eagle_models import CPU, Rig, checkpoint, draft_json, load_head, save
from unit.test_models import Runner
from unit.tiny import tiny_model

LAYERS, PARTS = 3, 4


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


class DeferringOps(TorchOps):
    """The plain operations with norms deferred as on a GPU. `deferred` and `computed` count norms."""

    def __init__(self) -> None:
        self.deferred = self.computed = 0

    def linear_add(self, x: torch.Tensor, linear: Linear, stream: Stream, next_norm: RMSNorm | None = None) -> Stream:
        h = stream.h.add_(linear(x))
        if next_norm is None:
            return Stream(h)
        squares = h.square().unflatten(1, (PARTS, -1)).sum(2)
        return Stream(h, next_norm, DeferredNorm(next_norm.weight, h * next_norm.weight, squares))

    def norm_linear(self, stream: Stream, norm: RMSNorm, linear: Linear) -> torch.Tensor:
        if stream.deferred is None:
            self.computed += 1
            return super().norm_linear(stream, norm, linear)
        assert stream.norm is norm, "another norm was deferred"
        assert torch.equal(stream.deferred.scaled, stream.h * norm.weight), "the stream was changed after the norm was deferred"
        self.deferred += 1
        mean = stream.deferred.squares.sum(1, keepdim=True) / stream.h.shape[1]
        out = F.linear(stream.deferred.scaled, linear.weight) * (mean + norm.eps).rsqrt()
        return out if linear.bias is None else out + linear.bias


def target(ops: BlockOps, **changes: object) -> DecoderModel:
    """A tiny model whose norms and biases all differ."""
    model = build_model(tiny_model(num_layers=LAYERS, window=(-1,) * LAYERS, **changes), ops, torch.float32, CPU, None)
    weights = dict(dummy_weights(model.expected_weights(), torch.float32, CPU, seed=5))
    g = torch.Generator().manual_seed(6)
    model.load((name, 1 + 0.3 * torch.randn(t.shape, generator=g) if t.dim() == 1 else t) for name, t in weights.items())
    return model


@pytest.mark.parametrize("biases", [False, True])
def test_the_target_defers_every_norm_but_the_first(biases: bool) -> None:
    ids, aux = torch.tensor([5, 6, 7, 8]), (0, 1, LAYERS)
    deferring = DeferringOps()
    got, want = (
        Runner(target(ops, qkv_bias=biases, mlp_bias=biases), 1).hidden(ids, 0, ForwardMode.EXTEND, aux) for ops in (deferring, TorchOps())
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert (deferring.computed, deferring.deferred) == (1, 2 * LAYERS - 1)


@pytest.mark.parametrize(
    ("raw", "computed"), [(draft_json("LlamaForCausalLMEagle", num_hidden_layers=2), 1), (draft_json("LlamaForCausalLMEagle3"), 0)]
)
def test_a_head_defers_the_norm_inside_each_block(tmp_path: Path, raw: dict[str, Any], computed: int) -> None:
    folder, deferring = save(tmp_path, raw, checkpoint(raw)), DeferringOps()
    heads = [load_head(folder, target(ops)) for ops in (deferring, TorchOps())]
    states = [torch.randn(2, heads[0].feature_width, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    got, want = (Rig(head, 1).run([[3, 4], [5, 6]], states, [0, 0]) for head in heads)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert (deferring.computed, deferring.deferred) == (computed, raw["num_hidden_layers"])
