"""Flags, the file of flags, and `resolve`."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from process.fake import dummy_model
from runtime import launch_server
from runtime.batch import WorkerLimits
from runtime.config.flag_parser import build_parser, dump, flags, from_fields, parse
from runtime.config.graphs import default_graph_sizes
from runtime.config.machine import KERNEL_PACKAGES, Gpu, MachineFacts, probe
from runtime.config.model_facts import DraftFacts, ModelFacts
from runtime.config.quant_config import Int4Format, QuantConfig
from runtime.config.resolve import check, resolve
from runtime.config.runtime_config import RuntimeConfig, SpeculativeConfig
from runtime.config.server_args import ServerArgs
from runtime.config.speculative import AUTO_DEPTHS, DEFAULT_STEPS, EMBEDDED_DRAFT, with_embedded_draft
from runtime.config.speculative_tuning import read_tuning
from runtime.config.synthetic_acceptance import synthetic_acceptance
from runtime.entrypoints import prepare
from runtime.errors import ConfigError, ServingError
from runtime.launch_server import bind, open_standard_streams
from runtime.managers.prefill_budget import PrefillBudget

SGLANG_FLAGS = re.findall(
    r"\S+",
    """
    model-path tokenizer-path served-model-name host port api-key admin-api-key dtype kv-cache-dtype quantization context-length
    trust-remote-code load-format revision device tp-size nnodes node-rank dist-init-addr dist-timeout
    dp-size enable-dp-attention ep-size mem-fraction-static max-running-requests max-queued-requests
    max-total-tokens chunked-prefill-size max-prefill-tokens schedule-policy schedule-conservativeness page-size disable-radix-cache
    max-mamba-cache-size
    disable-overlap-schedule enable-mixed-chunk attention-backend sampling-backend grammar-backend speculative-algorithm
    speculative-draft-model-path speculative-num-steps speculative-eagle-topk speculative-num-draft-tokens speculative-token-map
    speculative-accept-threshold-single speculative-accept-threshold-acc disable-cuda-graph disable-cuda-graph-padding cuda-graph-max-bs
    cuda-graph-bs watchdog-timeout stream-interval skip-server-warmup chat-template tool-call-parser reasoning-parser random-seed log-level
    log-requests enable-metrics sampling-defaults preferred-sampling-params disable-shared-experts-fusion disable-custom-all-reduce
    """,
)
OUR_FLAGS = re.findall(
    r"\S+",
    """
    shutdown-timeout speculative-draft-load-format speculative-draft-attention-backend disable-draft-extend-cuda-graph
    disable-draft-decode-cuda-graph speculative-synthetic-accept-length speculative-check-parity trust-request-chat-template profile
    cpu-threads max-queued-tokens max-body-mib max-parse-ms max-logprob-cells queue-timeout request-timeout max-priority
    speculative-disable-by-batch-size embedding-pooling strict-request-fields protect-metrics allow-origins allowed-hosts
    download-dir log-level-http api-key-file uds ssl-keyfile ssl-certfile ssl-keyfile-password
    distributed-executor-backend log-format log-slow-requests otlp-traces-endpoint
    speculative-draft-model-quantization enable-iteration-graph speculative-draft-tp-size speculative-tuning disable-fp8-activations
    disable-iteration-graph disable-draft-head-candidates disable-head-bounds
    """,
)

KERNELS = frozenset(KERNEL_PACKAGES)
CPU = MachineFacts(cores=2, memory=16 << 30, gpus=(), packages=frozenset())
HOPPER = MachineFacts(cores=16, memory=128 << 30, gpus=(Gpu("H200", (9, 0), 140 << 30),), packages=KERNELS)
AMPERE = MachineFacts(cores=16, memory=128 << 30, gpus=(Gpu("A100", (8, 0), 80 << 30),), packages=KERNELS)
TURING = MachineFacts(cores=16, memory=128 << 30, gpus=(Gpu("T4", (7, 5), 16 << 30),), packages=KERNELS)
LLAMA = ModelFacts(
    path="/models/llama",
    load_format="safetensors",
    tokenizer_path="/models/llama",
    name="llama",
    dtype="bfloat16",
    max_context_len=8192,
    head_dim=128,
)
TWO_GROUPS = {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "device": "cpu", "attention_backend": "torch_native"}
TWO_NODES = {
    "tp_size": 4, "nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:29500", "device": "cpu", "attention_backend": "torch_native"
}  # fmt: skip
DRAFT = DraftFacts("/models/eagle", "safetensors")
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/models/eagle"}


def args(**given: object) -> ServerArgs:
    return from_fields(given)


def test_the_list_of_flags_is_pinned() -> None:
    assert sorted(flag.name.replace("_", "-") for flag in flags()) == sorted(SGLANG_FLAGS + OUR_FLAGS)


def test_help_is_grouped_and_describes_every_flag_in_one_sentence() -> None:
    text = build_parser().format_help()
    for flag in flags():
        assert flag.spellings[0] in text
        assert flag.help.endswith(".")
    for group in ("model", "server", "device and memory", "scheduling", "CUDA graphs", "speculative decoding", "observing"):
        assert f"\n{group}:" in text


def test_the_short_spellings_of_sglang_work() -> None:
    command = parse(
        ["--model", "m", "--tp", "2", "--cuda-graph-bs", "1", "2", "4", "--disable-radix-cache", "--log-requests=false",
         "--speculative-draft-model", "d"]
    )  # fmt: skip
    assert (command.args.model_path, command.args.speculative_draft_model_path) == ("m", "d")
    assert command.args.tp_size == 2
    assert command.args.cuda_graph_bs == (1, 2, 4)
    assert command.args.disable_radix_cache
    assert not command.args.log_requests


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tp-sise", "2"], ["--tp-sise", "--tp-size"]),
        (["--port", "many"], ["--port", "many"]),
        (["--dtype", "int4"], ["--dtype", "int4", "float32"]),
        (["--host"], ["--host"]),
        (["--speculative-draft", "x"], ["'--speculative-draft'", "'--speculative-draft-model'"]),
        (["--speculative-draft-model"], ["--speculative-draft-model-path/--speculative-draft-model"]),
        (["--disable-draft-extend"], ["'--disable-draft-extend-cuda-graph'"]),
        (["--chunked"], ["'--chunked-prefill-size'"]),
        (["serve"], ["serve"]),
        (["--config", "/nowhere/at/all.yaml"], ["--config", "/nowhere/at/all.yaml"]),
    ],
)
def test_a_bad_command_line_is_reported_in_one_line(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


def test_the_command_line_takes_precedence_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "talon.yaml"
    file.write_text(
        "port: 1234\nmodel: from-file\nspeculative-draft-model: draft\ndisable_radix_cache: true\ncuda-graph-bs: [1, 2]\napi-key:\n"
    )
    from_file = parse(["--config", str(file)]).args
    assert (from_file.port, from_file.model_path, from_file.disable_radix_cache, from_file.cuda_graph_bs) == (
        1234,
        "from-file",
        True,
        (1, 2),
    )
    assert from_file.speculative_draft_model_path == "draft"
    both = parse(["--port", "5", "--config", str(file), "--disable-radix-cache", "false"]).args
    assert (both.port, both.model_path, both.disable_radix_cache) == (5, "from-file", False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("attention-backand: fa3", ["attention-backand", "attention-backend"]),
        ("- port\n- 3", ["mapping"]),
        ("port: {", ["YAML"]),
        ("port: fast", ["'port'", "whole number", "'fast'"]),
        ("config: other.yaml", ["config"]),
        ("enable-metrics:", ["'enable-metrics'", "True or False"]),
        ("portt:", ["'portt'", "did you mean 'port'"]),
        ("port: !!bool x", ["not YAML"]),
        ("port: !!int x", ["not YAML"]),
        ("port: !!timestamp x", ["not YAML"]),
        ("[" * 3000, ["not YAML"]),
        (r'port: "\ud800"', ["'port'", "UTF-8"]),
        ("portt: &a [*a]", ["'portt'", "did you mean 'port'"]),
        ("portt: {2026-01-01: 3}", ["'portt'", "did you mean 'port'"]),
        ("port: 1\nmodel: m\nport: 2", ["'port' is given twice", "line 3"]),
    ],
)
def test_a_bad_file_is_reported_in_one_line(tmp_path: Path, content: str, words: list[str]) -> None:
    file = tmp_path / "talon.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        parse(["--config", str(file)])
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


def huge(tmp_path: Path) -> str:
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 8 << 30)
    return str(tmp_path / "huge")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (lambda _: "/dev/zero", "/dev/zero cannot be read: it is neither a regular file nor a pipe"),
        (huge, "huge cannot be read: it has 8,192 MiB; the limit is "),
        (str, " cannot be read: it is a folder"),
        (lambda _: "x" * 300, "xx cannot be read: file name too long"),
    ],
)
def test_files_that_are_not_small_are_refused_unread(tmp_path: Path, name: Callable[[Path], str], why: str) -> None:
    path = name(tmp_path)
    readers: dict[str, Callable[[], object]] = {
        "--config": lambda: parse(["--config", path]),
        "--api-key-file": lambda: check(args(api_key_file=path)),
        "--speculative-tuning": lambda: read_tuning(path),
    }
    for flag, read in readers.items():
        with pytest.raises(ConfigError, match=rf"^{flag} .*{why}"):
            read()


@pytest.mark.parametrize("content", [b"port: 8123\n", b"x" * (17 << 20)], ids=["small", "endless"])
def test_a_config_may_come_from_a_pipe(tmp_path: Path, content: bytes) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        with suppress(BrokenPipeError), pipe.open("wb") as file:
            file.write(content)

    writer = threading.Thread(target=write)
    writer.start()
    if len(content) < 100:
        assert parse(["--config", str(pipe)]).args.port == 8123
    else:
        with pytest.raises(ConfigError, match=r"pipe cannot be read: it has more than 16 MiB\.$"):
            parse(["--config", str(pipe)])
    writer.join()


@pytest.mark.parametrize("flag", ["model_path", "tokenizer_path", "ssl_keyfile", "speculative_token_map", "chat_template", "profile"])
def test_a_path_that_is_too_long_names_no_file(flag: str) -> None:
    needed = {"ssl_keyfile": {"ssl_certfile": "x"}, "speculative_token_map": EAGLE}.get(flag, {})
    given = args(**{**needed, flag: "x" * 300})
    if flag == "profile":
        return check(given)  # the folder is created later
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} "):
        prepare.prepare(given)


def test_a_null_character_in_an_option_is_refused(tmp_path: Path) -> None:
    (tmp_path / "talon.yaml").write_text(r'model-path: "a\0b"')
    with pytest.raises(ConfigError, match="Option 'model-path' must be UTF-8 without null characters"):
        parse(["--config", str(tmp_path / "talon.yaml")])


def test_stdout_escapes_what_its_encoding_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    open_standard_streams()
    print("serving \u2603", flush=True)
    assert written.getvalue() == b"serving \\u2603\n"


@pytest.mark.parametrize(("flag", "kind"), [("--cuda-graph-bs", "a whole number"), ("--mem-fraction-static", "a number")])
def test_a_number_in_words_is_refused_in_plain_words(flag: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"argument {flag}.*: must be {kind}, not 'two'$"):
        parse([flag, "two"])


def test_a_configuration_that_cannot_be_written_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def write(text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(launch_server, "write_stdout", write)
    with pytest.raises(ServingError, match=r"^The configuration cannot be written to stdout: no space left on device\.$"):
        launch_server.print_config(args())


def test_a_host_name_that_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Cannot listen at \u00e9\.\.\u00e9 port 0: encoding of hostname failed"):
        bind("\u00e9..\u00e9", 0)


@pytest.mark.parametrize("flag", ["--model-path", "--served-model-name", "--dtype"])
def test_values_that_are_not_utf8_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}.*: must be UTF-8"):
        parse([flag, os.fsdecode(b"a\xff")])


@pytest.mark.parametrize("flag", ["--model-path", "--api-key-file", "--chat-template"])
def test_two_dashes_are_no_value(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        prepare.prepare(parse([f"{flag}=--"]).args)


def test_an_empty_name_of_the_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--config \. cannot be read: it is a folder"):
        parse(["--config", ""])


def test_dump_config_round_trips(tmp_path: Path) -> None:
    argv = [
        "--model",
        "m",
        "--cuda-graph-bs",
        "1",
        "8",
        "--mem-fraction-static",
        "0.8",
        "--chat-template",
        "{{ 'a: b' }}\n",
        "--log-requests",
    ]
    asked = parse(argv).args
    file = tmp_path / "talon.yaml"
    file.write_text(dump(asked))
    assert parse(["--config", str(file)]).args == asked


def test_completion_scripts_contain_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--print-completion", "bash"])
    script = capsys.readouterr().out
    assert ended.value.code == 0
    for name in SGLANG_FLAGS + OUR_FLAGS:
        assert f"--{name}" in script


def test_keyword_options_are_checked_by_name() -> None:
    assert from_fields({"model": "m", "port": 3}).model_path == "m"
    assert from_fields({"speculative_draft_model": "d"}).speculative_draft_model_path == "d"
    with pytest.raises(ConfigError, match="model_path"):
        from_fields({"modle_path": Path("m")})
    with pytest.raises(ConfigError, match="'model' and 'model_path' are names of the same option"):
        from_fields({"model": "m", "model_path": "n"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"speculative_num_steps": "3"}, ["speculative_num_steps", "'3'", "whole number"]),
        ({"speculative_num_steps": 2.5}, ["2.5", "whole number"]),
        ({"speculative_num_steps": True}, ["True", "whole number"]),
        ({"speculative_check_parity": "false"}, ["'false'", "True or False"]),
        ({"disable_radix_cache": None}, ["None", "True or False"]),
        ({"speculative_accept_threshold_single": "0.5"}, ["'0.5'", "a number"]),
        ({"cuda_graph_bs": 4}, ["cuda_graph_bs", "4", "list"]),
        ({"cuda_graph_bs": ["1"]}, ["'1'", "list"]),
        ({"speculative_draft_model": ["a"]}, ["speculative_draft_model", "text"]),
        ({"speculative_algorithm": "EAGLE2"}, ["EAGLE2", "EAGLE, EAGLE3, MTP, DFLASH, STANDALONE, NGRAM, none"]),
        ({"quantization": "int3"}, ["int3", "int8"]),
        ({"dtype": "int3"}, ["int3", "bfloat16"]),
        ({"device": "tpu"}, ["tpu", "cpu"]),
        ({"log_level": "loud"}, ["loud", "warning"]),
    ],
)
def test_keyword_options_of_the_wrong_type_are_refused(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_fields(given)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_keyword_options_equal_the_same_command_line() -> None:
    given: dict[str, object] = {
        "model": Path("/m"), "speculative_synthetic_accept_length": 2.5, "watchdog_timeout": 5, "cuda_graph_bs": [1, 2],
        "max_total_tokens": None,
    }  # fmt: skip
    line = ["--model", "/m", "--speculative-synthetic-accept-length", "2.5", "--watchdog-timeout", "5", "--cuda-graph-bs", "1", "2"]
    assert from_fields(given) == parse(line).args


def test_threads_are_those_of_the_flag_then_of_the_environment_then_the_cores() -> None:
    asked = replace(CPU, threads=5)
    assert resolve(args(tp_size=2), asked, LLAMA).device.cpu_threads == 5, "ranks do not share it"
    assert resolve(args(cpu_threads=3), asked, LLAMA).device.cpu_threads == 3
    assert resolve(args(), CPU, LLAMA).device.cpu_threads == CPU.cores


@pytest.mark.parametrize(("value", "threads"), [("3", 3), (" 4,2 ", 4), ("0", None), ("-1", None), ("many", None), ("", None)])
def test_the_environments_number_of_threads_is_read(monkeypatch: pytest.MonkeyPatch, value: str, threads: int | None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert probe().threads == threads


@pytest.mark.parametrize("value", ["[0.9, 0.5, 0.1]", "{a: 1}"])
def test_a_list_in_a_file_is_refused_for_a_flag_of_one_value(tmp_path: Path, value: str) -> None:
    (tmp_path / "config.yaml").write_text(f"speculative-synthetic-accept-length: {value}")
    with pytest.raises(ConfigError, match=r"'speculative-synthetic-accept-length' must be a text; got "):
        parse(["--config", str(tmp_path / "config.yaml")])


def test_defaults_on_a_cpu() -> None:
    config = resolve(args(), CPU, LLAMA)
    assert (config.device.device, config.device.dtype, config.device.attention_backend) == ("cpu", "float32", "torch_native")
    assert (config.cache.page_size, config.scheduler.chunked_prefill_size, config.scheduler.max_running_requests) == (16, 512, 16)
    assert (config.graphs.cuda_graph_bs, config.device.cpu_threads, config.model.quantization) == ((), 2, None)
    assert (config.model.context_length, config.speculative, config.model.served_model_name) == (8192, None, "llama")
    assert config.device.sampling_backend == "pytorch"


def test_defaults_on_hopper_and_on_other_gpus() -> None:
    hopper = resolve(args(), HOPPER, LLAMA)
    assert (hopper.device.device, hopper.device.dtype, hopper.device.attention_backend, hopper.cache.page_size) == (
        "cuda",
        "bfloat16",
        "fa3",
        64,
    )
    assert (hopper.scheduler.chunked_prefill_size, hopper.scheduler.max_running_requests, hopper.cache.mem_fraction_static) == (
        2048,
        None,
        None,
    )
    assert hopper.graphs.cuda_graph_bs[-1] == 256
    assert hopper.device.sampling_backend == "triton"
    assert resolve(args(sampling_backend="pytorch"), HOPPER, LLAMA).device.sampling_backend == "pytorch"
    ampere = resolve(args(), AMPERE, LLAMA)
    assert (ampere.device.attention_backend, ampere.cache.page_size) == ("flashinfer", 16)


@pytest.mark.parametrize(
    ("head_dim", "context", "page_size"),
    [(128, 16384, 128), (128, 131072, 128), (128, 16383, 64), (64, 131072, 64), (256, 131072, 64)],
)
def test_pages_hold_a_block_of_keys_where_contexts_are_long(head_dim: int, context: int, page_size: int) -> None:
    model = replace(LLAMA, head_dim=head_dim, max_context_len=context)
    assert resolve(args(), HOPPER, model).cache.page_size == page_size
    assert resolve(args(), AMPERE, model).cache.page_size == 16
    assert resolve(args(page_size=32), HOPPER, model).cache.page_size == 32
    turing = resolve(args(), TURING, LLAMA)
    assert (turing.device.device, turing.device.attention_backend) == ("cpu", "torch_native"), "the kernels need a newer GPU"


@pytest.mark.parametrize("machine", [CPU, HOPPER])
def test_uncut_prompts_stay_whole_beside_others(machine: MachineFacts) -> None:
    config = resolve(args(chunked_prefill_size=-1), machine, LLAMA)
    limits = WorkerLimits(1 << 20, 16, config.model.context_length, config.model.context_length, config.cache.page_size, 128256)
    budget = PrefillBudget.start(config.scheduler, limits, waiting=1 << 20)
    assert budget.offer(5000, first=True) == 5000
    budget.take(5000)
    assert budget.offer(5000, first=False) == 0, "it waits, because the rest of the pass is too small"
    assert budget.offer(3000, first=False) == 3000


@pytest.mark.parametrize(
    ("flags", "sparse", "largest"),
    [
        ({}, False, 4096),
        ({}, True, 8192),
        ({"max_prefill_tokens": 3000}, True, 3000),
        ({"chunked_prefill_size": 2048}, True, None),
        ({"chunked_prefill_size": -1}, True, None),
        ({"enable_mixed_chunk": True}, True, None),
    ],
)
def test_sparse_models_have_the_largest_chunks(flags: dict[str, Any], sparse: bool, largest: int | None) -> None:
    model = replace(LLAMA, sparse=sparse)
    assert resolve(args(**flags), HOPPER, model).scheduler.largest_chunk_size == largest
    assert resolve(args(**flags), CPU, model).scheduler.largest_chunk_size is None


def test_max_prefill_tokens_holds_for_uncut_prompts() -> None:
    config = resolve(args(chunked_prefill_size=-1, max_prefill_tokens=300), CPU, LLAMA)
    assert (config.scheduler.chunked_prefill_size, config.scheduler.max_prefill_tokens) == (-1, 300)


def test_a_head_dimension_without_kernels_falls_back_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = resolve(args(), HOPPER, replace(LLAMA, head_dim=96))
    assert config.device.attention_backend == "torch_native"
    assert any("96" in line for line in caplog.messages)


def test_float32_checkpoints_become_bfloat16_on_cuda() -> None:
    assert resolve(args(), HOPPER, replace(LLAMA, dtype="float32")).device.dtype == "bfloat16"
    assert resolve(args(), HOPPER, replace(LLAMA, dtype="float16")).device.dtype == "float16"
    int4 = QuantConfig("int4", int4=Int4Format("awq", 128))
    assert resolve(args(), HOPPER, replace(LLAMA, dtype="float16", quant=int4)).device.dtype == "bfloat16"
    assert resolve(args(dtype="float16"), HOPPER, replace(LLAMA, dtype="float16", quant=int4)).device.dtype == "float16"
    assert resolve(args(quantization="int4"), HOPPER, replace(LLAMA, dtype="float16")).device.dtype == "bfloat16"
    assert resolve(args(quantization="fp8"), HOPPER, replace(LLAMA, dtype="float16")).device.dtype == "float16"


def test_each_choice_is_logged_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        resolve(args(), HOPPER, LLAMA)
    text = "\n".join(caplog.messages)
    for word in ("device cuda", "H200", "dtype bfloat16", "attention backend fa3", "random seed"):
        assert word in text


def test_an_sglang_command_line_for_eagle_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    line = (
        "--model-path meta-llama/Meta-Llama-3-8B-Instruct --speculative-algorithm EAGLE "
        "--speculative-draft-model-path lmsys/sglang-EAGLE-LLaMA3-Instruct-8B --speculative-num-steps 2 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 3 --trust-remote-code --dtype float16 --attention-backend fa3"
    )
    with caplog.at_level(logging.WARNING):
        config = resolve(parse(line.split()).args, HOPPER, LLAMA, DRAFT)
    assert (config.device.dtype, config.device.attention_backend) == ("float16", "fa3")
    assert config.speculative is not None
    assert (config.speculative.num_steps, config.speculative.topk, config.speculative.draft_extend_graph) == (2, 1, True)
    assert any("code in model folders is never run" in line for line in caplog.messages), "--trust-remote-code has no effect"


@pytest.mark.parametrize(
    ("given", "machine", "words"),
    [
        ({"tp_size": 2}, HOPPER, ["--tp-size 2", "2 GPUs", "reports 1"]),
        ({"tp_size": 4, "nnodes": 2}, CPU, ["--nnodes", "--dist-init-addr HOST:PORT"]),
        ({"dist_init_addr": "h:1"}, CPU, ["--nnodes", "--dist-init-addr HOST:PORT"]),
        ({**TWO_NODES, "dist_init_addr": "10.0.0.1"}, CPU, ["--dist-init-addr", "HOST:PORT", "10.0.0.1"]),
        ({**TWO_NODES, "dist_init_addr": "fd00::1:29500"}, CPU, ["--dist-init-addr", "[fd00::1]:29500", "fd00::1:29500"]),
        ({**TWO_NODES, "dist_init_addr": "fd00::2"}, CPU, ["--dist-init-addr", "[fd00::1]:29500", "fd00::2"]),
        ({**TWO_NODES, "dist_init_addr": "[fd00::1]"}, CPU, ["--dist-init-addr", "[fd00::1]:29500", "[fd00::1]"]),
        ({**TWO_NODES, "dist_init_addr": "[10.0.0.1]:29500"}, CPU, ["--dist-init-addr", "[fd00::1]:29500", "[10.0.0.1]:29500"]),
        ({**TWO_NODES, "tp_size": 3}, CPU, ["--tp-size 3", "--nnodes 2"]),
        ({**TWO_NODES, "node_rank": 2}, CPU, ["--node-rank", "between 0 and 1"]),
        ({"distributed_executor_backend": "ray"}, CPU, ["--distributed-executor-backend ray", "--tp-size"]),
        ({**TWO_NODES, "distributed_executor_backend": "ray"}, CPU, ["--node-rank must be 0"]),
        ({"dist_timeout": 0.0}, CPU, ["--dist-timeout"]),
        ({"dp_size": 4}, HOPPER, ["--dp-size 4", "--enable-dp-attention"]),
        ({"dp_size": 0}, HOPPER, ["--dp-size must divide", "got 0"]),
        ({"tp_size": 4, "dp_size": 3, "enable_dp_attention": True}, CPU, ["--dp-size must divide --tp-size 4", "got 3"]),
        ({"tp_size": 4, "enable_dp_attention": True}, CPU, ["--enable-dp-attention has no effect", "--dp-size"]),
        ({**TWO_GROUPS, "enable_mixed_chunk": True}, CPU, ["--enable-mixed-chunk", "--enable-dp-attention"]),
        ({"ep_size": 2}, HOPPER, ["--ep-size must divide --tp-size 1", "got 2"]),
        ({"tp_size": 4, "ep_size": 3}, CPU, ["--ep-size must divide --tp-size 4", "got 3"]),
        ({"attention_backend": "fa3"}, CPU, ["fa3", "torch_native"]),
        ({"attention_backend": "flashinfer"}, CPU, ["flashinfer", "torch_native"]),
        ({"attention_backend": "fa3"}, AMPERE, ["fa3", "8.0", "flashinfer"]),
        ({"attention_backend": "fa3", "dtype": "float32"}, HOPPER, ["fa3", "float32", "torch_native"]),
        ({"quantization": "int8"}, HOPPER, ["int8", "cpu"]),
        ({"device": "cuda"}, CPU, ["cuda", "cpu"]),
        ({"device": "cuda"}, TURING, ["--device cuda", "7.5", "8.0", "--device cpu"]),
        ({"dtype": "float16"}, CPU, ["float16", "bfloat16"]),
        ({"disable_fp8_activations": True}, CPU, ["--disable-fp8-activations", "CPU"]),
        ({"quantization": "fp8"}, AMPERE, ["fp8 weights", "8.9", "A100", "8.0", "--dtype float32"]),
        ({"kv_cache_dtype": "fp8_e4m3", "attention_backend": "torch_native"}, AMPERE, ["fp8 keys and values", "8.9", "A100"]),
        ({"cuda_graph_bs": (1, 2)}, CPU, ["--cuda-graph-bs"]),
        ({"cuda_graph_max_bs": 8}, CPU, ["--cuda-graph-max-bs has no effect"]),
        ({"disable_cuda_graph": True, "cuda_graph_bs": (1,)}, HOPPER, ["--disable-cuda-graph"]),
        ({"disable_cuda_graph": True, "enable_iteration_graph": True}, HOPPER, ["--enable-iteration-graph", "nothing is captured"]),
        ({"disable_iteration_graph": True, "enable_iteration_graph": True}, HOPPER, ["--enable-iteration-graph and", "contradict"]),
        (
            {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "enable_iteration_graph": True},
            HOPPER,
            ["--enable-iteration-graph has no effect with --enable-dp-attention"],
        ),
        ({"cuda_graph_bs": (0, 2)}, HOPPER, ["--cuda-graph-bs"]),
        ({"cuda_graph_bs": (1, 64), "cuda_graph_max_bs": 32}, HOPPER, ["--cuda-graph-max-bs", "64"]),
        ({"sampling_backend": "flashinfer"}, HOPPER, ["--sampling-backend", "pytorch"]),
        ({"sampling_backend": "triton"}, CPU, ["--sampling-backend", "pytorch", "CUDA"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, HOPPER, ["--kv-cache-dtype", "auto"]),
        ({"kv_cache_dtype": "fp8_e4m3"}, AMPERE, ["--kv-cache-dtype", "flashinfer", "--attention-backend torch_native"]),
        ({"context_length": 9000}, CPU, ["--context-length", "8192"]),
        ({"mem_fraction_static": 1.0}, HOPPER, ["--mem-fraction-static"]),
        ({"mem_fraction_static": 0.0}, HOPPER, ["--mem-fraction-static"]),
        ({"mem_fraction_static": float("nan")}, HOPPER, ["--mem-fraction-static"]),
        ({"page_size": 3}, CPU, ["--page-size", "power of two"]),
        ({"page_size": 2048}, HOPPER, ["--page-size", "1024"]),
        ({"attention_backend": "torch_native", "cuda_graph_max_bs": 8}, HOPPER, ["torch_native", "fa3"]),
        ({"page_size": 1024, "context_length": 512}, CPU, ["--page-size", "512"]),
        ({"host": ""}, CPU, ["--host is empty"]),
        ({"host": "[::1]"}, CPU, ["--host takes an address without brackets: ::1."]),
        ({"port": 70000}, CPU, ["--port", "65535"]),
        ({"chunked_prefill_size": 1}, CPU, ["--chunked-prefill-size", "16"]),
        ({"chunked_prefill_size": 10**20}, CPU, ["--chunked-prefill-size must be between 16 and 2147483648, or -1"]),
        ({"shutdown_timeout": float("nan")}, CPU, ["--shutdown-timeout"]),
        ({"chat_template": "/nowhere.jinja"}, CPU, ["--chat-template", "/nowhere.jinja"]),
        ({"profile": __file__}, CPU, ["--profile", __file__]),
        ({"profile": ""}, CPU, ["--profile"]),
        ({"cpu_threads": 0}, CPU, ["--cpu-threads"]),
        ({"speculative_num_steps": 3}, HOPPER, ["--speculative-num-steps", "--speculative-algorithm"]),
        ({"disable_draft_extend_cuda_graph": True}, HOPPER, ["--disable-draft-extend-cuda-graph", "--speculative-algorithm"]),
        ({"speculative_algorithm": "EAGLE"}, HOPPER, ["--speculative-draft-model-path"]),
        ({**EAGLE, "speculative_algorithm": "MTP"}, HOPPER, ["--speculative-draft-model-path", "MTP"]),
        ({"speculative_algorithm": "MTP"}, HOPPER, ["multi-token prediction", "Use --speculative-algorithm NGRAM, or EAGLE or"]),
        ({"speculative_algorithm": "NGRAM", "speculative_draft_model_path": "x"}, HOPPER, ["NGRAM", "--speculative-draft-model-path"]),
        ({"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 2}, HOPPER, ["NGRAM", "--speculative-eagle-topk"]),
        ({**EAGLE, "speculative_algorithm": "STANDALONE", "speculative_eagle_topk": 2}, HOPPER, ["STANDALONE", "--speculative-eagle-topk"]),
        ({"speculative_algorithm": "NGRAM", "disable_draft_decode_cuda_graph": True}, HOPPER, ["--disable-draft-decode-cuda-graph"]),
        ({"speculative_algorithm": "NGRAM", "disable_draft_extend_cuda_graph": True}, HOPPER, ["--disable-draft-extend-cuda-graph"]),
        ({"speculative_algorithm": "NGRAM", "disable_draft_head_candidates": True}, HOPPER, ["--disable-draft-head-candidates", "NGRAM"]),
        (
            {**EAGLE, "speculative_algorithm": "STANDALONE", "disable_draft_head_candidates": True},
            HOPPER,
            ["--disable-draft-head-candidates", "standalone"],
        ),
        ({**EAGLE, "speculative_eagle_topk": 2, "speculative_num_steps": 2, "speculative_num_draft_tokens": 8}, HOPPER, ["7 nodes"]),
        ({**EAGLE, "speculative_eagle_topk": 16, "speculative_num_steps": 6}, HOPPER, ["64"]),
        ({**EAGLE, "speculative_num_draft_tokens": 65}, HOPPER, ["--speculative-num-draft-tokens", "64"]),
        ({**EAGLE, "speculative_token_map": "/nowhere.pt"}, HOPPER, ["--speculative-token-map", "/nowhere.pt"]),
        (
            {**EAGLE, "speculative_token_map": "thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt"},
            HOPPER,
            ["--speculative-token-map thunlp/", "on this machine", "torch.save", "list or a tensor", "Download"],
        ),
        ({**EAGLE, "speculative_algorithm": "EAGLE3", "speculative_token_map": "x"}, HOPPER, ["--speculative-token-map", "EAGLE3"]),
        ({"speculative_algorithm": "NGRAM", "speculative_token_map": "x"}, HOPPER, ["EAGLE, MTP, DFLASH, STANDALONE only; NGRAM copies"]),
        ({**EAGLE, "speculative_accept_threshold_single": 0.0}, HOPPER, ["--speculative-accept-threshold-single"]),
        ({**EAGLE, "speculative_disable_by_batch_size": 0}, HOPPER, ["size 0 leaves no step", "--speculative-algorithm none"]),
        ({**EAGLE, "speculative_disable_by_batch_size": -1}, HOPPER, ["--speculative-disable-by-batch-size", "between 1 and"]),
        ({"speculative_disable_by_batch_size": 4}, HOPPER, ["--speculative-disable-by-batch-size", "--speculative-algorithm"]),
        (
            {**EAGLE, "speculative_num_steps": "auto", "speculative_eagle_topk": 2},
            HOPPER,
            ["auto needs chains", "--speculative-eagle-topk 1"],
        ),
        ({**EAGLE, "speculative_num_steps": "auto", "speculative_num_draft_tokens": 4}, HOPPER, ["--speculative-num-draft-tokens", "auto"]),
        ({"speculative_num_steps": "auto"}, HOPPER, ["--speculative-num-steps", "--speculative-algorithm"]),
        ({**EAGLE, "speculative_num_steps": 0}, HOPPER, ["--speculative-num-steps", "between 1 and 63"]),
        ({**EAGLE, "speculative_num_steps": "auto", "speculative_synthetic_accept_length": "5"}, HOPPER, ["from 1 to 4"]),
        ({**EAGLE, "speculative_num_steps": "auto", "speculative_synthetic_accept_length": "0.5,0.5"}, HOPPER, ["7 probabilities"]),
        ({**EAGLE, "speculative_synthetic_accept_length": "5"}, HOPPER, ["from 1 to 4"]),
        ({**EAGLE, "speculative_synthetic_accept_length": "0.5,0.5"}, HOPPER, ["3 probabilities"]),
        ({**EAGLE, "speculative_synthetic_accept_length": "2", "speculative_eagle_topk": 2}, HOPPER, ["--speculative-eagle-topk 1"]),
        *(
            (
                {**EAGLE, "speculative_synthetic_accept_length": "2", name: 0.9},
                CPU,
                ["--" + name.replace("_", "-"), "Leave --" + name.replace("_", "-") + " out."],
            )
            for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
        ),
        ({"enable_mixed_chunk": True}, AMPERE, ["--enable-mixed-chunk", "flashinfer"]),
        ({"enable_mixed_chunk": True, "chunked_prefill_size": -1}, CPU, ["--enable-mixed-chunk", "--chunked-prefill-size"]),
        ({"enable_mixed_chunk": True, "speculative_algorithm": "NGRAM"}, HOPPER, ["--enable-mixed-chunk", "NGRAM"]),
        ({**EAGLE, "enable_mixed_chunk": True, "speculative_eagle_topk": 2}, HOPPER, ["--enable-mixed-chunk", "tree"]),
        ({**EAGLE, "speculative_draft_attention_backend": "fa3"}, AMPERE, ["--speculative-draft-attention-backend", "8.0"]),
        ({**EAGLE, "speculative_draft_tp_size": 1}, CPU, ["--speculative-draft-tp-size", "one rank"]),
        ({**EAGLE, "tp_size": 4, "speculative_draft_tp_size": 2}, CPU, ["--speculative-draft-tp-size", "1 or 4"]),
    ],
)
def test_an_option_that_cannot_take_effect_is_refused_by_name(given: dict[str, object], machine: MachineFacts, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(args(**given), machine, LLAMA, DRAFT)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("algorithm", ["EAGLE", "MTP"])
def test_without_a_draft_model_the_checkpoints_own_layer_drafts(algorithm: str) -> None:
    model, asked = replace(LLAMA, has_mtp=True), {"model_path": "m", "speculative_algorithm": algorithm}
    spec = spec_of(resolve(args(**asked, speculative_token_map=__file__), HOPPER, model))
    assert (spec.algorithm, spec.draft_model_path, spec.depths, spec.token_map) == ("MTP", None, AUTO_DEPTHS, __file__)
    tree = spec_of(resolve(args(**asked, speculative_eagle_topk=4), HOPPER, model))
    assert (tree.algorithm, tree.topk) == ("MTP", 4)


def spec_of(config: RuntimeConfig) -> SpeculativeConfig:
    assert config.speculative is not None
    return config.speculative


KEY_FILE = str(Path(__file__).with_name("api_key.txt"))
TREE = {"speculative_eagle_topk": 4, "speculative_num_steps": 5, "speculative_num_draft_tokens": 8}
SAME_NAME: dict[str, object] = {
    "tokenizer_path": None, "served_model_name": "m", "revision": "r", "context_length": 99, "host": "::1", "port": 1, "api_key": "k",
    "admin_api_key": "a", "max_queued_requests": 3, "max_queued_tokens": 9, "max_body_mib": 2,
    "max_parse_ms": 7, "max_logprob_cells": 8, "queue_timeout": 1.5,
    "request_timeout": 2.5, "max_priority": 4,
    "trust_request_chat_template": True, "skip_server_warmup": True,
    "shutdown_timeout": 5.0, "watchdog_timeout": 6.0, "chat_template": "{{ x }}", "device": "cpu", "attention_backend": "flashinfer",
    "sampling_backend": "pytorch", "mem_fraction_static": 0.5, "max_total_tokens": 7700, "max_running_requests": 7, "page_size": 32,
    "max_mamba_cache_size": 6,
    "cpu_threads": 3, "chunked_prefill_size": 64, "max_prefill_tokens": 4096, "schedule_policy": "lpm", "schedule_conservativeness": 0.5,
    "stream_interval": 4, "random_seed": 5, "cuda_graph_bs": (1, 3), "log_level": "debug", "log_requests": True, "enable_metrics": False,
    "dtype": "float16", "load_format": None, "model_path": None, "quantization": None, "sampling_defaults": "openai",
    "strict_request_fields": True, "log_level_http": "error", "uds": "/tmp/s",
    "log_format": "json", "log_slow_requests": 3.5, "otlp_traces_endpoint": "http://collector:4318/v1/traces",
    "embedding_pooling": "last", "grammar_backend": "none", "speculative_tuning": None,
}  # fmt: skip
"""Flags with a field of the same name; None for those that come from the model's facts or have tests of their own."""
OTHER_NAME: dict[str, tuple[dict[str, object], Callable[[RuntimeConfig], object], object]] = {
    "api_key_file": ({"api_key_file": KEY_FILE}, lambda c: c.server.api_key_file, KEY_FILE),
    **{name: ({"ssl_keyfile": KEY_FILE, "ssl_certfile": KEY_FILE, "ssl_keyfile_password": "p"}, attrgetter(f"server.{name}"), value)
       for name, value in (("ssl_keyfile", KEY_FILE), ("ssl_certfile", KEY_FILE), ("ssl_keyfile_password", "p"))},
    "protect_metrics": ({"protect_metrics": True, "api_key": "k"}, lambda c: c.server.protect_metrics, True),
    "allowed_hosts": ({"allowed_hosts": "a.example, b.example"}, lambda c: c.server.allowed_hosts, ("a.example", "b.example")),
    "allow_origins": (
        {"allow_origins": "https://a.example, http://b:3000/"}, lambda c: c.server.allow_origins, ("https://a.example", "http://b:3000")
    ),
    "preferred_sampling_params": (
        {"preferred_sampling_params": '{"top_k": 5}'}, lambda c: c.model.preferred_sampling_params.given(), {"top_k": 5}
    ),
    "cuda_graph_max_bs": ({"cuda_graph_max_bs": 24}, lambda c: c.graphs.cuda_graph_bs[-1], 24),
    "disable_fp8_activations": ({"disable_fp8_activations": True}, lambda c: c.device.tuning.fp8_activations, False),
    "disable_shared_experts_fusion": ({"disable_shared_experts_fusion": True}, lambda c: c.model.fuse_shared_experts, False),
    "disable_cuda_graph": ({"disable_cuda_graph": True}, lambda c: c.graphs.cuda_graph_bs, ()),
    "disable_cuda_graph_padding": ({"disable_cuda_graph_padding": True}, lambda c: c.graphs.cuda_graph_padding, False),
    "disable_head_bounds": ({"disable_head_bounds": True}, lambda c: c.graphs.head_bounds, False),
    "enable_iteration_graph": ({"enable_iteration_graph": True}, lambda c: c.graphs.iteration_graph, True),
    "disable_iteration_graph": ({"disable_iteration_graph": True}, lambda c: c.graphs.iteration_graph, False),
    "disable_radix_cache": ({"disable_radix_cache": True}, lambda c: c.cache.radix_cache, False),
    "disable_overlap_schedule": ({"disable_overlap_schedule": True}, lambda c: c.scheduler.overlap, False),
    "enable_mixed_chunk": ({"enable_mixed_chunk": True}, lambda c: c.scheduler.mixed_chunk, True),
    "profile": ({"profile": "traces"}, lambda c: c.server.profile_folder, "traces"),
    "speculative_algorithm": ({"speculative_algorithm": "EAGLE3"}, lambda c: spec_of(c).algorithm, "EAGLE3"),
    "speculative_draft_model_path": ({}, lambda c: spec_of(c).draft_model_path, DRAFT.path),
    "speculative_draft_load_format": ({}, lambda c: spec_of(c).draft_load_format, DRAFT.load_format),
    "speculative_draft_model_quantization": (
        {"speculative_draft_model_quantization": "fp8"}, lambda c: spec_of(c).draft_quantization, "fp8"
    ),
    "speculative_draft_tp_size": (
        {"speculative_draft_tp_size": 1, "tp_size": 2, "nnodes": 2, "dist_init_addr": "10.0.0.1:29500"},
        lambda c: spec_of(c).draft_tp_size, 1,
    ),
    "speculative_num_steps": (TREE, lambda c: spec_of(c).num_steps, 5),
    "speculative_eagle_topk": (TREE, lambda c: spec_of(c).topk, 4),
    "speculative_num_draft_tokens": ({**TREE, "speculative_num_draft_tokens": 9}, lambda c: spec_of(c).num_draft_tokens, 9),
    "speculative_token_map": ({"speculative_token_map": __file__}, lambda c: spec_of(c).token_map, __file__),
    "speculative_accept_threshold_single": (
        {"speculative_accept_threshold_single": 0.5}, lambda c: spec_of(c).accept_threshold_single, 0.5
    ),
    "speculative_accept_threshold_acc": ({"speculative_accept_threshold_acc": 0.5}, lambda c: spec_of(c).accept_threshold_acc, 0.5),
    "speculative_draft_attention_backend": (
        {"speculative_draft_attention_backend": "flashinfer"}, lambda c: (c.device.attention_backend, spec_of(c).attention_backend),
        ("fa3", "flashinfer"),
    ),
    "disable_draft_head_candidates": ({"disable_draft_head_candidates": True}, lambda c: spec_of(c).draft_candidates, False),
    "disable_draft_extend_cuda_graph": (
        {"disable_draft_extend_cuda_graph": True}, lambda c: (spec_of(c).draft_decode_graph, spec_of(c).draft_extend_graph), (True, False)
    ),
    "disable_draft_decode_cuda_graph": (
        {"disable_draft_decode_cuda_graph": True}, lambda c: (spec_of(c).draft_decode_graph, spec_of(c).draft_extend_graph), (False, True)
    ),
    "speculative_synthetic_accept_length": (
        {"speculative_synthetic_accept_length": "0.9,0.5,0.1"}, lambda c: spec_of(c).synthetic_accept, (0.9, 0.5, 0.1)
    ),
    "speculative_disable_by_batch_size": (
        {"speculative_disable_by_batch_size": 24}, lambda c: spec_of(c).disable_by_batch_size, 24
    ),
    "nnodes": (TWO_NODES, lambda c: (c.parallel.nnodes, list(c.parallel.own_ranks), c.device.cpu_threads), (2, [2, 3], 8)),
    "node_rank": (TWO_NODES, lambda c: c.parallel.node_rank, 1),
    "dist_init_addr": (TWO_NODES, lambda c: c.parallel.dist_init_addr, "10.0.0.1:29500"),
    "distributed_executor_backend": (
        {"tp_size": 2, "distributed_executor_backend": "ray"}, lambda c: c.parallel.executor, "ray"
    ),
    "kv_cache_dtype": (
        {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "torch_native"}, lambda c: c.device.kv_cache_dtype, "fp8_e4m3"
    ),
    "dist_timeout": ({"dist_timeout": 30.0}, lambda c: c.parallel.dist_timeout, 30.0),
    "disable_custom_all_reduce": ({"disable_custom_all_reduce": True}, lambda c: c.parallel.disable_custom_all_reduce, True),
    "tp_size": (
        {"tp_size": 4, "device": "cpu", "attention_backend": "torch_native"}, lambda c: (c.parallel.tp_size, c.device.cpu_threads), (4, 4)
    ),
    "dp_size": (TWO_GROUPS, lambda c: c.parallel.dp_size, 2),
    "enable_dp_attention": (TWO_GROUPS, lambda c: c.parallel.enable_dp_attention, True),
    "ep_size": (
        {"tp_size": 4, "ep_size": 2, "device": "cpu", "attention_backend": "torch_native"}, lambda c: c.parallel.ep_size, 2
    ),
    "speculative_check_parity": ({"speculative_check_parity": True}, lambda c: spec_of(c).check_parity, True),
    "tool_call_parser": ({"tool_call_parser": "mistral"}, lambda c: c.model.tool_call_parser, "mistral"),
    "reasoning_parser": ({"reasoning_parser": "none"}, lambda c: c.model.reasoning_parser, "none"),
}  # fmt: skip
REFUSED = {
    "download_dir", "trust_remote_code"
}  # fmt: skip


@pytest.mark.parametrize("name", [*SAME_NAME, *OTHER_NAME])
def test_each_flag_reaches_the_configuration(name: str) -> None:
    if name in OTHER_NAME:
        given, read, expected = OTHER_NAME[name]
        assert read(resolve(args(**{**EAGLE, **given}), HOPPER, LLAMA, DRAFT)) == expected
        assert name.startswith("speculative_draft_") or read(resolve(args(**EAGLE), HOPPER, LLAMA, DRAFT)) != expected, (
            "the default is the same"
        )
    elif (value := SAME_NAME[name]) is not None:
        model = replace(LLAMA, recurrent=True) if name == "max_mamba_cache_size" else LLAMA
        assert resolve(args(**{name: value}), HOPPER, model).by_flag()[name] == value
        assert resolve(args(), HOPPER, model).by_flag()[name] != value, "the default is the same"


def test_a_grammar_backend_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--grammar-backend xgrammar needs the package: pip install 'talon-runtime\[xgrammar\]'"):
        resolve(args(grammar_backend="xgrammar"), CPU, LLAMA)


def test_forced_acceptance_allows_no_grammars() -> None:
    forced = args(**{**EAGLE, "speculative_synthetic_accept_length": "0.9,0.5,0.1"})
    assert resolve(forced, HOPPER, LLAMA, DRAFT).scheduler.grammar_backend == "none"


def test_attention_groups_draft_at_depths_chosen_for_all_of_them() -> None:
    config = resolve(args(**TWO_GROUPS, **EAGLE), CPU, LLAMA, DRAFT).speculative
    assert config is not None
    assert (config.num_steps, config.depths) == (7, (0, 1, 2, 3, 5, 7))


def test_every_flag_is_configured_or_refused() -> None:
    assert {flag.name for flag in flags()} == {*SAME_NAME, *OTHER_NAME, *REFUSED}


@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
@pytest.mark.parametrize("key", ["", " ", "a b", "schl\u00fcssel", "a\n"])
def test_keys_that_no_header_can_carry_are_refused(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} "):
        check(args(**{name: key}))
    check(args(**{name: "sk-a~1!"}))


def test_check_refuses_what_no_machine_can_do() -> None:
    for given in (
        {"tp_size": 0},
        {"dp_size": 2},
        {"port": -1},
        {"speculative_num_steps": 3, "model_path": "x"},
        {"speculative_algorithm": "EAGLE"},
    ):
        with pytest.raises(ConfigError):
            check(args(**given))


def test_eagle_has_sglangs_defaults() -> None:
    config = resolve(args(**EAGLE), HOPPER, LLAMA, DRAFT).speculative
    assert config is not None
    assert (config.attention_backend, config.draft_decode_graph, config.draft_extend_graph) == ("fa3", True, True)
    assert (config.draft_model_path, config.draft_load_format) == (DRAFT.path, DRAFT.load_format)
    assert (config.accept_threshold_single, config.accept_threshold_acc, config.synthetic_accept) == (1.0, 1.0, None)


@pytest.mark.parametrize(
    ("given", "shape", "depths"),
    [
        ({}, (7, 1, 8), AUTO_DEPTHS),
        ({"speculative_eagle_topk": 1}, (7, 1, 8), AUTO_DEPTHS),
        ({"speculative_synthetic_accept_length": "2.5"}, (7, 1, 8), AUTO_DEPTHS),
        ({"speculative_synthetic_accept_length": "0.9,0.5,0.1"}, (3, 1, 4), ()),
        ({"speculative_num_steps": 3}, (3, 1, 4), ()),
        ({"speculative_num_draft_tokens": 4}, (3, 1, 4), ()),
        ({"speculative_eagle_topk": 2}, (3, 2, 11), ()),
        ({"speculative_draft_model_path": str(EMBEDDED_DRAFT)}, (3, 1, 4), ()),
    ],
)
def test_a_chain_without_a_number_of_steps_chooses_its_depth(
    given: dict[str, object], shape: tuple[int, int, int], depths: tuple[int, ...]
) -> None:
    asked = {**EAGLE, **given}
    config = spec_of(resolve(args(**asked), HOPPER, LLAMA, DraftFacts(str(asked["speculative_draft_model_path"]), "safetensors")))
    assert ((config.num_steps, config.topk, config.num_draft_tokens), config.depths) == (shape, depths)


def test_a_chain_verifies_one_token_more_than_it_drafts(caplog: pytest.LogCaptureFixture) -> None:
    config = resolve(args(**EAGLE, speculative_num_steps=5, speculative_num_draft_tokens=4), HOPPER, LLAMA, DRAFT).speculative
    assert config is not None
    assert config.num_draft_tokens == 6
    assert any("6" in line and "4" in line for line in caplog.messages)


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE", "EAGLE3", "STANDALONE"])
def test_draft_tokens_alone_determine_the_depth_of_a_chain(algorithm: str, caplog: pytest.LogCaptureFixture) -> None:
    source = {} if algorithm == "NGRAM" else EAGLE
    given = args(**{**source, "speculative_algorithm": algorithm, "speculative_num_draft_tokens": 8})
    with caplog.at_level(logging.INFO):
        found = spec_of(resolve(given, HOPPER, LLAMA, DRAFT if source else None))
    assert (found.num_steps, found.topk, found.num_draft_tokens) == (7, 1, 8)
    assert any("speculative num steps 7" in line for line in caplog.messages)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_draft_tokens_alone_leave_the_depth_of_a_tree() -> None:
    found = spec_of(resolve(args(**EAGLE, speculative_eagle_topk=4, speculative_num_draft_tokens=8), HOPPER, LLAMA, DRAFT))
    assert (found.num_steps, found.topk, found.num_draft_tokens) == (3, 4, 8)


def test_mixed_chunk_follows_its_flag() -> None:
    for machine, given in ((CPU, {}), (HOPPER, {}), (HOPPER, {"attention_backend": "torch_native"})):
        assert not resolve(args(**given), machine, LLAMA).scheduler.mixed_chunk
        assert resolve(args(**given, enable_mixed_chunk=True), machine, LLAMA).scheduler.mixed_chunk
    for algorithm in ("EAGLE", "EAGLE3", "STANDALONE"):
        asked = {**EAGLE, "speculative_algorithm": algorithm, "enable_mixed_chunk": True}
        assert resolve(args(**asked), HOPPER, LLAMA, DRAFT).scheduler.mixed_chunk


@pytest.mark.parametrize("machine", [HOPPER, AMPERE])
def test_a_gpu_without_kernel_packages_falls_back_to_torch(machine: MachineFacts, caplog: pytest.LogCaptureFixture) -> None:
    bare = replace(machine, packages=frozenset())
    assert resolve(args(), bare, LLAMA).device.attention_backend == "torch_native"
    assert "'.[cuda]'" in caplog.text
    asked = "fa3" if machine is HOPPER else "flashinfer"
    with pytest.raises(ConfigError, match=f"--attention-backend {asked}.*cuda"):
        resolve(args(attention_backend=asked), bare, LLAMA)


def test_flashinfer_needs_a_compiler(caplog: pytest.LogCaptureFixture) -> None:
    bare = replace(AMPERE, nvcc=False)
    assert resolve(args(), bare, LLAMA).device.attention_backend == "torch_native"
    assert "nvcc" in caplog.text
    with pytest.raises(ConfigError, match=r"--attention-backend flashinfer is not possible: .*nvcc.*CUDA_HOME"):
        resolve(args(attention_backend="flashinfer"), bare, LLAMA)
    assert resolve(args(), replace(HOPPER, nvcc=False), LLAMA).device.attention_backend == "fa3"


def test_nvcc_is_found_where_flashinfer_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for program in ("toolkit/bin/nvcc", "bin/nvcc", "bin/c++"):
        (tmp_path / program).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert probe().nvcc
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert probe().nvcc
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert not probe().nvcc
    monkeypatch.delenv("CUDA_HOME")
    (tmp_path / "bin/c++").unlink()
    assert not probe().nvcc


def test_a_model_with_a_soft_cap_gets_a_backend_that_has_it(caplog: pytest.LogCaptureFixture) -> None:
    capped = replace(LLAMA, softcap=True)
    for machine in (HOPPER, AMPERE):
        assert resolve(args(), machine, capped).device.attention_backend == "flashinfer"
    assert resolve(args(), replace(HOPPER, nvcc=False), capped).device.attention_backend == "torch_native"
    assert "much slower: flashinfer needs nvcc" in caplog.text
    with pytest.raises(ConfigError, match="fa3 is not possible: its kernels do not support a soft cap of attention scores"):
        resolve(args(attention_backend="fa3"), HOPPER, capped)


def test_a_model_with_sinks_gets_a_backend_that_has_them() -> None:
    sinks = replace(LLAMA, sinks=True)
    assert resolve(args(), HOPPER, sinks).device.attention_backend == "fa3"
    assert resolve(args(), AMPERE, sinks).device.attention_backend == "torch_native"
    with pytest.raises(ConfigError, match="flashinfer is not possible: its kernels do not support attention sinks"):
        resolve(args(attention_backend="flashinfer"), AMPERE, sinks)


def test_draft_graphs_follow_their_flags() -> None:
    off = resolve(args(**EAGLE, disable_draft_extend_cuda_graph=True), HOPPER, LLAMA, DRAFT).speculative
    assert off is not None
    assert (off.draft_decode_graph, off.draft_extend_graph) == (True, False)
    eager = resolve(args(**EAGLE, disable_cuda_graph=True), HOPPER, LLAMA, DRAFT).speculative
    assert eager is not None
    assert (eager.draft_decode_graph, eager.draft_extend_graph) == (False, False)


def test_only_chains_on_a_gpu_look_for_candidates() -> None:
    tree = {"speculative_eagle_topk": 2, "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
    for own, machine, wanted in (({}, HOPPER, True), (tree, HOPPER, False), ({}, CPU, False)):
        resolved = resolve(args(**EAGLE, **own), machine, LLAMA, DRAFT).speculative
        assert resolved is not None
        assert resolved.draft_candidates is wanted


def test_disabling_candidates_where_there_are_none_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tree = {"speculative_eagle_topk": 2, "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
    for own, machine, why in (({}, HOPPER, []), (tree, HOPPER, ["draft trees score all tokens"]), ({}, CPU, ["a CPU scores all tokens"])):
        caplog.clear()
        resolved = resolve(args(**EAGLE, **own, disable_draft_head_candidates=True), machine, LLAMA, DRAFT).speculative
        assert resolved is not None
        assert not resolved.draft_candidates
        lines = [record.message for record in caplog.records if "--disable-draft-head-candidates" in record.message]
        assert lines == [f"--disable-draft-head-candidates: no effect because {reason}" for reason in why]


@pytest.mark.parametrize("flag", ["--disable-cuda-graph", "--disable-draft-extend-cuda-graph", "--disable-draft-decode-cuda-graph"])
def test_graph_flags_on_a_cpu_log_a_warning(flag: str, caplog: pytest.LogCaptureFixture) -> None:
    asked = args(**EAGLE, **{flag[2:].replace("-", "_"): True})
    for machine, warned in ((CPU, [flag]), (HOPPER, [])):
        caplog.clear()
        resolve(asked, machine, LLAMA, DRAFT)
        lines = [record.message for record in caplog.records if record.levelno == logging.WARNING and "graph" in record.message]
        assert [line.partition(":")[0] for line in lines] == warned
        assert all("no graphs on a CPU" in line for line in lines)


@pytest.mark.parametrize(
    ("target", "draft", "asked", "found"),
    [
        ("dummy", "a/head", None, "dummy"),
        ("dummy", "/a/draft.gguf", None, "auto"),
        ("dummy", "/a/draft.gguf", "dummy", "dummy"),
        ("dummy", "a/head", "safetensors", "safetensors"),
        ("safetensors", "a/head", None, "auto"),
    ],
)
def test_a_dummy_target_gets_a_dummy_draft_unless_it_is_gguf(
    monkeypatch: pytest.MonkeyPatch, target: str, draft: str, asked: str | None, found: str
) -> None:
    monkeypatch.setattr(prepare, "resolve_weights", lambda path, load_format, download_dir, flags: (path, load_format))
    given = args(speculative_draft_model_path=draft, speculative_draft_load_format=asked)
    assert prepare.find_draft(given, target) == DraftFacts(draft, found)


def test_attention_that_cannot_be_captured_runs_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert resolve(args(attention_backend="torch_native"), HOPPER, LLAMA).graphs.cuda_graph_bs == ()
        assert "no CUDA graphs: torch_native" in caplog.text
        resolve(args(**EAGLE), HOPPER, LLAMA, DRAFT)
        assert "the draft runs eagerly" not in caplog.text
        resolve(args(**EAGLE, speculative_draft_attention_backend="torch_native"), HOPPER, LLAMA, DRAFT)
        assert "the draft runs eagerly, which is slower: torch_native attention cannot be captured" in caplog.text
    mixed = resolve(args(**EAGLE, speculative_draft_attention_backend="torch_native"), HOPPER, LLAMA, DRAFT)
    assert mixed.graphs.cuda_graph_bs
    assert mixed.speculative is not None
    assert (mixed.speculative.draft_decode_graph, mixed.speculative.draft_extend_graph) == (False, False)


def test_the_quantization_of_a_checkpoint_is_the_models() -> None:
    stored = replace(LLAMA, quant=QuantConfig("fp8"))
    assert resolve(args(), CPU, LLAMA).model.quantization is None
    assert resolve(args(quantization="fp8"), HOPPER, LLAMA).model.quantization == "fp8"
    assert resolve(args(), HOPPER, stored).model.quantization == "fp8"
    assert resolve(args(quantization="fp8"), CPU, stored).weights == "fp8"
    packed = replace(LLAMA, quant=QuantConfig("int4", int4=Int4Format("gptq", 64)))
    for machine in (CPU, HOPPER):
        assert resolve(args(quantization="int4"), machine, LLAMA).weights == "int4"
        assert [resolve(args(quantization=flag), machine, packed).weights for flag in (None, "gptq")] == ["int4"] * 2
    with pytest.raises(ConfigError, match="--quantization awq is not possible: the checkpoint's weights are gptq already"):
        resolve(args(quantization="awq"), CPU, packed)
    with pytest.raises(ConfigError, match="--quantization int8 is not possible: the checkpoint's weights are fp8 already"):
        resolve(args(quantization="int8"), CPU, stored)


@pytest.mark.parametrize(
    ("stored", "flags"),
    [({"quantization_config": FP8_BLOCKS}, {}), ({}, {"speculative_draft_model_quantization": "fp8"})],
)
def test_a_draft_in_fp8_is_refused_where_the_gpu_cannot_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: dict[str, object], flags: dict[str, object]
) -> None:
    model, draft = dummy_model(tmp_path / "model"), dummy_model(tmp_path / "draft")
    shape = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(shape | stored))
    asked = args(
        model_path=str(model), load_format="dummy", speculative_algorithm="STANDALONE", speculative_draft_model_path=str(draft), **flags
    )
    monkeypatch.setattr(prepare, "probe", lambda: HOPPER)
    prepare.prepare(asked)
    monkeypatch.setattr(prepare, "probe", lambda: AMPERE)
    with pytest.raises(ConfigError, match=r"fp8 weights of the draft need a GPU of compute capability 8\.9 or newer; A100 has 8\.0"):
        prepare.prepare(asked)


def test_only_the_embedded_model_is_quantised_by_default() -> None:
    embedded = replace(LLAMA, embedded=True)
    asked = resolve(args(quantization="int8"), CPU, LLAMA).model.quantization
    assert asked == "int8"
    assert resolve(args(quantization="none"), CPU, embedded).model.quantization is None
    assert resolve(args(), HOPPER, embedded).model.quantization is None
    assert resolve(args(), CPU, LLAMA).model.quantization is None


@pytest.mark.parametrize(
    ("given", "quantization", "said"),
    [
        ({}, "int4", ["quantization int4", "--dtype float32 or --quantization none"]),
        ({"dtype": "auto"}, "int4", ["quantization int4"]),
        ({"dtype": "float32"}, None, ["quantization none", "--dtype float32 asks for float32 weights", "--quantization int4"]),
        ({"dtype": "float"}, None, ["--dtype float asks for float32 weights"]),
        ({"dtype": "bfloat16"}, None, ["--dtype bfloat16 asks for bfloat16 weights"]),
        ({"dtype": "float32", "quantization": "int8"}, "int8", []),
        ({"dtype": "float32", "quantization": "none"}, None, []),
    ],
)
def test_an_explicit_dtype_turns_off_the_embedded_models_quantization(
    given: dict[str, object], quantization: str | None, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        config = resolve(args(**given), CPU, replace(LLAMA, embedded=True))
    assert config.model.quantization == quantization
    assert config.device.dtype == ("bfloat16" if given.get("dtype") == "bfloat16" else "float32")
    assert [words for words in said if words not in caplog.text] == []
    assert ("quantization" in caplog.text) == bool(said)


def test_the_embedded_model_drafts_with_its_own_head_by_default() -> None:
    embedded, own = replace(LLAMA, embedded=True), DraftFacts(str(EMBEDDED_DRAFT), "safetensors")
    for machine in (CPU, HOPPER):
        filled = with_embedded_draft(args(), True)
        found = resolve(filled, machine, embedded, own).speculative
        assert found is not None
        assert (found.algorithm, found.draft_model_path) == ("EAGLE3", str(EMBEDDED_DRAFT))
        assert (found.num_steps, found.topk, found.num_draft_tokens) == (DEFAULT_STEPS, 1, DEFAULT_STEPS + 1)
    deeper = resolve(with_embedded_draft(args(speculative_num_steps=5), True), CPU, embedded, own).speculative
    assert deeper is not None
    assert deeper.num_draft_tokens == 6
    assert resolve(with_embedded_draft(args(speculative_algorithm="none"), True), CPU, embedded).speculative is None
    for kept in ({"speculative_algorithm": "NGRAM"}, EAGLE, {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "x"}):
        assert with_embedded_draft(args(**kept), True) == args(**kept)
    assert with_embedded_draft(args(), False) == args()


@pytest.mark.parametrize(
    ("given", "machine", "most"),
    [
        ({}, CPU, 2),
        ({"quantization": "int8"}, CPU, 2),
        ({"dtype": "float32"}, CPU, 8),
        ({"quantization": "none"}, CPU, 8),
        ({"dtype": "bfloat16"}, CPU, None),
        ({"dtype": "float32", "quantization": "int8"}, CPU, 2),
        ({"speculative_num_steps": 2}, CPU, 2),
        ({"speculative_disable_by_batch_size": 9}, CPU, 9),
        ({}, HOPPER, None),
        ({"speculative_disable_by_batch_size": 64}, HOPPER, 64),
    ],
)
def test_the_embedded_models_draft_stops_at_its_measured_batch_size(
    given: dict[str, object], machine: MachineFacts, most: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        config = resolve(
            with_embedded_draft(args(**given), True), machine, replace(LLAMA, embedded=True), DraftFacts(str(EMBEDDED_DRAFT), "safetensors")
        )
    assert spec_of(config).disable_by_batch_size == most
    assert ("at every batch" if most is None else f"up to a batch size of {most};") in caplog.text


@pytest.mark.parametrize("machine", [CPU, HOPPER])
def test_auto_takes_several_depths_and_no_default_batch_limit(machine: MachineFacts) -> None:
    embedded = with_embedded_draft(args(speculative_num_steps="auto"), True)
    found = [
        resolve(embedded, machine, replace(LLAMA, embedded=True), DraftFacts(str(EMBEDDED_DRAFT), "safetensors")),
        resolve(args(**EAGLE, speculative_num_steps="auto", speculative_synthetic_accept_length="2.5"), machine, LLAMA, DRAFT),
        resolve(args(speculative_algorithm="NGRAM", speculative_num_steps="auto"), machine, LLAMA),
    ]
    for spec in map(spec_of, found):
        assert spec.depths == (0, 1, 2, 3, 5, 7)
        assert (spec.num_steps, spec.topk, spec.num_draft_tokens, spec.disable_by_batch_size) == (7, 1, 8, None)
    fixed = spec_of(resolve(args(**EAGLE, speculative_num_steps=3, speculative_synthetic_accept_length="2.5"), machine, LLAMA, DRAFT))
    assert fixed.depths == ()
    assert spec_of(found[1]).synthetic_accept == fixed.synthetic_accept[:1] * 7, "a depth accepts what it accepts when it is fixed"


def test_other_drafts_have_no_default_batch_limit() -> None:
    assert spec_of(resolve(args(**EAGLE), CPU, LLAMA, DRAFT)).disable_by_batch_size is None
    ngram = args(speculative_algorithm="NGRAM")
    assert spec_of(resolve(ngram, CPU, replace(LLAMA, embedded=True))).disable_by_batch_size is None


def test_speculative_flags_without_an_algorithm_are_refused() -> None:
    with pytest.raises(ConfigError, match="--speculative-num-steps"):
        check(args(speculative_algorithm="none", speculative_num_steps=3))
    with pytest.raises(ConfigError, match="--speculative-draft-model-path"):
        check(args(model_path="x", speculative_algorithm="EAGLE3"))
    check(args(speculative_num_steps=5))  # the embedded model's


@pytest.mark.parametrize("largest", [1, 2, 7, 8, 9, 33, 64, 100, 256, 300, 512])
def test_graph_sizes_reach_their_largest_and_waste_little(largest: int) -> None:
    sizes = default_graph_sizes(largest)
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))
    for live in range(1, largest + 1):
        padded = next(size for size in sizes if size >= live)
        assert padded - live <= max(1, live // 8)


def test_the_graphs_cover_the_admission_limit() -> None:
    assert resolve(args(max_running_requests=37), HOPPER, LLAMA).graphs.cuda_graph_bs[-1] == 37
    assert resolve(args(cuda_graph_bs=(4, 1, 4)), HOPPER, LLAMA).graphs.cuda_graph_bs == (1, 4)
    assert resolve(args(disable_cuda_graph=True), HOPPER, LLAMA).graphs.cuda_graph_bs == ()


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_synthetic_acceptance_has_the_requested_mean(steps: int, share: float) -> None:
    wanted = 1.0 + share * steps
    by_position = synthetic_acceptance(str(wanted), steps)
    mean, reached = 1.0, 1.0
    for p in by_position:
        reached *= p
        mean += reached
    assert mean == pytest.approx(wanted, abs=1e-6)


def test_synthetic_acceptance_by_position_is_kept() -> None:
    assert synthetic_acceptance("0.9,0.5, 0", 3) == (0.9, 0.5, 0.0)
    assert synthetic_acceptance("0.5,", 1) == (0.5,)
    for text in ("x", "nan,0.1,0.1", "1.5,0,0", "", ",", "0.9,,0.5,0.1", "0.9,0.5,0.1,,", "nan", "1e400"):
        with pytest.raises(ConfigError):
            synthetic_acceptance(text, 3)


def test_the_machine_is_probed_without_torch() -> None:
    facts = probe()
    assert facts.cores >= 1
    assert facts.memory > 1 << 28
    probing = "from runtime.config.machine import probe; probe(); import runtime.config.flag_parser, runtime.config.resolve"
    code = f"import sys; {probing}; print('torch' in sys.modules)"
    env = {"PYTHONPATH": str(Path(__file__).parents[2] / "python")}
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert made.stdout.strip() == "False"
