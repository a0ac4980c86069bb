"""Programs and processes of the tests start as forks, unless their environment says what a running interpreter can no longer heed."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from execnet.gateway_io import popen_args
from execnet.xspec import XSpec
from safetensors import safe_open

import warm_start
import warm_state
from process import fake
from process.conftest import ROOT
from runtime.config.flag_parser import from_fields
from runtime.constrained import llguidance_backend
from runtime.entrypoints.prepare import prepare
from runtime.layers.attention.stable_shapes import HeadKind, find_stable_shapes
from runtime.model_executor import depth_costs, model_loader
from runtime.model_executor.context import AS_CONFIGURED, make_context
from runtime.model_files.cache_folder import default_cache_dir
from runtime.model_files.embedded import embedded_folder
from runtime.models.registry import load_hf_config
from runtime.models.weights import WeightTable
from runtime.text.tokenizer import Tokenizer
from unit.test_linear import int4_storage
from warm_start import program_of
from warm_state import find_shapes, keep_tokenizer, keep_weights

IMPORTER = os.getpid()
"""The process that imported this file."""


def starts_warm() -> bool:
    return program_of([sys.executable, fake.__file__, "serve", "0.01"], fake.ENV, "/", new_session=True) is not None


def test_a_fake_server_starts_warm_after_all_tests_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that files of tests import set variables of their own after `ENV` is made."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setitem(fake.ENV, name, "1")
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert starts_warm()


def test_a_program_with_another_number_of_threads_starts_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert not starts_warm()


def test_processes_that_run_tests_begin_as_forks() -> None:
    program = program_of(popen_args(XSpec("popen//execmodel=main_thread_only")), os.environ, "/", new_session=False)
    assert program is not None
    assert program.runs_tests


def test_files_of_tests_are_imported_before_processes_that_run_them_begin() -> None:
    forks = "PYTEST_XDIST_WORKER" in os.environ and not shutil.which("nvidia-smi")
    assert (os.getpid() != IMPORTER) == forks
    assert "train_eagle" not in sys.modules or str(ROOT / "python") in os.environ["PYTHONPATH"], "a variable that a file sets"


def test_a_warm_process_that_starts_nothing_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(warm_state, "prepare", lambda: pytest.fail("it prepares"))
    ours.close()
    warm_start.start_our_programs(theirs)


def test_only_forks_that_start_programs_have_what_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    embedded_folder(default_cache_dir())
    usual = vars(Tokenizer)["load"], depth_costs.BUDGET
    monkeypatch.setattr(depth_costs, "BUDGET", depth_costs.BUDGET)
    monkeypatch.setattr(warm_state, "prepare", lambda: setattr(depth_costs, "BUDGET", -1.0))
    use = warm_state.prepare_for_forks()
    assert (vars(Tokenizer)["load"], depth_costs.BUDGET) == usual
    use()
    assert depth_costs.BUDGET == -1.0


def test_a_warm_process_uses_what_its_parent_has_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(warm_state, "prepare", lambda: pytest.fail("it prepares"))
    used = list[str]()
    monkeypatch.setattr(warm_start, "start_programs", lambda asked: used.append("starts"))
    ours.send(b"a program")
    warm_start.start_our_programs(theirs, lambda: used.append("uses"))
    assert used == ["uses", "starts"]
    ours.close()
    theirs.close()


def test_a_kept_tokenizer_is_that_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks have what a process of their own would have read."""
    folder = embedded_folder(default_cache_dir())
    read, read_again = Tokenizer.load(folder), Tokenizer.load(folder)
    assert read is not read_again
    monkeypatch.setattr(Tokenizer, "load", Tokenizer.load)
    monkeypatch.setattr(llguidance_backend, "LLTokenizer", llguidance_backend.LLTokenizer)
    keep_tokenizer()
    kept = Tokenizer.load(folder)
    assert kept is Tokenizer.load(str(folder))
    assert kept.definition == read.definition
    messages = [{"role": "user", "content": "Hello <|im_end|> there"}]
    assert kept.encode_chat(messages) == read.encode_chat(messages)
    template = "{{ messages[0]['content'] }}"
    assert Tokenizer.load(folder, chat_template=template).encode_chat(messages) != kept.encode_chat(messages)


def test_the_shapes_of_served_models_are_known(tmp_path: Path) -> None:
    """Forks need not find them by trial."""
    find_shapes()
    known = find_stable_shapes.cache_info()
    for folder in (fake.dummy_model(tmp_path / "tiny"), embedded_folder(default_cache_dir())):
        dim = load_hf_config(folder).head_dim
        find_stable_shapes(frozenset({HeadKind(dim, dim, torch.float32)}))
    assert find_stable_shapes.cache_info().misses == known.misses


@pytest.mark.skipif(torch.get_num_threads() > 1, reason="weights are kept where torch has one thread")
def test_kept_weights_are_those_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    config, architecture = prepare(from_fields({"device": "cpu", "speculative_algorithm": "none"}))
    monkeypatch.setattr(model_loader, "model_weights", model_loader.model_weights)
    monkeypatch.setattr(WeightTable, "load", WeightTable.load)
    keep_weights()
    args = architecture, config.model.model_path, config.model.load_format, config.model.quantization
    one, other = (model_loader.load_model(make_context(config, AS_CONFIGURED), *args) for _ in range(2))
    tensors = [[*model.lm_head.tensors, *model.layers[-1].mlp.down_proj.tensors, model.embed] for model in (one, other)]
    assert [t.data_ptr() for t in tensors[0]] == [t.data_ptr() for t in tensors[1]]
    (file,) = Path(config.model.model_path).glob("*.safetensors")
    with safe_open(file, "pt") as found:
        down = found.get_tensor(f"model.layers.{len(one.layers) - 1}.mlp.down_proj.weight")
        assert torch.equal(one.embed, found.get_tensor("model.embed_tokens.weight"))
    assert torch.equal(one.layers[-1].mlp.down_proj.storage.weight, int4_storage(down).weight)
