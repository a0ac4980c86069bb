"""Linear layers: quantisation schemes, and the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from runtime.config import flag_parser, server_args
from runtime.config.flag_parser import parse
from runtime.config.served_model import resolve_served_model
from runtime.distributed.parallel_group import ALONE, Shard
from runtime.errors import ConfigError
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.linear import Linear, Partition
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import Stream
from runtime.layers.quantization.dense import DENSE
from runtime.layers.quantization.int4 import Int4
from runtime.layers.quantization.int8 import QUANTIZED_AT_ONCE, Int8, quantize_rows
from runtime.layers.quantization.registry import SCHEMES
from runtime.layers.quantization.scheme import LinearPart, NewWeight, QuantScheme, Storage, WeightSlot
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.weight_loader import dummy_weights
from runtime.models.context import ModelContext
from runtime.models.registry import build_model
from runtime.models.weights import WeightTable
from unit.test_server_args import LLAMA
from unit.tiny import tiny_model

CPU = torch.device("cpu")
TOLERANCE = {"none": dict(rtol=1e-5, atol=1e-5), "int8": dict(rtol=2e-2, atol=0.15), "int4": dict(rtol=2e-2, atol=0.15)}
"""Layers of other shapes run other kernels; int8 and int4 round activations to bfloat16."""


def int4_storage(weight: torch.Tensor) -> Storage:
    scheme, (rows, columns) = Int4(), weight.shape
    storage = scheme.allocate(NewWeight(rows, columns, torch.float32, CPU))
    part = LinearPart("a", (rows, columns), (slice(0, rows), slice(0, columns)), 0)
    scheme.places(part, storage)["a.weight"].put(weight)
    return storage


STORED = {"none": Storage, "int8": quantize_rows, "int4": int4_storage}
"""A matrix as each scheme stores it."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(scheme: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    return Linear(STORED[scheme](weight), bias, SCHEMES[scheme](None))


@pytest.mark.parametrize("tokens", [1, 5, 32, 33, 40])
@pytest.mark.parametrize(
    ("scheme", "out_features", "in_features"),
    [
        ("int8", 48, 64),
        ("int8", 36, 36),
        ("int8", 7, 64),
        ("int8", 8, 40),
        ("int4", 48, 64),
        ("int4", 7, 64),
        ("int4", 176, 96),
        ("int4", 16, 32),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_multiplies_by_its_dequantized_weight(tokens: int, scheme: str, out_features: int, in_features: int, bias: bool) -> None:
    layer = quantized(scheme, random(out_features, in_features), random(out_features, seed=1) if bias else None)
    x = random(tokens, in_features, seed=2)
    expected = Linear.dense(layer.scheme.dequantize(layer.storage, torch.float32), layer.bias)(x.bfloat16().float())
    torch.testing.assert_close(layer(x), expected, rtol=2e-2, atol=0.1)
    assert (layer.in_features, layer.out_features, layer(x).dtype) == (in_features, out_features, x.dtype)


@pytest.mark.parametrize(
    ("scheme", "out_features", "in_features"),
    [
        ("int8", 64, 64),
        ("int8", 960, 576),
        ("int8", 14564, 576),
        ("int8", 577, 1536),
        ("int4", 64, 64),
        ("int4", 960, 576),
        ("int4", 576, 1536),
        ("int4", 80, 32),
        ("int4", 577, 1536),
    ],
)
def test_a_row_does_not_depend_on_other_rows(scheme: str, out_features: int, in_features: int) -> None:
    layer, x = quantized(scheme, random(out_features, in_features)), random(150, in_features, seed=3)
    alone = torch.cat([layer(row) for row in x[:, None]])
    for rows in (2, 4, 8, 17, 24, 32, 33, 64, 128, 150):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (576, 1536)])
def test_a_prompt_row_is_the_same_in_every_pass(scheme: str, out_features: int, in_features: int) -> None:
    layer, x = quantized(scheme, random(out_features, in_features)), random(300, in_features, seed=3)
    whole = layer(x, in_prompt=True)
    for start, stop in ((0, 1), (0, 16), (0, 17), (0, 40), (3, 131), (100, 300), (299, 300)):
        assert torch.equal(layer(x[start:stop], in_prompt=True), whole[start:stop]), (start, stop)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_prompts_are_multiplied_by_codes_without_avx512(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    layer, x = quantized(scheme, random(960, 576)), random(40, 576, seed=3)
    for capability, by_codes in (("AVX2", True), ("AVX512", False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        assert torch.equal(layer(x, in_prompt=True), layer(x)) == by_codes, capability


def test_quantization_is_off_by_at_most_half_a_step() -> None:
    rows = random(50, 64) * torch.logspace(-6, 3, 50)[:, None]
    stored = quantize_rows(rows)
    assert stored.scale is not None
    scale = stored.scale.float()
    assert torch.all((Int8().dequantize(stored, torch.float32) - rows).abs().amax(dim=1) <= 0.5001 * scale)
    assert torch.all(scale <= rows.abs().amax(dim=1) / 127 * 1.01), "the scale is no wider than rounding needs"


def test_a_matrix_quantized_in_pieces_is_that_quantized_whole() -> None:
    rows, columns = QUANTIZED_AT_ONCE // 512 * 2 + 3, 512
    table, weight = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, Int8(), ALONE)), random(rows, columns)
    layer = table.linear({"a": 5, "b": rows}, columns)
    table.load([("a.weight", torch.zeros(5, columns)), ("b.weight", weight)])
    for stored, whole in zip(layer.storage.tensors, quantize_rows(weight).tensors, strict=True):
        assert torch.equal(stored[5:], whole)


def test_a_row_of_zeros_stays_zero() -> None:
    assert torch.equal(quantized("int8", torch.zeros(4, 32))(random(2, 32)), torch.zeros(2, 4))


@pytest.mark.parametrize("scheme", [DENSE, Int8(), Int4()])
def test_fused_parts_are_one_layer(scheme: QuantScheme) -> None:
    first, second, x = random(8, 32), random(4, 32, seed=1), random(3, 32, seed=2)
    table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, scheme, ALONE))
    layer = table.linear({"a": 8, "b": 4}, 32)
    table.load([("b.weight", second), ("a.weight", first)])
    whole = torch.cat((first, second))
    expected = Linear(STORED[scheme.name](whole), None, scheme)
    assert torch.equal(layer(x), expected(x))
    torch.testing.assert_close(layer.select_rows(torch.tensor([9, 2]))(x), expected(x)[:, [9, 2]], **TOLERANCE[scheme.name])


# ---- the parts that ranks hold


@dataclass(frozen=True)
class Rank:
    """One rank of a group that exists in this test only: `all_reduce` adds what the other ranks put in `sums`."""

    rank: int
    size: int
    sums: tuple[torch.Tensor, ...] = ()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(self.sums)

    def agree(self, value):
        return value


@pytest.mark.parametrize("scheme", [DENSE, Int8(), Int4()])
def test_column_shards_of_fused_parts_are_rows_of_the_whole(scheme: QuantScheme) -> None:
    weights = {name: random(rows, 32, seed=rows) for name, rows in (("q.weight", 16), ("k.weight", 4))}
    weights |= {name: random(rows, seed=rows) for name, rows in (("q.bias", 16), ("k.bias", 4))}
    x = random(3, 32, seed=2)
    outs = []
    for rank in range(4):  # the two KV heads are held twice
        table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, scheme, Rank(rank, 4)))
        layer = table.linear({"q": 16, "k": 4}, 32, bias=True, partition=Partition.COLUMN, shards=[Shard(rank, 4), Shard(rank // 2, 2)])
        assert table.expected() == {name: tuple(tensor.shape) for name, tensor in weights.items()}
        table.load(weights.items())
        outs.append(layer(x).split([4, 2], dim=1))
    table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, scheme, ALONE))
    layer = table.linear({"q": 16, "k": 4}, 32, bias=True)
    table.load(weights.items())
    q, k = layer(x).split([16, 4], dim=1)
    torch.testing.assert_close(torch.cat([out[0] for out in outs], dim=1), q, **TOLERANCE[scheme.name])
    torch.testing.assert_close(torch.cat([outs[0][1], outs[2][1]], dim=1), k, **TOLERANCE[scheme.name])
    assert torch.equal(outs[0][1], outs[1][1])


def test_row_shards_add_up_with_the_bias_of_rank_0() -> None:
    weights, x = {"o.weight": random(8, 12), "o.bias": random(8, seed=1)}, random(3, 12, seed=2)
    parts = []
    for rank in range(3):
        table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, DENSE, Rank(rank, 3)))
        layer = table.linear({"o": 8}, 12, bias=True, partition=Partition.ROW)
        table.load(weights.items())
        assert layer.is_partial
        parts.append(layer(x[:, 4 * rank : 4 * rank + 4]))
    torch.testing.assert_close(torch.stack(parts).sum(0), x @ weights["o.weight"].T + weights["o.bias"])


def test_linear_add_reduces_before_it_adds_and_leaves_no_norm() -> None:
    x, stream, other = random(3, 4), random(3, 8, seed=1), random(3, 8, seed=2)
    layer = Linear(Storage(random(8, 4, seed=3)), None, DENSE, Partition.ROW, Rank(0, 2, (other,)))
    out = TorchOps().linear_add(x, layer, Stream(stream.clone()), RMSNorm(torch.ones(8), 1e-5))
    torch.testing.assert_close(out.h, stream + x @ layer.weight.T + other)
    assert out.deferred is None


def test_a_model_on_one_of_two_ranks_loads_half_of_each_sharded_matrix() -> None:
    from runtime.models import llama
    from runtime.models.decoder import DecoderModel

    config = tiny_model(qkv_bias=True, o_bias=True, mlp_bias=True)
    whole = build_model(config, TorchOps(), torch.float32, CPU)
    weights = dict(dummy_weights(whole.expected_weights(), torch.float32, CPU, seed=3))
    whole.load(weights.items())
    for rank in range(2):
        half = DecoderModel(config, ModelContext(TorchOps(), torch.float32, CPU, DENSE, Rank(rank, 2)), llama.block)
        assert half.expected_weights() == whole.expected_weights()
        half.load(weights.items())
        mine, its = half.layers[1], whole.layers[1]
        q, k, v = its.attention.qkv_proj.weight.split([64, 32, 32])
        expected = torch.cat([part.chunk(2)[rank] for part in (q, k, v)])
        assert torch.equal(mine.attention.qkv_proj.weight, expected)
        assert torch.equal(mine.attention.o_proj.weight, its.attention.o_proj.weight.chunk(2, dim=1)[rank])
        assert (mine.attention.spec.num_q_heads, mine.attention.spec.kv.num_heads) == (2, 1)
        assert half.active_parameters == whole.active_parameters // 2


# ---- a new scheme


class NegatedHalves(QuantScheme):
    """A toy scheme: the checkpoint holds the negated weight in float16 beside one scale per layer, `prefix.toy_scale`."""

    name = "negated-halves"
    gemm_format = None

    def allocate(self, new: NewWeight) -> Storage:
        return Storage(new.empty(new.out_features, new.in_features, dtype=torch.float16), new.empty(new.out_features, dtype=torch.float32))

    def places(self, part: LinearPart, storage: Storage) -> Mapping[str, WeightSlot]:
        assert storage.scale is not None
        scale = WeightSlot((1,), (slice(None),), storage.scale[part.rows].copy_, torch.float32)
        weight = WeightSlot(part.shape, part.index, storage.weight[part.rows].copy_, torch.float16)
        return {part.prefix + ".weight": weight, part.prefix + ".toy_scale": scale}

    def matmul(self, x: torch.Tensor, storage: Storage, bias: torch.Tensor | None, in_prompt: bool = False) -> torch.Tensor:
        assert storage.scale is not None
        out = -(x @ storage.weight.to(x.dtype).T) * storage.scale.to(x.dtype)
        return out if bias is None else out + bias

    def select_rows(self, storage: Storage, rows: torch.Tensor) -> Storage:
        assert storage.scale is not None
        return Storage(storage.weight[rows], storage.scale[rows])


def test_a_quantisation_scheme_takes_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "negated-halves", lambda quant: NegatedHalves())
    monkeypatch.setattr(server_args, "Quantization", Literal["negated-halves"])
    monkeypatch.setattr(flag_parser, "flags", flag_parser.flags.__wrapped__)
    name = resolve_served_model(parse(["--quantization", "negated-halves"]).args, "cpu", LLAMA).quantization
    config = tiny_model(tie_embeddings=False, qkv_bias=True)
    plain, toy = (build_model(config, TorchOps(), torch.float32, CPU, name) for name in (None, name))
    weights = dict(dummy_weights(plain.expected_weights(), torch.float32, CPU, seed=3))
    stored = {}
    for name, shape in toy.expected_weights().items():
        matrix = name.endswith("proj.weight") or name == "lm_head.weight"
        stored[name] = torch.full(shape, 0.5) if name.endswith("toy_scale") else (-2 * weights[name]).half() if matrix else weights[name]
        if matrix:
            weights[name] = stored[name].float() * -0.5
    plain.load(weights.items())
    toy.load(stored.items())
    x = random(5, 64)
    for mine, its in zip(toy.gemms(), plain.gemms(), strict=True):
        assert isinstance(mine, Gemm)
        rows = random(5, mine.linear.in_features)
        torch.testing.assert_close(mine.linear(rows), its.linear(rows), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(toy.logits(x), plain.logits(x), rtol=1e-4, atol=1e-4)
    stored["model.layers.0.self_attn.q_proj.weight"] = stored["model.layers.0.self_attn.q_proj.weight"].float()
    with pytest.raises(ConfigError, match=r"q_proj\.weight has dtype torch\.float32; the model expects torch\.float16"):
        toy.load(stored.items())
