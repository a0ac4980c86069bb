from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from runtime.batch import ForwardMode
from runtime.errors import ConfigError
from runtime.model_executor.context import make_context
from runtime.model_executor.model_loader import load_model, named
from runtime.model_executor.weight_loader import safetensors_weights
from runtime.model_files import tied_head
from runtime.model_files.checkpoint_folder import INDEX, SourceFlags, check_shards, safetensors_files
from runtime.models.config_fields import BASE_CLASSES
from runtime.models.draft_config import load_draft_config
from runtime.models.file_tensor import FileTensor, read_packed
from unit.test_models import Checkpoint, Runner, loaded
from unit.test_quantization import assert_close_to
from unit.tiny import tiny_model, tiny_runtime

CPU = torch.device("cpu")


def write_file(path: Path, header: dict[str, dict[str, object]], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_index(folder: Path, files: list[str]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(files)}}))


def test_a_sharded_checkpoint_yields_every_tensor_once(tmp_path: Path) -> None:
    save_file({"t0": torch.arange(6.0)}, tmp_path / "a.safetensors")
    save_file({"t1": torch.ones(2, 2, dtype=torch.bfloat16)}, tmp_path / "b.safetensors")
    save_file({"t0": torch.zeros(6)}, tmp_path / "consolidated.safetensors")
    write_index(tmp_path, ["a.safetensors", "b.safetensors"])
    found = {name: (tensor.shape, tensor[(slice(None),)].mapped()) for name, tensor in safetensors_weights(tmp_path, progress=False)}
    assert list(found) == ["t0", "t1"]
    assert torch.equal(found["t0"][1], torch.arange(6.0)), "files outside the index are not read"
    assert found["t1"][0] == (2, 2)
    assert found["t1"][1].dtype == torch.bfloat16


def test_an_unsharded_file_is_read_alone_unless_the_index_names_it(tmp_path: Path) -> None:
    for name in ("model", "consolidated", "adapter_model", "mtp"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    single = [tmp_path / "model.safetensors"]
    assert safetensors_files(tmp_path) == single
    write_index(tmp_path, ["model-00001-of-00002.safetensors"])  # of shards that a later save has removed
    assert safetensors_files(tmp_path) == single
    write_index(tmp_path, ["model.safetensors", "mtp.safetensors"])
    assert safetensors_files(tmp_path) == [*single, tmp_path / "mtp.safetensors"]


@pytest.mark.parametrize("own", [False, True])
def test_a_tied_checkpoint_may_hold_a_head_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    monkeypatch.setattr(tied_head, "CHUNK_BYTES", 1000)
    Checkpoint("llama-tied-biases-llama3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += own
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference, model = LlamaForCausalLM.from_pretrained(tmp_path), loaded(tmp_path)
    assert model.config.tie_embeddings != own
    assert torch.equal(reference.lm_head.weight, model.lm_head.weight)
    assert_close_to(reference, model)
    assert load_draft_config(tmp_path, "STANDALONE", model.config).model.tie_embeddings != own


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_saved_without_its_head_gives_the_same_states(tmp_path: Path, tied: bool, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = Checkpoint("qwen3", tmp_path, tie_word_embeddings=tied)
    raw = (tmp_path / "config.json").read_text()
    checkpoint.reference.model.save_pretrained(tmp_path)  # as Qwen3-Embedding: names without `model.`, the class with a head
    (tmp_path / "config.json").write_text(raw)
    model = loaded(tmp_path)
    hidden, _ = Runner(model, 16).hidden(checkpoint.ids, 0, ForwardMode.EXTEND)
    torch.testing.assert_close(hidden, checkpoint.hidden[-1][0], rtol=1e-4, atol=1e-3)
    assert model.config.tie_embeddings
    assert ("no LM head" in caplog.text) == model.config.no_head != tied


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_a_base_class_gives_the_same_states(tmp_path: Path, family: str) -> None:
    checkpoint = Checkpoint(family, tmp_path, tie_word_embeddings=False)
    checkpoint.reference.model.save_pretrained(tmp_path)  # as e5-mistral: names without `model.`, the class without a head
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0] in BASE_CLASSES
    hidden, _ = Runner(loaded(tmp_path), 16).hidden(checkpoint.ids, 0, ForwardMode.EXTEND)
    torch.testing.assert_close(hidden, checkpoint.hidden[-1][0], rtol=1e-4, atol=1e-3)


def test_a_tensor_is_read_by_slice(tmp_path: Path) -> None:
    whole = torch.arange(48.0).view(6, 8)
    save_file({"t": whole}, tmp_path / "a.safetensors")
    for _, tensor in safetensors_weights(tmp_path, progress=False):
        assert torch.equal(tensor[slice(2, 4), slice(1, 5)].mapped(), whole[2:4, 1:5])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_file({"t0": torch.zeros(1)}, tmp_path / "a.safetensors")
    write_index(tmp_path, ["a.safetensors", "b.safetensors"])
    with pytest.raises(ConfigError, match=r"lacks 1 of 2 weight files, the first is b\.safetensors"):
        safetensors_files(tmp_path)


def test_a_missing_shard_is_named_by_the_numbers_of_the_others(tmp_path: Path) -> None:
    for number in (1, 3):
        save_file({f"t{number}": torch.zeros(1)}, tmp_path / f"model-0000{number}-of-00003.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 1 of 3 weight files, the first is model-00002-of-00003\.safetensors"):
        safetensors_files(tmp_path)
    save_file({"t2": torch.zeros(1)}, tmp_path / "model-00002-of-00003.safetensors")
    assert len(safetensors_files(tmp_path)) == 3


@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ConfigError, match=rf"{name} is only a Git LFS pointer to the file; fetch the file with 'git lfs pull', or"):
        check_shards(tmp_path, SourceFlags())


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors"])
def test_an_index_may_not_point_outside_its_folder(tmp_path: Path, name: str) -> None:
    write_index(tmp_path, [name])
    for check in (safetensors_files, lambda folder: check_shards(folder, SourceFlags())):
        with pytest.raises(ConfigError, match="outside its folder"):
            check(tmp_path)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*save_pretrained"):
        safetensors_files(tmp_path)


def test_an_empty_folder_points_to_dummy_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--load-format dummy"):
        safetensors_files(tmp_path)


def test_a_truncated_file_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"t": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ConfigError, match="damaged or truncated"):
        list(safetensors_weights(tmp_path, progress=False))


def test_a_broken_index_is_a_config_error(tmp_path: Path) -> None:
    for text, message in (("[]", "must hold a JSON object"), ("{}", "is not an index"), ('{"weight_map": [1]}', "is not an index")):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(ConfigError, match=message):
            safetensors_files(tmp_path)


def test_a_tensor_in_two_files_is_refused_by_name(tmp_path: Path) -> None:
    """Threads would store both, in an order by chance."""
    for number in range(2):
        save_file({"t": torch.full((4,), float(number)), f"own-{number}": torch.zeros(1)}, tmp_path / f"{number}.safetensors")
    with pytest.raises(ConfigError, match=r"tensor t is in .*0\.safetensors and in .*1\.safetensors"):
        list(safetensors_weights(tmp_path, progress=False))


def test_an_index_without_an_end_of_brackets_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is not valid JSON"):
        check_shards(tmp_path, SourceFlags())


def test_a_header_without_an_end_of_brackets_is_damaged(tmp_path: Path) -> None:
    header = b"[" * 100_000
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ConfigError, match="truncated or damaged"):
        check_shards(tmp_path, SourceFlags())


@pytest.mark.parametrize("place", [{"data_offsets": [0.0, 16.0]}, {"data_offsets": [False, 16]}, {"shape": [True, 4]}, {"shape": [-1, -4]}])
def test_a_header_whose_places_are_no_counts_is_damaged(tmp_path: Path, place: dict[str, object]) -> None:
    write_file(tmp_path / "a.safetensors", {"t": {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]} | place}, bytes(16))
    with pytest.raises(ConfigError, match="places tensor t wrongly"):
        list(safetensors_weights(tmp_path, progress=False))


def test_a_tensor_of_an_unknown_dtype_is_refused_where_it_is_used(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", {"t": {"dtype": "C64", "shape": [2], "data_offsets": [0, 16]}}, bytes(16))
    [(name, tensor)] = safetensors_weights(tmp_path, progress=False)
    assert (name, tuple(tensor.shape)) == ("t", (2,))
    with pytest.raises(ConfigError, match="tensor t has dtype C64, which is not supported"):
        tensor[:1]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"t": torch.zeros(4)}, tmp_path / "a.safetensors")
    [(_, tensor)] = safetensors_weights(tmp_path, progress=False)
    assert isinstance(tensor, FileTensor)

    def fail(*args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ConfigError, match=r"a\.safetensors cannot be read: .*Input/output error"):
        read_packed([(tensor, memoryview(bytearray(16)))])


def test_a_tensor_is_indexed_as_torch_does(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    save_file({"t": whole}, tmp_path / "a.safetensors")
    [(_, tensor)] = safetensors_weights(tmp_path, progress=False)
    assert isinstance(tensor, FileTensor)
    for index in (-1, (slice(None), -2), (-3, slice(1, 5, 2)), (slice(-2, None), slice(None, None, 3))):
        assert torch.equal(tensor[index].mapped(), whole[index])
    assert tensor[0:1, 0:3].is_packed, "one row has no gaps"
    assert not tensor[0:2, 0:3].is_packed
    with pytest.raises(IndexError):
        tensor[4]


def test_an_error_names_the_checkpoint_once() -> None:
    for said, shown in (("it lacks a.weight", "drafts/a: it lacks a.weight"), ("drafts/a/b.safetensors is damaged",) * 2):
        with pytest.raises(ConfigError, match=f"^{shown}$"), named("drafts/a"):
            raise ConfigError(said)


def test_an_error_while_loading_ends_the_line_of_the_progress_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_model()
    save_file({"model.norm.weight": torch.zeros(config.hidden_size + 1)}, tmp_path / "model.safetensors")
    context = make_context(tiny_runtime())
    with pytest.raises(ConfigError) as caught:
        load_model(context, config, str(tmp_path), "auto", None)
    assert str(tmp_path) in str(caught.value)  # the traceback keeps the generator
    assert capsys.readouterr().err.endswith("\n")
