"""AWQ, GPTQ and compressed-tensors checkpoints in int4: what they stand for, how they are shared, and which are refused."""

from __future__ import annotations

import functools
import itertools
import json
import re
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from runtime.batch import ForwardMode
from runtime.config.kernel_configs import TritonConfig
from runtime.config.quant_config import Int4Format, QuantConfig, with_flag
from runtime.distributed.parallel_group import Shard
from runtime.errors import ConfigError
from runtime.layers.linear import Linear, Partition
from runtime.layers.quantization import int4
from runtime.layers.quantization.dense import DENSE
from runtime.layers.quantization.int4 import Int4, quantize
from runtime.layers.quantization.int4_layouts import CpuLayout, GpuLayout, layout_of, layout_on
from runtime.layers.quantization.scheme import LinearPart, NewWeight, Storage
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.weight_loader import dummy_weights, safetensors_weights
from runtime.models.config_fields import ConfigFields
from runtime.models.context import ModelContext
from runtime.models.decoder import DecoderModel
from runtime.models.expert_weights import ExpertNames, ExpertPlacement, stacked_weights
from runtime.models.quant_fields import read_quantization
from runtime.models.registry import build_model, load_hf_config
from runtime.models.weights import WeightTable
from unit.int4_files import FORMS, SHUFFLED_FORMS, Form, Tensors, packed, write_int4
from unit.ranks import Meeting, ThreadGroup
from unit.test_linear import Rank
from unit.test_models import DECODE, EXTEND, PIECES, VERIFY, VOCAB, Checkpoint, Runner, loaded
from unit.tiny import tiny_model

CPU, META = torch.device("cpu"), torch.device("meta")
SIZES = {
    "hidden_size": 256, "head_dim": 64, "intermediate_size": 384, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    "initializer_range": 0.05,
}  # fmt: skip
"""Multiples of 128, the largest group."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scheme_of(form: Form) -> Int4:
    quant = read_quantization(ConfigFields({"quantization_config": form.config}, "config.json"))
    assert quant is not None
    return Int4(quant.int4)


def table_of(scheme: Any, rank: Any = None) -> WeightTable:
    return WeightTable(ModelContext(TorchOps(), torch.float32, CPU, scheme, rank or Rank(0, 1)))


def named(tensors: Tensors, prefix: str) -> Tensors:
    return {f"{prefix}.{suffix}": tensor for suffix, tensor in tensors.items()}


def values(layer: Linear) -> torch.Tensor:
    return layer.scheme.dequantize(layer.storage, torch.float32)


def exact_layers(model: DecoderModel, reference: PreTrainedModel) -> None:
    """Check that the weights of all layers are those of `reference`, bit for bit."""
    tensors = reference.state_dict()
    for i, layer in enumerate(model.layers):
        attention, prefix = layer.attention, f"model.layers.{i}."
        names = ["qkv_proj"] if f"{prefix}self_attn.qkv_proj.weight" in tensors else ["q_proj", "k_proj", "v_proj"]
        parts = torch.cat([tensors[f"{prefix}self_attn.{name}.weight"] for name in names])
        assert torch.equal(values(attention.qkv_proj), parts)
        assert torch.equal(values(attention.o_proj), tensors[prefix + "self_attn.o_proj.weight"])
    for i, mlp in enumerate(model.sparse_mlps):
        for name, storage in (("gate_up_proj", mlp.experts.gate_up), ("down_proj", mlp.experts.down)):
            assert torch.equal(mlp.experts.scheme.dequantize(storage, torch.float32), tensors[f"model.layers.{i}.mlp.experts.{name}"])


def assert_close(model: DecoderModel, exact: DecoderModel) -> None:
    """Only the rounding of activations to bfloat16 separates the two."""
    ids = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(3))
    for mlp in (*model.sparse_mlps, *exact.sparse_mlps):
        mlp.router.weight.zero_()  # else rounding would change the choice of some experts
    for pieces in ("prefill", "verify", "decode"):
        found, expected = (Runner(each, 16).in_pieces(ids, PIECES[pieces]) for each in (model, exact))
        assert (found - expected).norm() / expected.norm() < 0.05, pieces


# ---- whole models


@functools.cache
def plain(family: str) -> PreTrainedModel:
    """A model of the family with `SIZES`, which tests leave as it is."""
    with tempfile.TemporaryDirectory() as folder:
        return Checkpoint(family, Path(folder), **SIZES).reference


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "mixtral", "qwen2-moe", "phi3"])
def test_a_checkpoint_is_close_to_the_weights_it_stands_for(tmp_path: Path, family: str, form: str) -> None:
    reference = write_int4(tmp_path, plain(family), FORMS[form])
    model = loaded(tmp_path)
    assert {gemm.linear.scheme.name for gemm in model.gemms()} == {"none", "int4"}
    assert {mlp.experts.scheme.name for mlp in model.sparse_mlps} <= {"int4"}
    assert model.lm_head.scheme is DENSE
    exact_layers(model, reference)
    assert_close(model, loaded(tmp_path / "exact"))


def test_a_checkpoint_may_have_only_its_routed_experts_in_int4(tmp_path: Path) -> None:
    """As Kimi-K2-Thinking."""
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    form, experts = Form("compressed-tensors", symmetric=True, fields=(("ignore", ignored),)), re.compile(r"mlp\.experts\.\d+\.")
    sizes = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "initializer_range": 0.05}
    write_int4(tmp_path, Checkpoint("kimi-k2", tmp_path / "plain", **sizes).reference, form, experts)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "kimi_k2"}))
    model = loaded(tmp_path)
    assert {gemm.linear.scheme.name for gemm in model.gemms()} == {"none"}
    assert [mlp.experts.scheme.name for mlp in model.sparse_mlps] == ["int4"] * 2
    assert not any(mlp.router.rule.shared for mlp in model.sparse_mlps), "the shared expert has another format"
    assert_close(model, loaded(tmp_path / "exact"))


@pytest.mark.parametrize("form", SHUFFLED_FORMS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "qwen3-moe", "mixtral", "qwen2-moe"])
def test_a_checkpoint_in_activation_order_is_close_to_the_weights_it_stands_for(tmp_path: Path, family: str, form: str) -> None:
    reference = write_int4(tmp_path, plain(family), SHUFFLED_FORMS[form])
    model = loaded(tmp_path)
    exact_layers(model, reference)
    assert_close(model, loaded(tmp_path / "exact"))


@pytest.mark.parametrize(("family", "form"), [
    *itertools.product(["llama", "qwen3-moe"], ["awq-128", "gptq-128", "compressed"]), ("llama", "gptq-activation-order"),
])  # fmt: skip
def test_a_token_has_the_same_bits_in_every_window(tmp_path: Path, family: str, form: str) -> None:
    checkpoint = Checkpoint(family, tmp_path / "plain", **{**SIZES, "hidden_size": 512, "num_experts": 16})
    write_int4(tmp_path, checkpoint.reference, (FORMS | SHUFFLED_FORMS)[form])
    model = loaded(tmp_path)

    def states(width: int, mode: ForwardMode) -> torch.Tensor:
        """Those of tokens 20 to 39, before the LM head, which is in float32."""
        runner = Runner(model, 16)
        runner.hidden(checkpoint.ids[:20], 0, EXTEND)
        return torch.cat([runner.hidden(checkpoint.ids[at : at + width], at, mode)[0] for at in range(20, 40, width)])

    alone = states(1, DECODE)
    for width in (2, 4, 10):
        assert torch.equal(states(width, VERIFY), alone), width


def test_gptq_weights_may_be_described_in_a_file_of_their_own(tmp_path: Path) -> None:
    """As by older versions of AutoGPTQ, which leave out the method and the format."""
    reference = write_int4(tmp_path, plain("llama"), FORMS["gptq-128"])
    raw, in_config = json.loads((tmp_path / "config.json").read_text()), load_hf_config(tmp_path).quant
    fields = {"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "sym": False, "model_file_base_name": "model"}
    (tmp_path / "quantize_config.json").write_text(json.dumps({**fields, "bits": 8}))
    assert load_hf_config(tmp_path).quant == in_config, "config.json counts"
    (tmp_path / "quantize_config.json").write_text("{broken")
    assert load_hf_config(tmp_path).quant == in_config, "the file is not needed"
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"quantize_config\.json cannot be read: it is not valid JSON"):
        load_hf_config(tmp_path)
    (tmp_path / "quantize_config.json").write_text(json.dumps({**fields, "bits": 8}))
    with pytest.raises(ConfigError, match=r"\(quantize_config\.bits: 8\), which is not supported"):
        load_hf_config(tmp_path)
    for method in ({}, {"quant_method": None}):
        (tmp_path / "quantize_config.json").write_text(json.dumps({**fields, **method}))
        assert load_hf_config(tmp_path).quant == in_config
    exact_layers(loaded(tmp_path), reference)


def test_awq_weights_may_be_described_in_a_file_of_their_own(tmp_path: Path) -> None:
    """As by older versions of AutoAWQ. Other tools' files of this name are not read."""
    reference = write_int4(tmp_path, plain("llama"), FORMS["awq-128"])
    raw, in_config = json.loads((tmp_path / "config.json").read_text()), load_hf_config(tmp_path).quant
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "quant_config.json").write_text(json.dumps({"quantize": "int8"}))
    assert load_hf_config(tmp_path).quant is None
    (tmp_path / "quant_config.json").write_text(json.dumps({"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}))
    assert load_hf_config(tmp_path).quant == in_config
    exact_layers(loaded(tmp_path), reference)


@pytest.mark.parametrize("form", ["awq", "gptq-v2", "compressed"])
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen2-moe"])
def test_a_router_in_int4_is_read_dequantized(tmp_path: Path, family: str, form: str) -> None:
    write_int4(tmp_path, plain(family), FORMS[form])
    tensors, exact = load_file(tmp_path / "model.safetensors"), list[torch.Tensor]()
    for gate in (f"model.layers.{i}.mlp.gate" for i in range(3)):
        parts, value = packed(tensors.pop(gate + ".weight"), FORMS[form], zero_points=True)
        tensors |= {f"{gate}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        exact.append(value)
    save_file(tensors, tmp_path / "model.safetensors")
    model = loaded(tmp_path)
    assert all(torch.equal(mlp.router.weight, value) for mlp, value in zip(model.sparse_mlps, exact, strict=True))
    quant = load_hf_config(tmp_path)
    build_model(quant, TorchOps(), torch.float32, META).load(safetensors_weights(tmp_path, progress=False))
    save_file(tensors | {"model.layers.1.mlp.gate.weight": exact[1]}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"it has unexpected model\.layers\.1\.mlp\.gate\.\w+, .*scale"):
        loaded(tmp_path)
    scales = next(name for name in tensors if "layers.1.mlp.gate." in name and "scale" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != scales}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"it lacks {re.escape(scales)}\. Use"):
        loaded(tmp_path)


@pytest.mark.parametrize("name", FORMS)
def test_dummy_weights_are_finite_and_as_large_as_others(tmp_path: Path, name: str) -> None:
    Checkpoint("llama", tmp_path, **SIZES)
    quant = read_quantization(ConfigFields({"quantization_config": FORMS[name].config}, "config.json"))
    model = build_model(replace(load_hf_config(tmp_path), quant=quant), TorchOps(), torch.float32, CPU)
    model.load(dummy_weights(model.expected_weights(), torch.float32, CPU))
    assert torch.isfinite(Runner(model, 16).in_pieces(torch.arange(40), PIECES["prefill"])).all()
    assert 0.01 < float(values(model.layers[0].attention.o_proj).std()) < 0.03


# ---- layers: parts, ranks, layouts


@pytest.mark.parametrize("stored", [None, "qkv"])
@pytest.mark.parametrize("layout", [CpuLayout, GpuLayout])
@pytest.mark.parametrize("name", [*FORMS, *SHUFFLED_FORMS])
def test_fused_parts_and_slices_are_those_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, name: str, layout: Any, stored: str | None
) -> None:
    form, rows = (FORMS | SHUFFLED_FORMS)[name], {"q": 192, "k": 96, "v": 96}
    monkeypatch.setattr(int4, "layout_on", lambda device, group: layout(group))
    weights = {part: random(count, 256, seed=count) * 0.1 for part, count in rows.items()}
    parts = {part: packed(weight, form, layout.zero_points) for part, weight in weights.items()}
    layers = {part: tensors for part, (tensors, _) in parts.items()}
    if stored is not None:
        layers = {stored: packed(torch.cat(list(weights.values())), form)[0]}
    tensors = [each for layer, some in layers.items() for each in named(some, layer).items()]
    for ranks in (1, 2, 3):
        for rank in range(ranks):
            table = table_of(scheme_of(form), Rank(rank, ranks))
            layer = table.linear(rows, 256, partition=Partition.COLUMN, stored=stored)
            table.load(tensors if rank else reversed(tensors))
            expected = torch.cat([value.tensor_split(ranks)[rank] for _, value in parts.values()])
            assert torch.equal(values(layer), expected)
            assert (layer.in_features, layer.out_features) == (256, len(expected))
            assert isinstance(layout_of(layer.storage, form.group), layout)
            picks = torch.randperm(len(expected))[:32]
            selected = layer.scheme.select_rows(layer.storage, picks)
            assert torch.equal(layer.scheme.dequantize(selected, torch.float32), expected[picks])


@pytest.mark.parametrize("name", FORMS)
def test_columns_that_ranks_share_are_those_of_the_checkpoint(name: str) -> None:
    form = FORMS[name]
    stored, exact = packed(random(64, 256), form)
    x, out = random(3, 256, seed=1), torch.zeros(3, 64)
    for rank in range(2):
        table = table_of(scheme_of(form), Rank(rank, 2))
        layer = table.linear({"o": 64}, 256, partition=Partition.ROW)
        table.load(named(stored, "o").items())
        own = slice(128 * rank, 128 * rank + 128)
        assert torch.equal(values(layer), exact[:, own])
        out += layer(x[:, own])
    torch.testing.assert_close(out, x @ exact.T, rtol=2e-2, atol=0.2)


@pytest.mark.parametrize("order", list(itertools.permutations(("qweight", "qzeros", "scales"))), ids="-".join)
def test_tensors_come_in_any_order_through_one_buffer(order: tuple[str, ...]) -> None:
    scheme, (tensors, exact) = scheme_of(FORMS["awq"]), packed(random(64, 128), FORMS["awq"])
    storage = scheme.allocate(NewWeight(64, 128, torch.float32, CPU))
    slots = scheme.places(LinearPart("a", (64, 128), (slice(0, 64), slice(0, 128)), 0), storage)
    for name in order:
        buffer = tensors[name].clone()
        slots[f"a.{name}"].put(buffer)
        buffer.zero_()
    assert torch.equal(scheme.dequantize(storage, torch.float32), exact)


@pytest.mark.parametrize("layout", [CpuLayout, GpuLayout])
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if not form.symmetric])
def test_zero_points_of_0_are_those_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch, name: str, layout: Any) -> None:
    monkeypatch.setattr(int4, "layout_on", lambda device, group: layout(group))
    weight = random(64, 256)
    weight[::3] = weight[::3].abs()
    weight[-8:] = weight[-8:].abs()  # all zero points of a word
    tensors, exact = packed(weight, FORMS[name], layout.zero_points)
    table = table_of(scheme_of(FORMS[name]))
    layer = table.linear({"a": 64}, 256)
    table.load(named(tensors, "a").items())
    assert torch.equal(values(layer), exact)


@pytest.mark.parametrize("layout", [CpuLayout, GpuLayout])
def test_groups_with_a_scale_of_zero_are_zero(monkeypatch: pytest.MonkeyPatch, layout: Any) -> None:
    monkeypatch.setattr(int4, "layout_on", lambda device, group: layout(group))
    tensors, exact = packed(random(64, 128), FORMS["gptq-v2"], layout.zero_points)
    tensors["scales"][1] = exact[:, 64:] = 0
    table = table_of(scheme_of(FORMS["gptq-v2"]))
    layer = table.linear({"a": 64}, 128)
    table.load(named(tensors, "a").items())
    assert torch.equal(values(layer), exact)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_layout_for_gpus_is_the_documented_one(group: int) -> None:
    layout, out, columns = GpuLayout(group), 16, 256
    storage = layout.allocate(NewWeight(out, columns, torch.bfloat16, CPU))
    codes = torch.randint(0, 16, (out, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scale = random(out, columns // group).half()
    zero = torch.randint(0, 16, scale.shape, generator=torch.Generator().manual_seed(2)).half()
    scale[0, 0], zero[0, 0] = 0, 0
    every = slice(0, out)
    layout.put_numbers(storage, every, scale, zero)
    layout.put_codes(storage, every, codes)
    assert (storage.weight.dtype, storage.weight.shape) == (torch.uint8, (out, columns // 2))
    assert (storage.scales.dtype, storage.scales.shape, storage.packed) == (torch.float16, (out, columns // group, 2), None)
    for row, column in ((0, 0), (3, 15), (3, 16), (7, 31), (15, 32), (15, 255)):
        byte = int(storage.weight[row, column // 32 * 16 + column % 16])
        assert (byte >> 4 if column % 32 >= 16 else byte & 15) == codes[row, column]
        assert torch.equal(storage.scales[row, column // group], torch.stack((scale[row, column // group], zero[row, column // group])))
        value = (codes[row, column].float() - zero[row, column // group].float()) * scale[row, column // group].float()
        assert layout.dequantize(storage, torch.float32)[row, column] == value


@pytest.mark.parametrize("device", [CPU, torch.device("cuda")], ids=str)
def test_weights_quantized_on_load_are_within_half_a_step_in_both_layouts(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    scheme, part, layout = Int4(), LinearPart("a", (48, 96), (slice(0, 48), slice(0, 96)), 0), layout_on(device, 32)
    monkeypatch.setattr(int4, "layout_on", lambda _, group: layout_on(device, group))
    storage = scheme.allocate(NewWeight(48, 96, torch.float32, CPU))
    scheme.places(part, storage)["a.weight"].put(random(48, 96))
    codes, scale, offset = quantize(random(48, 96), layout.zero_points)
    minimum = -offset.float() * scale.float() if layout.zero_points else offset
    groups = codes.unflatten(1, (-1, 32)).float()
    want = (groups * scale.float()[..., None] + minimum.float()[..., None]).flatten(1)
    torch.testing.assert_close(scheme.dequantize(storage, torch.float32), want, rtol=0, atol=1e-3 if layout.zero_points else 0)
    assert ((want - random(48, 96)).abs().unflatten(1, (-1, 32)) <= 0.51 * scale.float()[..., None] + 1e-3).all()
    assert scheme.in_features(storage) == 96
    assert scheme.heads(device).name == ("int8" if device.type == "cpu" else "none")
    assert scheme_of(FORMS["awq"]).heads(device) is DENSE


def test_a_tied_head_of_int4_weights_on_a_gpu_is_the_embedding() -> None:
    model = build_model(tiny_model(tie_embeddings=True), TorchOps(), torch.float32, META, "int4")
    assert model.lm_head.scheme is DENSE
    assert model.expected_weights().keys() == {name for name in model.expected_weights() if "lm_head" not in name}
    assert model.layers[0].mlp.gate_up_proj.scheme.name == "int4"


@pytest.mark.parametrize("layout", [CpuLayout, GpuLayout])
@pytest.mark.parametrize(("name", "ranks", "widths"), [
    ("awq", 4, [160, 160, 160, 128]), ("awq-128", 2, [384, 256]), ("gptq-v2", 3, [256, 192, 192]), ("compressed-128", 2, [384, 256]),
])  # fmt: skip
def test_ranks_share_experts_by_whole_groups(
    monkeypatch: pytest.MonkeyPatch, name: str, ranks: int, widths: list[int], layout: Any
) -> None:
    form, inner, hidden, count = FORMS[name], sum(widths), 256, 3
    monkeypatch.setattr(int4, "layout_on", lambda device, group: layout(group))
    sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    tensors, exact = Tensors(), dict[str, list[torch.Tensor]]()
    for part, (rows, columns) in sizes.items():
        for expert in range(count):
            stored, value = packed(random(rows, columns, seed=expert), form, layout.zero_points)
            tensors |= named(stored, f"e.{expert}.{part}_proj")
            exact.setdefault(part, []).append(value)
    start = 0
    for rank, width in enumerate(widths):
        table = table_of(scheme_of(form), Rank(rank, ranks))
        held = stacked_weights(table, ExpertNames("e."), ExpertPlacement.of(count, rank, ranks), hidden, inner)
        table.load(tensors.items())
        cut = slice(start, start := start + width)
        assert held.size == (hidden, width)
        gate_up, down = (held.scheme.dequantize(each, torch.float32) for each in (held.gate_up, held.down))
        assert torch.equal(gate_up, torch.cat((torch.stack(exact["gate"])[:, cut], torch.stack(exact["up"])[:, cut]), dim=1))
        assert torch.equal(down, torch.stack(exact["down"])[:, :, cut])


def expert_tensors(form: Form, count: int, hidden: int, inner: int) -> Tensors:
    """The tensors of experts `e.0`, ..."""
    tensors = Tensors()
    for expert, (part, shape) in itertools.product(
        range(count), {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items()
    ):
        tensors |= named(packed(random(*shape, seed=expert), form, seed=expert)[0], f"e.{expert}.{part}_proj")
    return tensors


@pytest.mark.parametrize("layout", [CpuLayout, GpuLayout])
@pytest.mark.parametrize("name", FORMS)
def test_experts_read_together_are_stored_like_single_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, layout: Any) -> None:
    monkeypatch.setattr(int4, "layout_on", lambda device, group: layout(group))
    form, size, count = FORMS[name], (256, 384), 5
    tensors = expert_tensors(form, count, *size)
    tensors["e.3.up_proj." + ("weight_scale" if form.method == "compressed-tensors" else "scales")][:, 1] = 0
    save_file({each: tensor.contiguous() for each, tensor in tensors.items()}, tmp_path / "a.safetensors")

    def stored(weights: Any, rank: int, ranks: int) -> list[torch.Tensor]:
        table = table_of(scheme_of(form), Rank(rank, ranks))
        held = stacked_weights(table, ExpertNames("e."), ExpertPlacement.of(count, rank, ranks), *size)
        table.load(weights)
        return [*held.gate_up.tensors, *held.down.tensors]

    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        one_by_one = stored(tensors.items(), rank, ranks)
        for mine, expected in zip(stored(safetensors_weights(tmp_path, progress=False), rank, ranks), one_by_one, strict=True):
            assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8))


class Operations(TorchDispatchMode):
    """Counts torch operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FORMS)
def test_a_gpu_makes_few_operations_for_each_small_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(int4, "layout_on", lambda device, group: GpuLayout(group))
    form, size, count = FORMS[name], (128, 128), 40
    tensors = expert_tensors(form, count, *size)
    save_file({each: tensor.contiguous() for each, tensor in tensors.items()}, tmp_path / "a.safetensors")
    table = table_of(scheme_of(form))
    stacked_weights(table, ExpertNames("e."), ExpertPlacement.of(count, 0, 1), *size)
    with Operations() as operations:
        table.load(safetensors_weights(tmp_path, progress=False))
    assert operations.counts.total() < 3 * len(tensors)
    reads = sum(number for each, number in operations.counts.items() if "_local_scalar" in each or "aten.equal" in each)
    assert reads == 1, "the host waits for the device once, for the checks of the only batch"


def test_experts_of_other_ranks_are_not_read() -> None:
    form = FORMS["gptq"]
    tensors = expert_tensors(form, 4, 64, 64)
    tensors["e.0.gate_proj.g_idx"] = torch.zeros(64, dtype=torch.int32)  # only the other rank would refuse it
    table = table_of(scheme_of(form), Rank(1, 2))
    held = stacked_weights(table, ExpertNames("e."), ExpertPlacement.of(4, 1, 2, ep_size=2), 64, 64)
    table.load(tensors.items())
    assert torch.equal(held.scheme.dequantize(held.down, torch.float32)[0], packed(random(64, 64, seed=2), form)[1])


# ---- which layers


def test_layers_that_are_not_converted_keep_their_weights() -> None:
    def quant(form: Form, **fields: Any) -> QuantConfig:
        found = read_quantization(ConfigFields({"quantization_config": form.config | fields}, "config.json"))
        assert found is not None
        return found

    within, gate = "model.layers.3.mlp.experts.7.up_proj", "model.layers.3.mlp.gate"
    awq = quant(FORMS["awq"], modules_to_not_convert=["layers.3.mlp.exp", "visual"])
    assert awq.keeps(within), "AutoAWQ looks for parts of names"
    assert not awq.keeps("model.layers.4.mlp.experts.7.up_proj")
    gptq = quant(FORMS["gptq"], dynamic={r"-:.*layers\.3\.mlp\.exp": {}})
    assert gptq.keeps(within)
    assert not gptq.keeps("model.layers.4.mlp.experts.7.up_proj")
    published = {"lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {}, "-:.*mtp.*": {}}  # Qwen 3.5
    qwen = quant(FORMS["gptq"], dynamic=published)
    layers = ("mtp.layers.0.mlp.up_proj", "model.layers.0.linear_attn.out_proj", within)
    assert [qwen.keeps(layer) for layer in layers] == [True, True, False]
    first = quant(FORMS["gptq"], dynamic={"+:.*down|.*up": {"bits": 4}, "-:.*gate_proj|.*experts": {}, ".*attn": {}})
    assert [first.keeps(f"mlp.experts.7.{part}_proj") for part in ("down", "up", "gate")] == [False, False, True]
    some = quant(FORMS["gptq"], modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.down_proj"]])
    assert some.keeps(within)
    assert not some.keeps("model.layers.0.self_attn.q_proj")
    rules = {"model.language_model.layers.3.mlp.experts.7.up_proj": {"bits": 16, "data_type": "float"}, r".*layers\.5\.mlp.*": {"bits": 16}}
    rules["model.layers.4.mlp.down_proj"] = {"bits": 4, "group_size": None, "sym": True}
    for blocks in ("model.layers,model.visual.blocks", [["model.language_model.layers"], ["visual.blocks"]], None):
        rounded = quant(FORMS["auto-round-gptq"], extra_config=rules, block_name_to_quantize=blocks)
        assert rounded.keeps(within)
        assert rounded.keeps("model.layers.5.mlp.down_proj")
        assert not rounded.keeps("model.layers.4.mlp.down_proj")
        assert not rounded.keeps("model.layers.3.mlp.experts.7.up_proj_too")
        assert rounded.keeps("model.mtp.0.self_attn.q_proj") == (blocks is not None)
    assert quant(FORMS["auto-round-awq"], modules_to_not_convert=["layers.3.mlp.exp"]).keeps(within)
    assert all(each.keeps(name) for each in (awq, gptq, some, rounded) for name in (gate, "lm_head"))


def test_a_flag_may_name_the_format_of_the_checkpoint() -> None:
    awq = QuantConfig("int4", int4=Int4Format("awq", 128))
    for flag in ("awq", "int4", "none", None):
        assert with_flag(awq, flag) is awq
    for stored, flag, message in (
        (awq, "gptq", "--quantization gptq is not possible: the checkpoint's weights are awq already. Leave it out"),
        (awq, "fp8", "weights are awq already"),
        (QuantConfig("fp8"), "awq", "weights are fp8 already"),
        (None, "gptq", "needs a checkpoint in gptq. Use fp8 or int4, which quantize 16-bit weights, or leave it out"),
    ):
        with pytest.raises(ConfigError, match=message):
            with_flag(stored, flag)


# ---- refusals


@pytest.mark.parametrize(("form", "fields", "said"), [
    ("awq", {"bits": 8}, "bits: 8"),
    ("awq", {"version": "gemv"}, "version: gemv"),
    ("awq", {"checkpoint_format": "gemv_fast"}, "checkpoint_format: gemv_fast"),
    ("awq", {"group_size": -1}, "group_size: -1"),
    ("awq", {"group_size": 16}, "group_size: 16"),
    ("gptq", {"bits": 3}, "bits: 3"),
    ("gptq", {"group_size": -1}, "group_size: -1"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format: marlin"),
    ("gptq", {"is_marlin_format": True}, "is_marlin_format: True"),
    ("gptq", {"lm_head": True}, "lm_head: True"),
    ("gptq", {"pack_dtype": "int64"}, "pack_dtype: int64"),
    ("gptq", {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic: rules that do not exclude layers"),
    ("gptq", {"dynamic": {".*": {"bits": 8}}}, "dynamic: rules that do not exclude layers"),
    ("gptq", {"dynamic": {"lm_head": True}}, "dynamic: rules that do not exclude layers"),
    ("gptq", {"dynamic": ["-:.*"]}, "dynamic: rules that do not exclude layers"),
    ("gptq", {"quant_method": "bitsandbytes"}, "quant_method: bitsandbytes"),
    ("auto-round-gptq", {"packing_format": "auto_round:llm_compressor"}, "packing_format: auto_round:llm_compressor"),
    ("auto-round-gptq", {"packing_format": None}, "packing_format: missing"),
    ("auto-round-gptq", {"data_type": "mx_fp"}, "data_type: mx_fp"),
    ("auto-round-gptq", {"act_bits": 8}, "act_bits: 8"),
    ("auto-round-gptq", {"quant_lm_head": True}, "quant_lm_head: True"),
    ("auto-round-gptq", {"bits": 2}, "bits: 2"),
    ("auto-round-awq", {"group_size": -1}, "group_size: -1"),
    ("auto-round-gptq", {"extra_config": {"a.b": {"bits": 8}}}, "extra_config: a format of its own for a.b"),
    ("auto-round-gptq", {"packing_format": ["auto_round"]}, "packing_format: ['auto_round']"),
    ("auto-round-gptq", {"extra_config": {"a": {"group_size": 32}}}, "extra_config: a format of its own for a"),
    ("auto-round-gptq", {"extra_config": {"lm_head": {"bits": 4}}}, "extra_config: a format of its own for lm_head"),
])  # fmt: skip
def test_other_forms_are_refused_by_field(form: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"\(quantization_config\.{re.escape(said)}\), which is not supported; supported are .* int4"):
        read_quantization(ConfigFields({"quantization_config": FORMS[form].config | fields}, "config.json"))


@pytest.mark.parametrize(("form", "fields", "said"), [
    ("awq", {"bits": "4"}, "quantization_config.bits is '4'; it must be an integer"),
    ("gptq", {"bits": None}, "quantization_config.bits is missing; it must be an integer"),
    ("gptq", {"bits": True}, "quantization_config.bits is True; it must be an integer"),
    ("gptq", {"group_size": "32"}, "quantization_config.group_size is '32'; it must be an integer"),
    ("awq", {"group_size": None}, "quantization_config.group_size is missing; it must be an integer"),
    ("compressed", {"group_size": [32]}, "quantization_config.config_groups.group_0.weights.group_size is [32]; it must be an integer"),
    ("compressed", {"num_bits": "4"}, "quantization_config.config_groups.group_0.weights.num_bits is '4'; it must be an integer"),
    ("gptq", {"desc_act": "yes"}, "desc_act is 'yes'; it must be true or false"),
    ("auto-round-gptq", {"extra_config": {"a": 16}}, "quantization_config.extra_config must be an object of objects"),
    ("auto-round-gptq", {"extra_config": {"a": {"bits": "16"}}}, "quantization_config.extra_config.a.bits is '16'; it must be an integer"),
    ("auto-round-gptq", {"extra_config": {"a(": {"bits": 16}}}, 'holds "re:.*(?:a()", which is not a regular expression'),
    ("auto-round-gptq", {"block_name_to_quantize": 3}, "block_name_to_quantize is 3; it must be a list of names of layers"),
    ("compressed", {"symmetric": "no"}, "symmetric is 'no'; it must be true or false"),
    ("compressed", {"strategy": None}, "quantization_config.config_groups.group_0.weights.strategy: missing), which is not supported"),
])  # fmt: skip
def test_fields_of_another_type_are_refused_as_such(form: str, fields: dict[str, Any], said: str) -> None:
    config = FORMS[form].config
    (config["config_groups"]["group_0"]["weights"] if form == "compressed" else config).update(fields)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_quantization(ConfigFields({"quantization_config": config}, "config.json"))


@pytest.mark.parametrize("value", [[], 0, False, "", "awq"])
def test_a_quantization_config_that_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"quantization_config is .*; it must be an object"):
        read_quantization(ConfigFields({"quantization_config": value}, "config.json"))


@pytest.mark.parametrize(("weights", "group", "said"), [
    ({"strategy": "channel"}, {}, "weights.strategy: channel"),
    ({"num_bits": 8}, {}, "weights: int of 8 bits"),
    ({"num_bits": 3}, {}, "weights: int of 3 bits"),
    ({"group_size": 256}, {}, "weights.group_size: 256"),
    ({"actorder": True}, {}, "weights.actorder: True"),
    ({}, {"input_activations": {"num_bits": 8}}, "input_activations: quantized too"),
    ({}, {"output_activations": {"num_bits": 8}}, "output_activations: quantized too"),
])  # fmt: skip
def test_other_compressed_weights_are_refused_by_field(weights: dict[str, Any], group: dict[str, Any], said: str) -> None:
    config = FORMS["compressed"].config
    own = config["config_groups"]["group_0"]
    config["config_groups"]["group_0"] = own | {"weights": own["weights"] | weights} | group
    with pytest.raises(ConfigError, match=rf"\(quantization_config\.config_groups\.group_0\.{re.escape(said)}\), which is not supported"):
        read_quantization(ConfigFields({"quantization_config": config}, "config.json"))
    with pytest.raises(ConfigError, match=r"quantization_config\.format: marlin-24"):
        read_quantization(ConfigFields({"quantization_config": FORMS["compressed"].config | {"format": "marlin-24"}}, "config.json"))


def test_rotated_weights_are_refused() -> None:
    config = FORMS["compressed"].config
    read_quantization(ConfigFields({"quantization_config": config | {"transform_config": {}}}, "config.json"))
    rotated = config | {"transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": []}}}}
    with pytest.raises(ConfigError, match=r"\(quantization_config\.transform_config: rotated weights\), which is not supported"):
        read_quantization(ConfigFields({"quantization_config": rotated}, "config.json"))


def test_patterns_that_are_no_regular_expressions_are_refused() -> None:
    for fields in (
        {"dynamic": {"-:(": {}}}, {"dynamic": {"-:a{99999999999}": {}}}, {"dynamic": {"-:" + "(" * 5000: {}}},
        {"modules_to_not_convert": "lm_head"}, {"modules_in_block_to_quantize": "mlp"},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"which is not a regular expression|must be a list of names of layers"):
            read_quantization(ConfigFields({"quantization_config": FORMS["gptq"].config | fields}, "config.json"))


def loading(form: Form, tensors: Tensors, ranks: int = 1, partition: Partition = Partition.COLUMN, **sizes: int) -> None:
    table = table_of(scheme_of(form), Rank(0, ranks))
    table.linear({"a": sizes.get("rows", 64)}, sizes.get("columns", 128), partition=partition)
    table.load(tensors.items())


NOT_NAMED = ", but quantization_config names no activation order. Correct it, or use another checkpoint."


@pytest.mark.parametrize(("name", "ranks"), [("gptq", 1), ("compressed", 1), ("auto-round-gptq", 1), ("gptq", 2)])
def test_activation_order_is_refused_where_config_json_names_none(name: str, ranks: int) -> None:
    form, suffix = FORMS[name], "weight_g_idx" if name == "compressed" else "g_idx"
    tensors = named(packed(random(64, 256), form)[0], "a")
    in_order = torch.arange(256, dtype=torch.int32) // form.group
    loading(form, tensors | {f"a.{suffix}": in_order}, ranks, Partition.ROW, columns=256)
    shuffled = tensors | {f"a.{suffix}": in_order[torch.randperm(256, generator=torch.Generator().manual_seed(1))]}
    with pytest.raises(ConfigError, match=re.escape(f"tensor a.{suffix} does not list the groups of columns in order{NOT_NAMED}")):
        loading(form, shuffled, ranks, Partition.ROW, columns=256)


def test_groups_of_other_sizes_and_orders_of_fused_layers_are_refused() -> None:
    form = SHUFFLED_FORMS["gptq-activation-order"]
    tensors = named(packed(random(64, 128), form)[0], "a")
    with pytest.raises(ConfigError, match=r"tensor a\.g_idx does not have 32 columns in each group, which group_size in"):
        loading(form, tensors | {"a.g_idx": torch.zeros(128, dtype=torch.int32)})
    table = table_of(scheme_of(form))
    table.linear({"a": 64, "b": 64}, 128)
    others = named(packed(random(64, 128), form)[0], "b")
    with pytest.raises(ConfigError, match=r"tensors a\.g_idx and b\.g_idx have different groups of columns, but these layers are fused"):
        table.load((tensors | others | {"b.g_idx": others["b.g_idx"].flip(0)}).items())


@pytest.mark.parametrize(("layout", "ranks", "said"), [
    (CpuLayout, 2, "where ranks share an expert. Use an --ep-size equal to --tp-size, or a checkpoint that was quantized with desc_act"),
    (GpuLayout, 1, "for experts on a GPU. Use a checkpoint that was quantized with desc_act false."),
])  # fmt: skip
def test_activation_order_of_shared_experts_and_on_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, layout: Any, ranks: int, said: str
) -> None:
    monkeypatch.setattr(int4, "layout_on", lambda device, group: layout(group))
    form = SHUFFLED_FORMS["gptq-activation-order"]
    table = table_of(scheme_of(form), Rank(0, ranks))
    stacked_weights(table, ExpertNames("e."), ExpertPlacement.of(2, 0, ranks), 64, 64)
    with pytest.raises(ConfigError, match=re.escape(f"g_idx does not list the groups of columns in order, which is not supported {said}")):
        table.load(expert_tensors(form, 2, 64, 64).items())


def test_ranks_that_hold_whole_experts_load_them_in_activation_order() -> None:
    form = SHUFFLED_FORMS["gptq-activation-order"]
    table = table_of(scheme_of(form), Rank(1, 2))
    held = stacked_weights(table, ExpertNames("e."), ExpertPlacement.of(4, 1, 2, ep_size=2), 64, 64)
    table.load(expert_tensors(form, 4, 64, 64).items())
    values = held.scheme.dequantize(held.down, torch.float32)
    for i, expert in enumerate((2, 3)):
        assert torch.equal(values[i], packed(random(64, 64, seed=expert), form, seed=expert)[1])


@pytest.mark.parametrize("name", [*SHUFFLED_FORMS, "gptq-ordered"])
@pytest.mark.parametrize("partition", [Partition.COLUMN, Partition.ROW])
def test_ranks_share_a_layer_in_activation_order(name: str, partition: Partition) -> None:
    form = (FORMS | SHUFFLED_FORMS)[name]
    tensors, exact = packed(random(128, 512), form)
    x, meeting = random(3, 512, seed=1).bfloat16().float(), Meeting(2)

    def output(rank: int) -> torch.Tensor:
        group = ThreadGroup(rank, 2, meeting)
        table = table_of(scheme_of(form), group)
        layer = table.linear({"a": 128}, 512, partition=partition)
        table.load(named(tensors, "a").items())
        own = x if partition is Partition.COLUMN else x[:, Shard(rank, 2).of(512)]
        return layer.gather(layer.reduce(layer(layer.own_columns(own))))

    with ThreadPoolExecutor(2) as pool:
        for out in pool.map(output, range(2)):
            torch.testing.assert_close(out, x @ exact.T, rtol=2e-2, atol=0.3)


def test_ranks_with_unequal_columns_in_activation_order_are_refused() -> None:
    table = table_of(scheme_of(FORMS["gptq-ordered"]), Rank(0, 2))
    with pytest.raises(ConfigError, match=r"a is in activation order, so ranks must have equally many of its columns, but --tp-size 2"):
        table.linear({"a": 64}, 192, partition=Partition.ROW, shards=[Shard(0, 2, 64)])


def test_gemms_of_a_gpu_reorder_their_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """With plain torch in place of the kernels."""
    pytest.importorskip("triton")
    from runtime.layers.gemm import fused_gemm, widen
    from runtime.layers.gemm.epilogue import Epilogue

    monkeypatch.setattr(int4, "layout_on", lambda device, group: GpuLayout(group))
    form = SHUFFLED_FORMS["gptq-activation-order"]
    tensors, exact = packed(random(64, 128), form, zero_points=True)
    table = table_of(scheme_of(form))
    layer = table.linear({"a": 64}, 128)
    table.load(named(tensors, "a").items())

    def value(weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        return GpuLayout(form.group).dequantize(Storage(weight, scale), dtype)

    def gemm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *_: object, weight_scale: torch.Tensor, pdl: bool) -> None:
        out.copy_(x @ value(weight, weight_scale, x.dtype).T)

    monkeypatch.setattr(fused_gemm, "triton_gemm", gemm)
    monkeypatch.setattr(widen, "widen", value)
    x, out = random(3, 128, seed=1), torch.empty(3, 64)
    fused_gemm.fused_gemm(x, layer, out, TritonConfig(16, 16, 16, 1, 1), Epilogue(), pdl=False)
    for found in (out, widen.widened_linear(x, layer), layer.tail(0)(x)):
        torch.testing.assert_close(found, x @ exact.T, rtol=2e-2, atol=0.2)


def test_a_bias_that_the_model_lacks_must_be_zero() -> None:
    tensors = named(packed(random(64, 128), FORMS["gptq"])[0], "a")
    loading(FORMS["gptq"], tensors | {"a.bias": torch.zeros(64)})
    with pytest.raises(ConfigError, match=r"tensor a\.bias is not zero, but the model has no bias there. Use another checkpoint"):
        loading(FORMS["gptq"], tensors | {"a.bias": torch.eye(64)[3]})
    table = table_of(scheme_of(FORMS["gptq"]))
    layer = table.linear({"a": 64}, 128, bias=True)
    table.load((tensors | {"a.bias": torch.ones(64)}).items())
    assert layer.bias is not None
    assert torch.equal(layer.bias, torch.ones(64))


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    awq, compressed = (named(packed(random(64, 128), FORMS[name])[0], "a") for name in ("awq", "compressed"))
    for form, tensors, said in (
        ("awq", {name: tensor for name, tensor in awq.items() if "zeros" not in name}, r"lacks a\.qzeros"),
        ("gptq-ordered", named(packed(random(64, 128), FORMS["gptq-128"])[0], "a"), r"a\.qzeros has shape \[1, 8\]; group_size 32 in"),
        ("gptq-ordered", named(packed(random(64, 128), replace(FORMS["gptq"], order=False))[0], "a"), r"lacks a\.g_idx"),
        ("awq", awq | {"a.scales": torch.full_like(awq["a.scales"], torch.inf)}, r"tensor a\.scales holds infinity where numbers must"),
        ("awq", awq | {"a.scales": torch.full_like(awq["a.scales"], torch.nan)}, r"tensor a\.scales holds NaN"),
        ("compressed", compressed | {"a.weight_scale": compressed["a.weight_scale"] * 1e6}, r"a\.weight_scale holds numbers beyond 4094"),
        ("awq", awq | {"a.qweight": awq["a.qweight"].long()}, r"a\.qweight has dtype torch\.int64; the model expects torch\.int32"),
        ("awq", awq | {"a.qweight": awq["a.qweight"].t()}, r"a\.qweight has shape \[8, 128\]; config\.json asks for \[128, 8\]"),
    ):
        with pytest.raises(ConfigError, match=said):
            loading(FORMS[form], tensors)


@pytest.mark.parametrize(("stored", "form", "name", "shapes"), [
    ("gptq", "gptq-128", "scales", ([4, 64], [1, 64])), ("gptq-128", "gptq", "qzeros", ([1, 8], [4, 8])),
    ("awq", "awq-128", "scales", ([4, 64], [1, 64])), ("compressed-128", "compressed", "weight_scale", ([64, 1], [64, 4])),
])  # fmt: skip
def test_another_group_size_than_that_of_the_tensors_is_named(stored: str, form: str, name: str, shapes: Any) -> None:
    tensors, size = named(packed(random(64, 128), FORMS[stored])[0], "a"), FORMS[form].group
    misfits = {
        each: tensors.pop(each) for each in list(tensors) if each.endswith(("zeros", "scales", "scale", "point")) and name not in each
    }
    said = re.escape(f"tensor a.{name} has shape {shapes[0]}; group_size {size} in quantization_config asks for {shapes[1]}. Correct it")
    with pytest.raises(ConfigError, match=said):
        loading(FORMS[form], tensors | misfits)
    tensors[f"a.{name}"] = torch.cat((tensors[f"a.{name}"],) * 2, dim=1 if stored != "compressed-128" else 0)
    with pytest.raises(ConfigError, match=rf"a\.{name} has shape .*; config\.json asks for"):
        loading(FORMS[form], tensors)


@pytest.mark.parametrize(("form", "ranks", "partition", "sizes", "said"), [
    ("awq", 1, Partition.COLUMN, {"columns": 96, "rows": 60}, r"a has 60 rows; int4 checkpoints with zero points have multiples of 8"),
    ("awq", 2, Partition.COLUMN, {"rows": 72}, r"a: rows 0 to 36 of a rank cut a word of 8 int4 codes; use another --tp-size"),
    ("awq-128", 1, Partition.COLUMN, {"columns": 192}, r"an int4 weight has 192 columns; only multiples of 128 are supported\. Use anoth"),
    ("awq-128", 2, Partition.ROW, {"columns": 128}, r"an int4 weight has 64 columns; only multiples of 128 are supported\. Use anoth"),
    ("awq-128", 2, Partition.ROW, {"columns": 128}, r"only multiples of 128 are supported\. Use another --tp-size, or another check"),
])  # fmt: skip
def test_shapes_that_cut_words_or_groups_are_refused(form: str, ranks: int, partition: Any, sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loading(FORMS[form], {}, ranks, partition, **sizes)


def test_columns_that_start_within_a_group_are_refused() -> None:
    scheme = scheme_of(FORMS["awq-128"])
    storage = scheme.allocate(NewWeight(64, 128, torch.float32, CPU))
    with pytest.raises(
        ConfigError, match=r"e: columns 64 to 192 of a rank cut an int4 group of 128; use another --tp-size, or another checkpoint"
    ):
        scheme.places(LinearPart("e", (64, 256), (slice(0, 64), slice(64, 192)), 0), storage)
