"""Families in the FP8 form in which they are published, and quantised on load: logits are those of the weights that are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unit.test_models import COMMON, GEMMA3, GEMMA4, Checkpoint, loaded
from unit.test_quantization import assert_close_to, write_quantized

SIZES: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 160, "moe_intermediate_size": 160}
"""Blocks of 128 do not divide them."""
WHOLE_BLOCKS: dict[str, Any] = {"head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""Heads of linear attention and of attention with a gate consist of blocks, as in published models."""
SPARSE_GEMMA4 = {**GEMMA4, **SIZES, "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "MiniMaxM2ForCausalLM": ("minimax-m2", "qwen-block", SIZES),
    "Glm4MoeLiteForCausalLM": ("glm4-flash", "qwen-block", SIZES),
    "Glm4MoeForCausalLM": ("glm4-moe", "compressed-channel", SIZES),
    "MixtralForCausalLM": ("mixtral", "static-tensor", SIZES),
    "Qwen2MoeForCausalLM": ("qwen2-moe", "compressed-channel", SIZES),
    "Qwen3_5ForCausalLM": ("qwen3.5", "qwen-block", SIZES),
    "Qwen3_5MoeForCausalLM": ("qwen3.5-moe", "compressed-channel", SIZES),
    "Qwen3NextForCausalLM": ("qwen3-next", "qwen-block", {**SIZES, **WHOLE_BLOCKS}),
    "MiMoForCausalLM": ("qwen2", "compressed-channel", SIZES),
    "Mistral3ForConditionalGeneration": (
        "mistral3-with-vision",
        "compressed-channel",
        {"text_config": {"model_type": "mistral", **COMMON, **SIZES}},
    ),
    "Ministral3ForCausalLM": ("ministral3", "ministral-tensor", SIZES),
    "Gemma3ForConditionalGeneration": ("gemma3-with-vision", "qwen-block", {"text_config": {**GEMMA3, **SIZES}}),
    "Gemma4ForConditionalGeneration": ("gemma4-with-vision", "compressed-channel", {"text_config": SPARSE_GEMMA4}),
}
"""By architecture: the model of `test_models`, the form of `test_quantization`, and changes to the configuration."""


DELTA_GATES = ("in_proj_a", "in_proj_b", "in_proj_ba")
"""The gates of linear attention, which stay in 16 bits unless a checkpoint stores them in FP8."""


@pytest.mark.parametrize("on_load", [False, True], ids=["stored", "on load"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_fp8_logits_of_a_family_match_dequantized_ones(tmp_path: Path, architecture: str, on_load: bool) -> None:
    name, form, changes = FAMILIES[architecture]
    model = Checkpoint(name, tmp_path / "plain", **changes).reference
    kept = DELTA_GATES if on_load else ()
    reference = write_quantized(tmp_path / "fp8", model, "qwen-block" if on_load else form, kept)
    folder = tmp_path / ("plain" if on_load else "fp8")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": [architecture]}))
    served = loaded(folder, "fp8" if on_load else None)
    schemes = {gemm.linear.scheme.name for gemm in served.gemms()} | {mlp.experts.scheme.name for mlp in served.sparse_mlps}
    assert schemes == {"none", "fp8" if on_load or "block" in form else "fp8-row"}
    assert_close_to(reference, served)
