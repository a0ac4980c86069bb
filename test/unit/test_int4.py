"""int4 weights: what is stored, how they are multiplied, and what is refused."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from runtime.distributed.parallel_group import ALONE
from runtime.errors import ConfigError
from runtime.layers.linear import Linear, Partition
from runtime.layers.quantization.int4 import GROUP, LARGEST_CODE, Int4, quantize
from runtime.layers.quantization.scheme import NewWeight, Storage
from runtime.layers.torch_ops import TorchOps
from runtime.models.context import ModelContext
from runtime.models.registry import build_model
from runtime.models.weights import WeightTable
from unit.test_linear import CPU, Rank, int4_storage, quantized, random
from unit.tiny import tiny_model

SCHEME = Int4()


def int4(weight: torch.Tensor) -> Linear:
    return quantized("int4", weight)


def values(storage: Storage) -> torch.Tensor:
    return SCHEME.dequantize(storage, torch.float32)


def test_transposed_rows_are_quantized_like_a_copy_of_them() -> None:
    rows = torch.randn(2 * GROUP, 16)
    for mine, of_copy in zip(quantize(rows.T), quantize(rows.T.contiguous()), strict=True):
        assert torch.equal(mine, of_copy)


def test_a_q4_1_file_keeps_its_own_numbers() -> None:
    kind = GGMLQuantizationType.Q4_1
    file = gguf.quants.quantize(random(48, 256).numpy() * 0.3 + 0.05, kind)
    stored = torch.from_numpy(gguf.quants.dequantize(file, kind).copy())
    assert torch.equal(values(int4_storage(stored)), stored)


def test_weights_are_off_by_half_a_step_at_most() -> None:
    rows = random(50, 64) * torch.logspace(-3, 3, 50)[:, None]
    groups = rows.unflatten(1, (-1, GROUP))
    step = ((groups.amax(2) - groups.amin(2)) / LARGEST_CODE)[..., None]
    error = (values(int4_storage(rows)) - rows).unflatten(1, (-1, GROUP)).abs()
    assert torch.all(error <= step * 0.51 + groups.abs().amax(2, keepdim=True) * 2**-10)


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_a_group_of_equal_weights_keeps_them(value: float) -> None:
    layer, x = int4(torch.full((16, 64), value)), random(2, 64)
    assert torch.all(values(layer.storage) == value)
    torch.testing.assert_close(layer(x), (x.bfloat16().float().sum(1) * value)[:, None].expand(2, 16), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [{"a": 64, "b": 128, "c": 48}, {"a": 4096, "b": 64}])
def test_parts_are_packed_as_one_matrix(rows: dict[str, int]) -> None:
    weights = {name: random(count, 1536, seed=count) for name, count in rows.items()}
    table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, SCHEME, ALONE))
    layer = table.linear(rows, 1536)
    table.load([(f"{name}.weight", weights[name]) for name in reversed(rows)])
    expected = int4(torch.cat([*weights.values()])).storage.tensors
    assert len(layer.storage.tensors) == len(expected) == 3
    for mine, whole in zip(layer.storage.tensors, expected, strict=True):
        assert torch.equal(mine, whole)


def test_a_part_that_begins_within_packed_rows_is_multiplied_all_the_same() -> None:
    first, second, x = random(16, 64), random(48, 64, seed=1), random(3, 64, seed=2)
    table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, SCHEME, ALONE))
    layer = table.linear({"a": 16, "b": 48}, 64)
    table.load([("a.weight", first), ("b.weight", second)])
    assert layer.storage.packed is None
    torch.testing.assert_close(layer(x), int4(torch.cat((first, second)))(x), rtol=2e-2, atol=0.1)


def test_selected_rows_and_tails_are_rows_of_the_whole() -> None:
    layer, x = int4(random(96, 64)), random(3, 64, seed=1)
    picks = torch.randperm(96, generator=torch.Generator().manual_seed(0))[:32]
    assert torch.equal(layer.select_rows(picks)(x), layer(x)[:, picks])
    assert torch.equal(layer.tail(64)(x), layer(x)[:, 64:])
    torch.testing.assert_close(layer.select_rows(picks[:5])(x), layer(x)[:, picks[:5]], rtol=2e-2, atol=0.1)


def test_the_head_is_int8() -> None:
    for tied in (False, True):
        model = build_model(tiny_model(tie_embeddings=tied), TorchOps(), torch.float32, CPU, "int4")
        assert model.lm_head.scheme.name == "int8"
        assert {gemm.linear.scheme.name for gemm in model.gemms() if gemm.op != "logits"} == {"int4"}


def test_columns_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"an int4 weight has 40 columns; only multiples of 32 are supported\. Use --quantization int8"):
        SCHEME.allocate(NewWeight(16, 40, torch.float32, CPU))
    table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, SCHEME, Rank(1, 2)))
    with pytest.raises(ConfigError, match=r"o: columns 32 to 48 of a rank cut an int4 group of 32|an int4 weight has 48 columns"):
        table.linear({"o": 16}, 96, partition=Partition.ROW)


BEYOND = "tensor a.weight holds numbers beyond 65504, too large for int4. Use --quantization int8"


@pytest.mark.parametrize(("value", "said"), [(torch.inf, "a.weight holds infinity"), (70000.0, BEYOND), (-70000.0, BEYOND)])
def test_numbers_beyond_float16_are_refused(value: float, said: str) -> None:
    table, weight = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, SCHEME, ALONE)), random(16, 32)
    weight[3, 4] = value
    table.linear({"a": 16}, 32)
    with pytest.raises(ConfigError, match=said):
        table.load([("a.weight", weight)])
