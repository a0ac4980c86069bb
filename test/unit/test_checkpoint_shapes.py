"""What a check refuses from the headers of a checkpoint, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.config.flag_parser import parse
from runtime.config.quant_config import QuantConfig
from runtime.entrypoints.prepare import check_weights, prepare
from runtime.errors import ConfigError
from runtime.model_files.checkpoint_folder import INDEX
from runtime.models.checkpoint_shapes import KnownShapes, check_shapes
from runtime.models.decoder import DecoderModel
from runtime.models.registry import load_hf_config
from runtime.models.sharing import check_expert_width
from unit.predicting import draft_folder
from unit.small_tokenizer import write_small_tokenizer
from unit.test_models import FAMILIES, Checkpoint, loaded
from unit.tiny import tiny_model

Tensors = dict[str, torch.Tensor]
UNKNOWN = ("shared_expert_gate.weight", "e_score_correction_bias")
"""Suffixes of tensors that are checked only while they are loaded, besides vectors."""


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_known_without_torch_are_those_of_the_model(tmp_path: Path, family: str) -> None:
    Checkpoint(family, tmp_path)
    model: DecoderModel = loaded(tmp_path)
    expected, shapes = model.expected_weights(), KnownShapes(model.config)
    known = {name: shape for name in expected if (shape := shapes.shape(name)) is not None}
    assert known == {name: expected[name] for name in known}
    assert not [name for name, shape in expected.items() if name not in known and len(shape) > 1 and not name.endswith(UNKNOWN)]
    check_shapes(tmp_path, model.config)


def rewritten(folder: Path, change: Callable[[Tensors], object], family: str = "llama") -> None:
    """Save a tiny model with changed tensors."""
    Checkpoint(family, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name][1:].contiguous()})


def without(start: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(start)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut("model.embed_tokens.weight"), r"tensor model\.embed_tokens\.weight has shape \[100, 64\]; config\.json asks for \[101, 64\]"),
        (cut("model.layers.1.self_attn.k_proj.weight"), r"layers\.1\.self_attn\.k_proj\.weight has shape \[\d+, 64\]; config"),
        (cut("model.layers.2.mlp.down_proj.weight"), r"safetensors: tensor model\.layers\.2\.mlp\.down_proj\.weight has shape"),
        (without("model.norm"), r"it lacks model\.norm\.weight\. Download it again, or correct config\.json"),
        (without("model.layers.2."), r"it has 2 of 3 layers; the first that it lacks is model\.layers\.2\."),
    ],
)
def test_tensors_that_do_not_fit_config_json_are_named(tmp_path: Path, change: Callable[[Tensors], object], message: str) -> None:
    rewritten(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        check_shapes(tmp_path, load_hf_config(tmp_path))


def test_other_tensors_with_a_wrong_shape_are_counted(tmp_path: Path) -> None:
    Checkpoint("llama", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 80}))
    with pytest.raises(ConfigError, match=r"has shape .*, and 8 others differ, too\. Use the config\.json that belongs to these weights"):
        check_shapes(tmp_path, load_hf_config(tmp_path))


def test_a_tensor_that_the_index_names_and_no_file_holds_is_named(tmp_path: Path) -> None:
    lost = "model.layers.1.self_attn.v_proj.weight"
    Checkpoint("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys([*tensors, "other"], "model.safetensors")}))
    check_shapes(tmp_path, load_hf_config(tmp_path))
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"it lacks {lost}"):
        check_shapes(tmp_path, load_hf_config(tmp_path))


def test_a_check_reads_target_and_standalone_draft(tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    Checkpoint("llama", target)
    write_small_tokenizer(target)
    rewritten(draft, cut("lm_head.weight"))
    flags = ["--model-path", str(target), "--device", "cpu", "--load-format", "safetensors", "--quantization", "none"]
    check_weights(*prepare(parse(flags).args))
    standalone = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(draft)]
    with pytest.raises(ConfigError, match=r"draft/model\.safetensors: tensor lm_head\.weight has shape"):
        check_weights(*prepare(parse([*flags, *standalone]).args))
    dummy = prepare(parse([*flags, *standalone, "--speculative-draft-load-format", "dummy"]).args)
    check_weights(*dummy)


# ---- what ranks cannot share


def test_experts_that_ranks_cannot_share_are_refused_before_loading(tmp_path: Path) -> None:
    Checkpoint("qwen3-moe", tmp_path)
    write_small_tokenizer(tmp_path)
    flags = ["--model-path", str(tmp_path), "--load-format", "dummy", "--device", "cpu", "--tp-size", "2", "--quantization"]
    prepare(parse([*flags, "none"]).args)
    prepare(parse([*flags, "int4", "--ep-size", "2"]).args)
    with pytest.raises(ConfigError, match=r"2 ranks cannot share an expert of intermediate size 32: the int4 weights are cut at mult"):
        prepare(parse([*flags, "int4"]).args)


def test_experts_kept_in_16_bits_are_cut_anywhere(tmp_path: Path) -> None:
    Checkpoint("gpt-oss", tmp_path)
    config = load_hf_config(tmp_path)
    assert config.moe is not None
    inner = config.moe.intermediate_size
    stored = QuantConfig("mxfp4", kept=("self_attn",))
    with pytest.raises(ConfigError, match=f"ranks cannot share an expert of intermediate size {inner}: the mxfp4 weights"):
        check_expert_width(replace(config, quant=stored), None, inner // 32 + 1)
    check_expert_width(replace(config, quant=QuantConfig("mxfp4", kept=("mlp.experts",))), None, inner // 32 + 1)
    check_expert_width(replace(config, quant=QuantConfig("fp8")), None, inner)
    check_expert_width(tiny_model(), None, 8)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "DFLASH"])
def test_draft_heads_that_ranks_cannot_share_are_refused_before_loading(tmp_path: Path, algorithm: str) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    draft_folder(target, "STANDALONE", vocab_size=800)
    write_small_tokenizer(target)
    draft_folder(draft, algorithm, vocab_size=800, num_attention_heads=3, num_key_value_heads=1, head_dim=16)
    flags = ["--model-path", str(target), "--load-format", "dummy", "--device", "cpu", "--speculative-algorithm", algorithm]
    flags += ["--speculative-draft-model-path", str(draft), "--tp-size", "2"]
    with pytest.raises(ConfigError, match=r"The draft .*draft: --tp-size 2 cannot share the 3 query and 1 KV heads of \w+\. Use at most 1"):
        prepare(parse(flags).args)
    with pytest.raises(ConfigError, match="Or give --speculative-draft-tp-size 1, so that each rank holds all of it"):
        prepare(parse([*flags, "--speculative-draft-tp-size", "2"]).args)
    prepare(parse([*flags, "--speculative-draft-tp-size", "1"]).args)
