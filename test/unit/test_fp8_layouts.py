"""FP8 checkpoints as other tools write them: their logits are those of the weights that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from runtime.errors import ConfigError
from runtime.models.config_fields import ConfigFields
from runtime.models.quant_fields import read_quantization
from runtime.models.registry import load_hf_config
from unit.test_models import FAMILIES, Checkpoint, loaded
from unit.test_quantization import MODELS, assert_close_to, write_quantized

SIZES = {"hidden_size": 128, "head_dim": 64, "moe_intermediate_size": 128, "intermediate_size": 256}
"""Multiples of 128: transformers leaves other matrices as they are."""


def dequantized(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a parameter of a model that transformers quantised stands for."""
    tensor, scale = tensors[name], tensors.get(name + "_scale_inv")
    if scale is None:
        return tensor
    rows, columns = (size // count for size, count in zip(tensor.shape[-2:], scale.shape[-2:], strict=True))
    return tensor.float() * scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)


@pytest.mark.parametrize("block", [None, (128, 128)], ids=["tensor", "block"])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "mixtral"])
def test_what_transformers_quantizes_and_saves_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, block: Any) -> None:
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)  # it asks for a GPU
    reference: Any = Checkpoint(family, tmp_path / "plain", **SIZES).reference
    scheme = FineGrainedFP8Config(activation_scheme="static" if block is None else "dynamic", weight_block_size=block)
    stored: Any = FAMILIES[family][0].from_pretrained(tmp_path / "plain", quantization_config=scheme)
    stored.save_pretrained(tmp_path / "fp8")
    tensors = stored.state_dict()
    reference.load_state_dict({name: dequantized(name, tensors) for name in reference.state_dict()})
    model = loaded(tmp_path / "fp8")
    assert {gemm.linear.scheme.name for gemm in model.gemms()} == {"none", "fp8-row" if block is None else "fp8"}
    assert_close_to(reference, model)


def test_modelopt_may_describe_the_weights_in_its_own_file(tmp_path: Path) -> None:
    reference = write_quantized(tmp_path, MODELS["llama"](), "modelopt")
    raw = json.loads((tmp_path / "config.json").read_text())
    in_config, names = load_hf_config(tmp_path).quant, raw.pop("quantization_config")["ignore"]
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": names}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    assert load_hf_config(tmp_path).quant == in_config
    assert_close_to(reference, loaded(tmp_path))
    own["quantization"]["quant_algo"] = "NVFP4"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    with pytest.raises(ConfigError, match=r"hf_quant_config\.quant_algo: NVFP4\), which is not supported"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize("config", [
    {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
])  # fmt: skip
def test_scales_of_the_kv_cache_alone_leave_weights_as_they_are(tmp_path: Path, config: dict[str, Any]) -> None:
    model = MODELS["llama"]()
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    tensors, scales = load_file(tmp_path / "model.safetensors"), {f"model.layers.0.self_attn.{part}_scale": torch.ones(1) for part in "kv"}
    save_file(tensors | scales, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_close_to(model, loaded(tmp_path))


def compressed(**fields: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"} | fields.pop("weights", {})
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}} | fields


ROWS = compressed()["config_groups"]
BLOCKS = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}}


@pytest.mark.parametrize(("config", "field"), [
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}, "expert_dtype: fp4"),
    ({"quant_method": "fp8", "modules_to_convert": ["embed"]}, r"modules_to_convert: \['embed'\]"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo: NVFP4"),
    ({"quant_method": "modelopt", "quantization": {"quant_algo": "W4A8_AWQ"}}, "quant_algo: W4A8_AWQ"),
    (compressed(format="pack-quantized", weights={"num_bits": 4, "type": "int"}), "config_groups.group_0.weights.strategy: channel"),
    (compressed(format="nvfp4-pack-quantized", weights={"num_bits": 4}), "config_groups.group_0.weights: float of 4 bits"),
    (compressed(format="int-quantized", weights={"type": "int"}), "config_groups.group_0.weights: int of 8 bits"),
    (compressed(format="mxfp8-quantized"), "format: mxfp8-quantized"),
    (compressed(config_groups={**ROWS, "b": BLOCKS}), "config_groups: groups in different formats"),
    (compressed(weights={"strategy": "group"}), "config_groups.group_0.weights.strategy: group"),
    (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format: sparse-24-bitmask"),
])  # fmt: skip
def test_other_weights_are_refused_by_field(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"the weights are quantized \(quantization_config\.{field}\), which is not supported"):
        read_quantization(ConfigFields({"quantization_config": config}, "config.json"))


def test_scales_in_bytes_are_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, MODELS["llama"](), "qwen-block")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t.to(torch.uint8) if n.endswith("scale_inv") else t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"weight_scale_inv has dtype torch\.uint8; the model expects floating-point numbers"):
        loaded(tmp_path)
