"""What `--check` refuses from the headers of checkpoints, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.config.flag_parser import parse
from runtime.config.quant_config import QuantConfig
from runtime.config.runtime_config import RuntimeConfig
from runtime.entrypoints.prepare import check_weights, prepare
from runtime.errors import ConfigError
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.weight_loader import dummy_weights, safetensors_weights
from runtime.models.config import ModelConfig
from runtime.models.file_tensor import FileTensor
from runtime.models.mtp import MtpDraft
from runtime.models.registry import build_model, load_hf_config, parse_hf_config
from runtime.models.sharing import check_expert_width
from runtime.speculative.weight_check import DRAFTS, META
from unit.int4_files import FORMS, SHUFFLED_FORMS, write_int4
from unit.predicting import draft_folder
from unit.small_tokenizer import write_small_tokenizer
from unit.test_models import FAMILIES, Checkpoint, loaded
from unit.tiny import tiny_model

Tensors = dict[str, torch.Tensor]
CURE = r"Use the config\.json that was published with these weights, or download them again\."


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_of_all_families_pass_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    Checkpoint(family, tmp_path)
    monkeypatch.setattr(FileTensor, "mapped", lambda _: pytest.fail("a number was read"))
    build_model(load_hf_config(tmp_path), TorchOps(), torch.float32, META).load(safetensors_weights(tmp_path, progress=False))


def rewritten(folder: Path, change: Callable[[Tensors], object], family: str = "llama") -> None:
    """Save a tiny model with changed tensors."""
    Checkpoint(family, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def resolved(folder: Path, *flags: str) -> tuple[RuntimeConfig, ModelConfig]:
    write_small_tokenizer(folder)
    fixed = ["--model-path", str(folder), "--device", "cpu", "--load-format", "safetensors", "--quantization", "none"]
    return prepare(parse([*fixed, *flags]).args)


def cut(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name][1:].contiguous()})


def without(start: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(start)]


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", cut("model.embed_tokens.weight"),
         rf"embed_tokens\.weight has shape \[100, 64\]; config\.json asks for \[101, 64\], by vocab_size\. {CURE}"),
        ("llama", cut("model.layers.1.self_attn.k_proj.weight"),
         r"self_attn\.k_proj\.weight has shape \[\d+, 64\]; config\.json asks for \[\d+, 64\], by num_key_value_heads and head_dim\. Use"),
        ("qwen3-moe", lambda tensors: tensors.update({"model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(3, 5)}),
         r"experts\.0\.up_proj\.weight has shape .*, by the intermediate size of experts and hidden_size\. Use"),
        ("llama", without("model.norm"), rf"does not fit its config\.json: it lacks model\.norm\.weight\. {CURE}"),
        ("llama", without("model.layers.2."),
         r"it lacks model\.layers\.2\.input_layernorm\.weight, .* and 1 more\. "
         r"Its num_hidden_layers may be wrong: all of these tensors are in layers 2 to 2\. Use"),
        ("llama", lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
         rf"has dtype torch\.int8; .* floating-point numbers, because config\.json does not say that this layer is quantized\. {CURE}"),
        ("llama", lambda tensors: tensors.update({"other.weight": torch.ones(1)}), r"it has unexpected other\.weight"),
        ("gpt-oss", cut("model.layers.0.mlp.experts.gate_up_proj"), r"experts\.gate_up_proj has shape \[\d+, 64, \d+\]; config"),
        ("gpt-oss", cut("model.layers.0.mlp.experts.down_proj_bias"), r"experts\.down_proj_bias has shape"),
        ("gpt-oss", cut("model.layers.0.self_attn.sinks"), r"self_attn\.sinks has shape"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_config_json_are_named(
    tmp_path: Path, family: str, change: Callable[[Tensors], object], message: str
) -> None:
    rewritten(tmp_path, change, family)
    with pytest.raises(ConfigError, match=message) as raised:
        check_weights(*resolved(tmp_path))
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("form", ["gptq", "awq", "compressed"])
def test_a_config_json_of_other_weights_is_named(tmp_path: Path, form: str) -> None:
    """Quantised weights beside the config.json of the 16-bit model, and the reverse."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    write_int4(tmp_path, Checkpoint("llama", tmp_path / "plain", **sizes).reference, FORMS[form])
    quantized = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"The weights are quantized, but config\.json has no quantization_config\. Use"):
        check_weights(*resolved(tmp_path))
    (tmp_path / "plain" / "config.json").write_text(quantized)
    with pytest.raises(ConfigError, match=r"By its quantization_config these layers are quantized, but their weights are not\. Use"):
        check_weights(*resolved(tmp_path / "plain"))


@pytest.mark.parametrize("wrong", ["q_proj", "k_proj", "v_proj"])
def test_wrong_groups_of_columns_are_found_and_named(tmp_path: Path, wrong: str) -> None:
    """Not as a difference between the parts of a fused layer, even if all are read from one batch."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    write_int4(tmp_path, Checkpoint("llama", tmp_path / "plain", **sizes).reference, SHUFFLED_FORMS["gptq-activation-order"])
    check_weights(*resolved(tmp_path))
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.1.self_attn.{wrong}.g_idx"
    save_file({**tensors, name: torch.zeros_like(tensors[name])}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said = rf"tensor {name} does not have 32 columns in each group, which group_size in quantization_config asks for\. Correct it"
    with pytest.raises(ConfigError, match=said):
        check_weights(*resolved(tmp_path))
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path)


def test_algorithms_without_known_weights_pass(tmp_path: Path) -> None:
    Checkpoint("llama", tmp_path)
    config, model = resolved(tmp_path, "--speculative-algorithm", "NGRAM")
    check_weights(config, model)
    assert config.speculative is not None
    check_weights(structs.replace(config, speculative=structs.replace(config.speculative, algorithm="ADDED")), model)


def saved(folder: Path, tensors: dict[str, tuple[int, ...]]) -> Tensors:
    made = dict(dummy_weights(tensors, torch.float32, torch.device("cpu")))
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return made


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "DFLASH", "STANDALONE"])
def test_a_check_reads_target_and_draft(tmp_path: Path, algorithm: str) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    changes = {"draft_vocab_size": 32} if algorithm == "EAGLE3" else {}
    draft_folder(target, "STANDALONE", vocab_size=800)
    draft_folder(draft, algorithm, vocab_size=800, **changes)
    saved(target, build_model(load_hf_config(target), TorchOps(), torch.float32, META).expected_weights())
    flags = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft)]
    config, model = resolved(target, *flags, "--speculative-draft-load-format", "dummy")
    check_weights(config, model)
    assert config.speculative is not None
    whole = build_model(model, TorchOps(), torch.float32, META)
    tensors = saved(draft, DRAFTS[algorithm](config.speculative, whole, None).expected_weights())
    tensors["embed_tokens.weight" if algorithm != "STANDALONE" else "model.embed_tokens.weight"] = torch.zeros(800, 64)
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    check_weights(*resolved(target, *flags))
    wrong = next(name for name in tensors if name.endswith("down_proj.weight"))
    save_file({**tensors, wrong: tensors[wrong][1:].contiguous()}, draft / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"draft: tensor {wrong} has shape \[63, 128\]; config\.json asks for \[64, 128\]"):
        check_weights(*resolved(target, *flags))
    if algorithm == "EAGLE3":
        save_file({**tensors, "d2t": torch.full((32,), 800)}, draft / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=r"d2t of the draft checkpoint names token ids outside 0\.\.799"):
            check_weights(*resolved(target, *flags))


def test_a_layer_for_multi_token_prediction_is_checked(tmp_path: Path) -> None:
    Checkpoint("mimo", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    layer = MtpDraft(build_model(parse_hf_config(raw, "config.json"), TorchOps(), torch.float32, META)).expected_weights()
    tensors = load_file(tmp_path / "model.safetensors") | dict(dummy_weights(layer, torch.float32, torch.device("cpu")))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config, model = resolved(tmp_path, "--speculative-algorithm", "MTP")
    check_weights(config, model)
    name = next(name for name in layer if name.endswith("down_proj.weight"))
    save_file({**tensors, name: tensors[name][1:].contiguous()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"tensor {name} has shape"):
        check_weights(config, model)


# ---- what ranks cannot share


def test_experts_that_ranks_cannot_share_are_refused_before_loading(tmp_path: Path) -> None:
    Checkpoint("qwen3-moe", tmp_path)
    write_small_tokenizer(tmp_path)
    flags = ["--model-path", str(tmp_path), "--load-format", "dummy", "--device", "cpu", "--tp-size", "2", "--quantization"]
    prepare(parse([*flags, "none"]).args)
    prepare(parse([*flags, "int4", "--ep-size", "2"]).args)
    with pytest.raises(ConfigError, match=r"2 ranks cannot share an expert of intermediate size 32: the int4 weights are cut at mult"):
        prepare(parse([*flags, "int4"]).args)


def test_int4_groups_that_ranks_would_cut_are_refused_before_loading(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    write_int4(tmp_path, LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes)), FORMS["awq-128"])
    check_weights(*resolved(tmp_path))
    with pytest.raises(ConfigError, match=r"an int4 weight has 192 columns; only multiples of 128 are supported\. Use another --tp-size"):
        check_weights(*resolved(tmp_path, "--tp-size", "2"))


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
