"""Quantised weights that ranks share: their parts are parts of what one rank stores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.config.quant_config import ON_LOAD, QuantConfig
from runtime.errors import ConfigError
from runtime.layers.linear import Partition
from runtime.layers.moe.experts import Experts
from runtime.layers.quantization.int4 import Int4
from runtime.layers.quantization.int8 import Int8
from runtime.layers.quantization.mxfp4 import Mxfp4
from runtime.layers.quantization.registry import quant_scheme
from runtime.layers.quantization.scheme import QuantScheme
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.model_loader import check_equal_shards
from runtime.models.config import ModelConfig
from runtime.models.context import ModelContext
from runtime.models.expert_weights import ExpertNames, ExpertPlacement, stacked_weights
from runtime.models.registry import build_model
from runtime.models.weights import WeightTable
from unit.predicting import model_config
from unit.test_gpt_oss import gpt_oss
from unit.test_linear import Rank

CPU = torch.device("cpu")
FP8 = quant_scheme(ON_LOAD)
EXPERTS, HIDDEN = 3, 160


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scheme", [FP8, Int8(), Int4()], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize(("partition", "shape"), [(Partition.COLUMN, (768, 320)), (Partition.ROW, (320, 768))], ids=["rows", "columns"])
def test_slices_quantized_on_load_are_slices_of_the_quantized_whole(partition: Partition, shape: tuple[int, int], scheme: Any) -> None:
    sizes = torch.linspace(0.1, 10.0, 768)
    weight = random(*shape) * (sizes[:, None] if partition is Partition.COLUMN else sizes)

    def held(rank: int, ranks: int) -> torch.Tensor:
        table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, scheme, Rank(rank, ranks)))
        layer = table.linear({"a": shape[0]}, shape[1], partition=partition)
        table.load([("a.weight", weight)])
        return scheme.dequantize(layer.storage, torch.float32)

    parts = [held(rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat(parts, dim=0 if partition is Partition.COLUMN else 1), held(0, 1))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("partition", "shape"), [(Partition.COLUMN, (1152, 320)), (Partition.ROW, (320, 1152))], ids=["rows", "columns"])
def test_equal_shards_in_fp8_have_equal_blocks(partition: Partition, shape: tuple[int, int], ranks: int) -> None:
    """All ranks use the kernels that rank 0 chooses."""

    def blocks(rank: int) -> torch.Size:
        layer = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, FP8, Rank(rank, ranks))).linear(
            {"a": shape[0]}, shape[1], partition=partition
        )
        assert layer.storage.scale is not None
        return layer.storage.scale.shape

    assert len({blocks(rank) for rank in range(ranks)}) == 1


def test_fp8_experts_are_cut_at_blocks_that_tensor_cores_take() -> None:
    inner = 704
    tensors = {"e.gate_up_proj": random(EXPERTS, 2 * inner, HIDDEN), "e.down_proj": random(EXPERTS, HIDDEN, inner, seed=1)}
    assert assert_parts_of_one_rank(FP8, tensors, inner, 8, False) == [96] * 6 + [64] * 2


def experts_of(scheme: QuantScheme, tensors: Mapping[str, torch.Tensor], inner: int, rank: int, ranks: int, bias: bool) -> Experts:
    names = ExpertNames("e.", interleaved=bias)  # those of gpt-oss, which have biases, alternate gate and up rows
    table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, scheme, Rank(rank, ranks)))
    stacked = stacked_weights(table, names, ExpertPlacement.of(EXPERTS, rank, ranks), HIDDEN, inner, bias)
    table.load(tensors.items())
    return stacked


def assert_parts_of_one_rank(scheme: QuantScheme, tensors: Mapping[str, torch.Tensor], inner: int, ranks: int, bias: bool) -> list[int]:
    """Returns the intermediate size on each rank."""
    whole = experts_of(scheme, tensors, inner, 0, 1, bias)
    parts = [experts_of(scheme, tensors, inner, rank, ranks, bias) for rank in range(ranks)]

    def gate_and_up(stacked: Experts) -> torch.Tensor:
        return scheme.dequantize(stacked.gate_up, torch.float32).unflatten(1, (2, -1))

    assert torch.equal(torch.cat([gate_and_up(part) for part in parts], dim=2), gate_and_up(whole))
    down = [scheme.dequantize(part.down, torch.float32) for part in parts]
    assert torch.equal(torch.cat(down, dim=2), scheme.dequantize(whole.down, torch.float32))
    if whole.gate_up_bias is not None:
        biases = [part.gate_up_bias.unflatten(1, (2, -1)) for part in parts if part.gate_up_bias is not None]
        assert torch.equal(torch.cat(biases, dim=2).flatten(1), whole.gate_up_bias)
        assert [part.down_bias is None for part in parts] == [False] + [True] * (ranks - 1), "one rank adds it"
    return [part.size[1] for part in parts]


@pytest.mark.parametrize("fused", [False, True])
def test_experts_quantized_on_load_are_parts_of_those_of_one_rank(fused: bool) -> None:
    inner, sizes = 768, torch.linspace(0.1, 10.0, 2 * 768)
    gate_up, down = random(EXPERTS, 2 * inner, HIDDEN) * sizes[:, None], random(EXPERTS, HIDDEN, inner, seed=1) * sizes[:inner]
    tensors = {"e.gate_up_proj": gate_up, "e.down_proj": down}
    if not fused:
        named = {"gate": gate_up[:, :inner], "up": gate_up[:, inner:], "down": down}
        tensors = {f"e.{e}.{name}_proj.weight": matrices[e] for name, matrices in named.items() for e in range(EXPERTS)}
    assert assert_parts_of_one_rank(FP8, tensors, inner, 4, False) == [192] * 4


@pytest.mark.parametrize(("inner", "widths"), [
    (2880, [1472, 1408]), (2880, [768, 704, 704, 704]), (2880, [384] * 5 + [320] * 3), (160, [64, 32, 32, 32]),
])  # fmt: skip
def test_ranks_share_mxfp4_experts_by_whole_scales(inner: int, widths: list[int]) -> None:
    generator, tensors = torch.Generator().manual_seed(3), dict[str, torch.Tensor]()
    for name, rows, columns in (("e.gate_up_proj", 2 * inner, HIDDEN), ("e.down_proj", HIDDEN, inner)):
        blocks = (EXPERTS, rows, columns // 32, 16)
        tensors[name + "_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8, generator=generator)
        tensors[name + "_scales"] = torch.randint(110, 129, blocks[:3], dtype=torch.uint8, generator=generator)
        tensors[name + "_bias"] = random(EXPERTS, rows)
    assert assert_parts_of_one_rank(Mxfp4(), tensors, inner, len(widths), True) == widths


def test_more_ranks_than_parts_of_an_expert_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"8 ranks cannot share an expert of intermediate size 160: the mxfp4 weights are cut at mult"):
        experts_of(Mxfp4(), {}, 160, 0, 8, False)


@dataclasses.dataclass
class Gathering:
    """Takes the values of the ranks one after another."""

    values: list[Any] = dataclasses.field(default_factory=list)
    size: int = 8

    def gather(self, value: Any) -> list[Any]:
        self.values.append(value)
        return self.values


def test_gpus_may_hold_different_parts_of_mxfp4_experts_only() -> None:
    def check(config: ModelConfig) -> None:
        context: Any = SimpleNamespace(group=Gathering(), device=torch.device("cuda"))
        for rank in range(8):
            group: Any = Rank(rank, 8)
            check_equal_shards(context, build_model(config, TorchOps(), torch.float32, CPU, group=group))

    heads = {"vocab_size": 96, "num_q_heads": 16, "num_kv_heads": 8}
    check(gpt_oss(288, quant=QuantConfig("mxfp4", kept=("self_attn",)), **heads))
    for uneven in (gpt_oss(300, **heads), model_config(intermediate_size=126, **heads)):
        with pytest.raises(ConfigError, match=f"--tp-size 8 does not divide {uneven.architecture} into equal shards"):
            check(uneven)
