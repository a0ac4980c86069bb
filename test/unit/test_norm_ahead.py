"""Models announce the norm that reads the stream next, so that a product may leave what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from runtime.batch import ForwardMode
from runtime.layers.gemm.deferred_norm import NormAhead
from runtime.layers.linear import Linear
from runtime.layers.ops import BlockOps, RMSNorm, Stream
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


class DividedNorms(TorchOps):
    """The plain form with norms divided as on a GPU. `left` and `computed` count norms by where they were taken."""

    def __init__(self) -> None:
        self.left = self.computed = 0

    def linear_add(self, x: torch.Tensor, linear: Linear, stream: Stream, following: RMSNorm | None = None) -> Stream:
        h = stream.h.add_(linear(x))
        if following is None:
            return Stream(h)
        squares = h.square().unflatten(1, (PARTS, -1)).sum(2)
        return Stream(h, following, NormAhead(following.weight, h * following.weight, squares))

    def norm_linear(self, stream: Stream, norm: RMSNorm, linear: Linear) -> torch.Tensor:
        if stream.ahead is None:
            self.computed += 1
            return super().norm_linear(stream, norm, linear)
        assert stream.norm is norm, "what was left ahead is for another norm"
        assert torch.equal(stream.ahead.scaled, stream.h * norm.weight), "the stream was changed behind what was left"
        self.left += 1
        mean = stream.ahead.squares.sum(1, keepdim=True) / stream.h.shape[1]
        product = F.linear(stream.ahead.scaled, linear.weight) * (mean + norm.eps).rsqrt()
        return product if linear.bias is None else product + linear.bias


def target(ops: BlockOps, **changes: object) -> DecoderModel:
    """A tiny model whose norms and biases all differ."""
    model = build_model(tiny_model(num_layers=LAYERS, window=(-1,) * LAYERS, **changes), ops, torch.float32, CPU, None)
    weights = dict(dummy_weights(model.expected_weights(), torch.float32, CPU, seed=5))
    g = torch.Generator().manual_seed(6)
    model.load((name, 1 + 0.3 * torch.randn(t.shape, generator=g) if t.dim() == 1 else t) for name, t in weights.items())
    return model


@pytest.mark.parametrize("biases", [False, True])
def test_every_norm_of_the_target_but_the_first_is_left_ahead(biases: bool) -> None:
    ids, aux = torch.tensor([5, 6, 7, 8]), (0, 1, LAYERS)
    divided = DividedNorms()
    got, want = (
        Runner(target(ops, qkv_bias=biases, mlp_bias=biases), 1).hidden(ids, 0, ForwardMode.EXTEND, aux) for ops in (divided, TorchOps())
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert (divided.computed, divided.left) == (1, 2 * LAYERS - 1)


@pytest.mark.parametrize(
    ("raw", "computed"), [(draft_json("LlamaForCausalLMEagle", num_hidden_layers=2), 1), (draft_json("LlamaForCausalLMEagle3"), 0)]
)
def test_the_norm_inside_each_block_of_a_head_is_left_ahead(tmp_path: Path, raw: dict[str, Any], computed: int) -> None:
    folder, divided = save(tmp_path, raw, checkpoint(raw)), DividedNorms()
    heads = [load_head(folder, target(ops)) for ops in (divided, TorchOps())]
    states = [torch.randn(2, heads[0].input_width, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    got, want = (Rig(head, 1).run([[3, 4], [5, 6]], states, [0, 0]) for head in heads)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert (divided.computed, divided.left) == (computed, raw["num_hidden_layers"])
