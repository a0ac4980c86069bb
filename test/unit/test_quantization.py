"""FP8 and MXFP4 weights: what is stored, what it stands for, and which checkpoints are read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from runtime.config.quant_config import INT4_GROUP, ON_LOAD, SHARD_UNITS, LayerNames, QuantConfig, scheme_name, with_flag
from runtime.errors import ConfigError
from runtime.layers.linear import Linear, Partition
from runtime.layers.quantization.dense import DENSE
from runtime.layers.quantization.fp8 import E4M3, BlockFp8, RowFp8, block_size, quantize_blocks
from runtime.layers.quantization.mxfp4 import GROUP, Mxfp4
from runtime.layers.quantization.registry import SCHEMES, quant_scheme
from runtime.layers.quantization.scheme import LinearPart, NewWeight
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.weight_loader import dummy_weights, safetensors_weights
from runtime.models.context import ModelContext
from runtime.models.decoder import DecoderModel
from runtime.models.draft_config import load_draft_config
from runtime.models.eagle import LlamaForCausalLMEagle
from runtime.models.eagle3 import LlamaForCausalLMEagle3
from runtime.models.registry import build_model, load_hf_config
from runtime.models.weights import WeightTable
from unit.expert_tensors import EXPERTS, PROJECTION, fused, one_by_one
from unit.latent import DEEPSEEK_EXPERTS, LATENT
from unit.test_linear import Rank
from unit.test_models import COMMON, PIECES, VOCAB, Runner, assert_same_logits
from unit.tiny import tiny_model, write_head

CPU = torch.device("cpu")
BLOCK = QuantConfig("fp8")
ROW = QuantConfig("fp8", "row", "weight_scale")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3, scales as checkpoints of this kind hold them, and the float32 weight that they stand for."""
    if kind == "block":
        values, scales = quantize_blocks(weight)
        spread = scales.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, : weight.shape[1]]
        return values, scales, values.float() * spread
    largest = weight.abs().max()
    scales = {"channel": weight.abs().amax(1, keepdim=True), "tensor": largest, "tensor of one": largest[None]}[kind] / 448
    values = (weight / scales).to(E4M3)
    return values, scales, values.float() * scales


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen-block": ("block", {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
    "static-tensor": ("tensor", {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}),
    "ministral-tensor": (
        "tensor",
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "dequantize": False,
            "weight_block_size": None,
            "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        },
    ),
    "compressed-channel": (
        "channel",
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
            "ignore": ["lm_head", "re:.*layers.1.mlp.*"],
        },
    ),
    "compressed-tensor": (
        "tensor of one",
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}},
            "ignore": ["lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"],
        },
    ),
    "compressed-groups": (
        "channel",
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                name: {"targets": [f"re:.*{name}.*"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
                for name in ("self_attn", "layers.0.mlp")
            },
            "ignore": ["lm_head"],
        },
    ),
    "compressed-block": (
        "block",
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
                }
            },
            "ignore": ["lm_head"],
        },
    ),
    "modelopt": (
        "tensor",
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "ignore": ["lm_head", "*.1.mlp*"]},
    ),
}  # fmt: skip
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**{**COMMON, "hidden_size": 192, "intermediate_size": 320})),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **{**COMMON, "hidden_size": 192},
            head_dim=32,
            moe_intermediate_size=160,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=True,
        )
    ),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**{**COMMON, "hidden_size": 192, "intermediate_size": 320}, pad_token_id=0)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**{**COMMON, "hidden_size": 256}, head_dim=32)),
    "deepseek": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{**COMMON, **LATENT, **DEEPSEEK_EXPERTS, "hidden_size": 192, "moe_intermediate_size": 160},
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
        )
    ),
}


def write_quantized(folder: Path, model: PreTrainedModel, form: str, kept: Sequence[str] = ()) -> PreTrainedModel:
    """Save `model` with the projections of its layers quantised, except those named in `kept`. Returns the model that they stand for."""
    kind, config = CONFIGS[form]
    names = "ignore" if "ignore" in config else "modules_to_not_convert"
    config = {**config, names: [*config.get(names, []), *kept]}
    for exact in (folder, folder / "exact"):
        model.save_pretrained(exact)
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(raw))
    quant = load_hf_config(folder).quant
    assert quant is not None
    tensors = one_by_one(load_file(folder / "model.safetensors"))
    wide = dict(tensors)
    projections = [name for name in tensors if PROJECTION.search(name) and ".router." not in name and "vision" not in name]
    for name in [name for name in projections if not quant.keeps(name.removesuffix(".weight"))]:
        tensors[name], scales, wide[name] = quantized(tensors[name], kind)
        ministral = form == "ministral-tensor"
        tensors[name.replace("weight", "weight_scale_inv" if ministral else quant.scale_name)] = scales.clone()
        if config.get("activation_scheme") == "static" or form == "modelopt":
            tensors[name.replace("weight", "activation_scale" if ministral else "input_scale")] = torch.tensor(0.1)
    if form == "modelopt":
        tensors |= {f"model.layers.0.self_attn.{part}_proj.{part}_scale": torch.tensor(0.5) for part in "kv"}
    save_file(tensors, folder / "model.safetensors")
    exact = {name: fused(name, wide) if EXPERTS.search(name) else wide[name] for name in load_file(folder / "exact" / "model.safetensors")}
    save_file(exact, folder / "exact" / "model.safetensors", metadata={"format": "pt"})
    return type(model).from_pretrained(folder / "exact", dtype=torch.float32)


def loaded(folder: Path, quantization: str | None = None) -> DecoderModel:
    model = build_model(load_hf_config(folder), TorchOps(), torch.float32, CPU, quantization)
    model.load(safetensors_weights(folder, progress=False))
    return model


def assert_close_to(reference: PreTrainedModel, model: DecoderModel) -> None:
    ids = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = reference.eval()(ids[None]).logits[0]
    for pieces in ("prefill", "verify"):
        logits = Runner(model, 16).in_pieces(ids, PIECES[pieces])
        assert_same_logits(logits, expected)


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("family", MODELS)
def test_logits_of_quantized_checkpoints_match_dequantized_ones(tmp_path: Path, family: str, form: str) -> None:
    torch.manual_seed(5)
    reference = MODELS[family]()
    reference = write_quantized(tmp_path, reference, form)
    model = loaded(tmp_path)
    assert {gemm.linear.scheme.name for gemm in model.gemms()} == {"none", "fp8" if "block" in form else "fp8-row"}
    assert {mlp.experts.scheme.name for mlp in model.sparse_mlps} <= {"none", "fp8", "fp8-row"}
    assert model.lm_head.is_dense
    assert_close_to(reference, model)


@pytest.mark.parametrize("family", MODELS)
def test_quantizing_on_load_equals_a_checkpoint_quantized_before(tmp_path: Path, family: str) -> None:
    torch.manual_seed(6)
    reference = MODELS[family]()
    reference.save_pretrained(tmp_path / "plain")
    reference = write_quantized(tmp_path / "fp8", reference, "qwen-block")
    model = loaded(tmp_path / "plain", "fp8")
    assert model.weight_bytes < 0.5 * loaded(tmp_path / "plain").weight_bytes
    assert_close_to(reference, model)


def test_quantized_blocks_are_within_rounding_of_the_weight() -> None:
    weight = random(200, 300)
    weight[:128, :128] *= 1000
    values, scales = quantize_blocks(weight)
    assert scales.shape == (2, 3)
    assert values.float().abs().max() == 448
    spread = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    error = (values.float() * spread - weight).abs()
    assert torch.all(error <= weight.abs() / 16 + scales.max() * 2**-10)
    assert torch.equal(quantize_blocks(torch.zeros(3, 5))[0].float(), torch.zeros(3, 5))


# ---- drafts


@pytest.mark.parametrize("eagle3", [False, True])
def test_draft_heads_keep_16_bits_beside_a_quantized_target_unless_asked(tmp_path: Path, eagle3: bool) -> None:
    target = build_model(tiny_model(), TorchOps(), torch.float32, CPU, "fp8")
    target.load(dummy_weights(target.expected_weights(), torch.float32, CPU, 1))
    config = load_draft_config(write_head(tmp_path, eagle3), "EAGLE3" if eagle3 else "EAGLE", target.config)
    make = LlamaForCausalLMEagle3 if eagle3 else LlamaForCausalLMEagle

    def layers(quant: QuantConfig | None) -> list[str]:
        head = make(replace(config, model=replace(config.model, quant=quant)), target)
        head.load(dummy_weights(head.expected_weights(), torch.float32, CPU, 2))
        block = head.layers[0]
        assert head.fc is not None
        assert head.fc.scheme is DENSE
        return [gemm.linear.scheme.name for gemm in block.attention.gemms(target.final_norm, target.final_norm)]

    assert target.layers[0].attention.o_proj.scheme.name == "fp8"
    assert layers(None) == ["none", "none"]
    assert layers(ON_LOAD) == ["fp8", "fp8"]


# ---- parts that start inside a block


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("on_load", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_fused_parts_and_slices_keep_the_scales_of_their_blocks(ranks: int, on_load: bool, fused: bool) -> None:
    rows = {"q": 192, "k": 96, "v": 96}
    weights = {name: random(count, 200, seed=count) * (10 if name == "k" else 1) for name, count in rows.items()}
    layers = {"qkv": torch.cat(list(weights.values()))} if fused else weights
    stored, exact = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in layers.items():
        stored[name + ".weight"], stored[name + ".weight_scale_inv"], exact[name] = quantized(weight, "block")
    if fused:
        exact = dict(zip(rows, exact["qkv"].split(list(rows.values())), strict=True))
    if on_load:
        stored = {f"{name}.weight": weight for name, weight in layers.items()}
    for rank in range(ranks):
        table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, quant_scheme(ON_LOAD if on_load else BLOCK), Rank(rank, ranks)))
        layer = table.linear(rows, 200, partition=Partition.COLUMN, stored="qkv" if fused else None)
        table.load(stored.items())
        expected = torch.cat([weight.tensor_split(ranks)[rank] for weight in exact.values()])
        assert torch.equal(layer.scheme.dequantize(layer.storage, torch.float32), expected)


@pytest.mark.parametrize("kind", ["block", "channel", "tensor"])
def test_row_parallel_slices_sum_to_the_whole(kind: str) -> None:
    values, scales, exact = quantized(random(160, 320), kind)
    quant = BLOCK if kind == "block" else ROW
    x, out = random(3, 320, seed=1), torch.zeros(3, 160)
    for rank in range(2):
        table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, quant_scheme(quant), Rank(rank, 2)))
        layer = table.linear({"o": 160}, 320, partition=Partition.ROW)
        table.load({"o.weight": values, "o." + quant.scale_name: scales}.items())
        out += layer(x[:, 160 * rank : 160 * rank + 160])
    torch.testing.assert_close(out, F.linear(x, exact))


def test_aligned_parts_have_one_scale_for_each_block() -> None:
    table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, quant_scheme(BLOCK), Rank(0, 1)))
    layer = table.linear({"q": 256, "k": 128, "v": 100}, 576)
    assert layer.storage.scale is not None
    assert layer.storage.scale.shape == (4, 5)
    assert block_size(layer.storage) == (128, 128)


@pytest.mark.parametrize("scheme", [BlockFp8("weight_scale_inv", True), RowFp8("weight_scale"), Mxfp4()], ids=lambda scheme: scheme.name)
def test_a_stack_dequantizes_like_its_layers(scheme: Any) -> None:
    storage = scheme.allocate(NewWeight(96, 160, torch.float32, CPU, 3))
    for name, tensor in zip(("weight", "scale"), storage.tensors, strict=True):
        assert tensor.shape[0] == 3, name
        torch.manual_seed(1)
        tensor.copy_(torch.randint(100, 130, tensor.shape) if tensor.dtype is torch.uint8 else torch.rand(tensor.shape))
    whole = scheme.dequantize(storage, torch.float32)
    assert whole.shape == (3, 96, 160)
    for expert in range(3):
        assert torch.equal(whole[expert], scheme.dequantize(storage.at(expert), torch.float32))
    rows = torch.tensor([95, 3, 40, 41, 7, 0, 1, 2])
    assert torch.equal(scheme.dequantize(scheme.select_rows(storage.at(1), rows), torch.float32), whole[1][rows])


# ---- MXFP4


def test_mxfp4_stands_for_what_transformers_unpacks() -> None:
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (6, 64, 5, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 129, (6, 64, 5), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)  # it returns [E, in, out]
    scheme = Mxfp4()
    for columns in (slice(0, 160), slice(64, 128)):
        storage = scheme.allocate(NewWeight(64, columns.stop - columns.start, torch.float32, CPU, 6))
        for expert in range(6):
            part = LinearPart("e", (64, 160), (slice(0, 64), columns), 0)
            slots = scheme.places(part, storage.at(expert))
            for name, tensor in {"e.weight_blocks": blocks[expert], "e.weight_scales": scales[expert]}.items():
                assert tensor.shape == slots[name].shape
                slots[name].put(tensor[slots[name].index])
        assert torch.equal(scheme.dequantize(storage, torch.float32), expected[:, :, columns])
        assert torch.equal(scheme.dequantize(storage, torch.bfloat16).float(), expected[:, :, columns])


def test_mxfp4_slices_must_keep_their_scales_whole() -> None:
    scheme = Mxfp4()
    with pytest.raises(ConfigError, match="has 48 columns; only multiples of 32 are supported"):
        scheme.allocate(NewWeight(64, 48, torch.float32, CPU))
    with pytest.raises(ConfigError, match="has 60 rows; only multiples of 8 are supported"):
        scheme.allocate(NewWeight(60, 64, torch.float32, CPU))
    storage = scheme.allocate(NewWeight(64, 64, torch.float32, CPU))
    with pytest.raises(ConfigError, match="columns 16 to 80 of a rank cut an mxfp4 scale"):
        scheme.places(LinearPart("e", (64, 160), (slice(0, 64), slice(16, 80)), 0), storage)


def test_mxfp4_scales_that_kernels_cannot_represent_are_refused() -> None:
    table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, Mxfp4(), Rank(0, 1)))
    table.linear({"e": 8}, 64)
    blocks = torch.zeros((8, 2, 16), dtype=torch.uint8)
    table.load({"e.weight_blocks": blocks, "e.weight_scales": torch.full((8, 2), 128, dtype=torch.uint8)}.items())
    with pytest.raises(ConfigError, match=r"tensor e\.weight_scales holds 129; at most 128 is supported"):
        table.load({"e.weight_blocks": blocks, "e.weight_scales": torch.full((8, 2), 129, dtype=torch.uint8)}.items())


@pytest.mark.parametrize("form", ["qwen-block", "static-tensor"])
def test_an_infinite_scale_is_refused_by_name(tmp_path: Path, form: str) -> None:
    write_quantized(tmp_path, next(iter(MODELS.values()))(), form)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(("weight_scale_inv", "weight_scale")))
    tensors[name] = torch.full_like(tensors[name], torch.inf)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=rf"tensor {re.escape(name)} holds infinity where numbers must be finite"):
        loaded(tmp_path)


# ---- which layers


def test_names_of_kept_layers_match_whole_components() -> None:
    quant = QuantConfig("fp8", kept=("model.layers.1.mlp.up", "model.layers.*.self_attn", "re:.*down_proj$"))
    kept = {name for name in (
        "model.layers.1.mlp.up_proj", "model.layers.1.mlp.up.x", "model.layers.12.self_attn.q_proj", "a.down_proj", "a.down_proj.b",
        "lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", "model.layers.11.mlp.up",
    ) if quant.keeps(name)}  # fmt: skip
    assert kept == {"model.layers.1.mlp.up.x", "model.layers.12.self_attn.q_proj", "a.down_proj", "lm_head", "model.layers.0.mlp.gate"}
    some = replace(quant, kept=(), only=("re:.*experts.*",))
    assert not some.keeps("model.layers.0.mlp.experts.3.up_proj")
    assert some.keeps("model.layers.0.self_attn.q_proj")


NAMES = st.lists(st.sampled_from(["a", "b", "ab", "a*", "*", "0"]), min_size=1, max_size=3).map(".".join)


@given(
    st.lists(NAMES | NAMES.map(lambda name: "re:.*" + name.replace("*", "")), max_size=4), NAMES.map(lambda name: name.replace("*", "b"))
)
def test_compiled_layer_names_match_as_one_regular_expression(names: list[str], layer: str) -> None:
    plain = [re.escape(name).replace(r"\*", ".*") for name in names if not name.startswith("re:")]
    patterns = [rf"(?:^|\.){name}(?:\.|$)" for name in plain] + ["^" + name[3:] for name in names if name.startswith("re:")]
    compiled = LayerNames.of(tuple(names))
    assert compiled.match(layer) == any(re.search(pattern, layer) for pattern in patterns)
    assert (not compiled.patterns) == (not any("*" in name or name.startswith("re:") for name in names)), "exact names are in a set"


def test_groups_and_flags_of_a_pattern_are_its_own() -> None:
    kept = (r"re:(?P<n>a)\.x", r"re:(?P<n>b)\.x", r"re:(c|d)\1", "re:(?i)E")
    assert [name for name in ("a.x", "b.x", "cc", "dd", "cd", "e", "A.x", "xe") if QuantConfig("fp8", kept=kept).keeps(name)] == [
        "a.x", "b.x", "cc", "dd", "e",
    ]  # fmt: skip


def test_fused_layers_of_which_one_is_kept_are_refused() -> None:
    quant = QuantConfig("fp8", kept=("a.k_proj",))
    table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, quant_scheme(quant), Rank(0, 1), quant))
    with pytest.raises(ConfigError, match=r"keeps a\.k_proj in 16 bits and quantizes a\.q_proj; layers that are fused must agree"):
        table.linear({"a.q_proj": 8, "a.k_proj": 8}, 8)
    assert isinstance(table.linear({"a.k_proj": 8}, 8), Linear)


def test_a_flag_and_a_quantized_checkpoint_must_agree() -> None:
    assert with_flag(BLOCK, "fp8") is BLOCK
    assert with_flag(BLOCK, None) is BLOCK
    assert with_flag(None, "fp8") is ON_LOAD
    assert with_flag(None, "int8") is None
    for stored, flag, message in (
        (BLOCK, "int8", "--quantization int8 is not possible: the checkpoint's weights are fp8 already"),
        (BLOCK, "mxfp4", "weights are fp8 already"),
        (None, "mxfp4", "needs a checkpoint in mxfp4. Use fp8"),
    ):
        with pytest.raises(ConfigError, match=message):
            with_flag(stored, flag)


# ---- errors of checkpoints


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("o.weight_scale_inv", torch.ones(2, 2), r"o\.weight_scale_inv has shape \[2, 2\]; config.json asks for \[2, 3\]"),
        ("o.weight_scale_inv", torch.ones(1), r"has shape \[1\]; config.json asks for \[2, 3\]"),
        ("o.weight", torch.ones(200, 300), "has dtype torch.float32; the model expects torch.float8_e4m3fn"),
    ],
)
def test_scales_of_a_wrong_shape_are_refused_by_name(name: str, tensor: torch.Tensor, message: str) -> None:
    table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, quant_scheme(BLOCK), Rank(0, 1)))
    table.linear({"o": 200}, 300)
    values, scales, _ = quantized(random(200, 300), "block")
    with pytest.raises(ConfigError, match=message):
        table.load(({"o.weight": values, "o.weight_scale_inv": scales} | {name: tensor}).items())
    with pytest.raises(ConfigError, match=r"lacks o\.weight_scale_inv"):
        table.load({"o.weight": values}.items())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (8,), (8, 1)])
def test_a_row_scale_may_be_one_number_or_one_for_each_row(shape: tuple[int, ...]) -> None:
    table = WeightTable(ModelContext(TorchOps(), torch.float32, CPU, quant_scheme(ROW), Rank(1, 2)))
    layer = table.linear({"o": 8}, 16, partition=Partition.COLUMN)
    scale = torch.arange(1.0, 9.0).reshape(shape) if shape and shape[0] == 8 else torch.full(shape, 3.0)
    values = random(8, 16).to(E4M3)
    table.load({"o.weight": values, "o.weight_scale": scale}.items())
    expected = (values.float() * (scale.reshape(-1, 1) if scale.numel() == 8 else 3.0))[4:]
    assert torch.equal(layer.scheme.dequantize(layer.storage, torch.float32), expected)
    for wrong in (torch.ones(4), torch.ones(8, 2), torch.ones(1, 8)):
        with pytest.raises(ConfigError, match=r"config\.json asks for"):
            table.load({"o.weight": values, "o.weight_scale": wrong}.items())


@pytest.mark.parametrize("quant", [BLOCK, ROW])
def test_dummy_weights_of_a_quantized_model_are_finite(tmp_path: Path, quant: QuantConfig) -> None:
    MODELS["qwen3"]().save_pretrained(tmp_path)
    model = build_model(replace(load_hf_config(tmp_path), quant=quant), TorchOps(), torch.float32, CPU)
    model.load(dummy_weights(model.expected_weights(), torch.float32, CPU))
    logits = Runner(model, 16).in_pieces(torch.arange(40), PIECES["prefill"])
    assert torch.isfinite(logits).all()
    assert (
        0.01
        < float(model.layers[0].attention.o_proj.scheme.dequantize(model.layers[0].attention.o_proj.storage, torch.float32).std())
        < 0.03
    )


def test_a_shared_expert_of_another_format_stays_beside_the_stack(tmp_path: Path) -> None:
    MODELS["deepseek"]().save_pretrained(tmp_path)
    for kept, names, together in (((), ["fp8"], True), (("shared_experts",), ["none"], False), (("gate_up_proj",), ["fp8"], True)):
        quant = replace(BLOCK, kept=kept)
        model = build_model(replace(load_hf_config(tmp_path), quant=quant), TorchOps(), torch.float32, CPU)
        for mlp in model.sparse_mlps:
            assert mlp.experts.scheme.name == "fp8"
            assert mlp.router.rule.shared == together
            assert mlp.shared is not None
            assert [mlp.shared.down_proj.scheme.name] == names


def test_kept_layers_of_a_model_are_dense(tmp_path: Path) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)
    model = build_model(load_hf_config(tmp_path), TorchOps(), torch.float32, CPU, "fp8")
    assert model.lm_head.scheme is DENSE
    assert model.layers[0].mlp.gate_up_proj.scheme.name == "fp8"


@pytest.mark.parametrize(
    ("quant", "flag"),
    [(None, None), (None, "int8"), (None, "int4"), (BLOCK, None), (ROW, None), (ON_LOAD, "fp8"), (QuantConfig("mxfp4"), None)],
)
def test_the_name_of_a_scheme_is_known_without_torch(quant: QuantConfig | None, flag: str | None) -> None:
    assert scheme_name(quant, flag) == quant_scheme(quant, flag).name


def test_every_shard_unit_is_that_of_a_scheme() -> None:
    assert {SCHEMES[name](BLOCK).name for name in SCHEMES} >= SHARD_UNITS.keys()
    assert SHARD_UNITS["mxfp4"].columns % (2 * GROUP) == 0 == SHARD_UNITS["int4"].columns % INT4_GROUP
