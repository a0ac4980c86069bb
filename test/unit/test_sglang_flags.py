"""SGLang's command lines load: its flags are taken, or refused with the reason."""

from __future__ import annotations

import errno
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from runtime.config.flag_parser import flags, from_fields, parse
from runtime.config.resolve import check
from runtime.config.sglang_flags import NO_EFFECT, ONLY, REFUSED, take
from runtime.errors import ConfigError
from runtime.model_files.hub import download

TAKEN = re.findall(
    r"\S+",
    """
    --model-path m --speculative-algo NEXTN --speculative-draft-model-path d --enable-cache-report --decode-log-interval 40
    --log-level-http warning --download-dir /models --json-model-override-args {} --nnodes 1 --node-rank=0
    --cuda-graph-bs-decode 1 2 4 --tokenizer-mode auto --pp-size 1 --bucket-e2e-request-latency 1 2 3 --enable-metrics
    --load-balance-method round_robin --moe-runner-backend triton --enable-dp-lm-head --no-enable-lora --kv-cache-dtype bf16
    --tool-call-parser qwen --reasoning-parser qwen3-thinking --quantization unquant
    """,
)


def test_a_long_command_line_of_sglang_loads(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        args = parse([*TAKEN, "--preferred-sampling-params", '{"top_k": 4}']).args
    check(args)
    assert (args.speculative_algorithm, args.cuda_graph_bs, args.log_level_http) == ("EAGLE", (1, 2, 4), "warning")
    assert (args.kv_cache_dtype, args.tool_call_parser, args.quantization) == ("bfloat16", "qwen25", "none")
    assert (args.download_dir, args.enable_metrics) == ("/models", True)
    assert "--enable-cache-report has no effect: usage always reports cached tokens" in caplog.messages
    assert [parse(["--tool-call-parser", name]).args.tool_call_parser for name in ("glm", "glm45")] == ["glm47"] * 2
    assert parse(["--reasoning-parser", "deepseek-v3"]).args.reasoning_parser == "qwen3"
    assert parse(["--cuda-graph-max-bs-decode", "8"]).args.cuda_graph_max_bs == 8


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--json-model-override-args", '{"rope_theta": 1}'], ["--json-model-override-args", "config.json"]),
        (["--disaggregation-mode", "prefill"], ["--disaggregation-mode prefill", "one server"]),
        (["--lora-paths", "a"], ["--lora-paths", "adapters"]),
        (["--enable-hierarchical-cache"], ["--enable-hierarchical-cache", "KV cache"]),
        (["--skip-tokenizer-init"], ["--skip-tokenizer-init", "input_ids"]),
        (["--decode-attention-backend", "fa3"], ["--decode-attention-backend", "--attention-backend"]),
        (["--ssl-ca-certs", "x"], ["--ssl-ca-certs", "key"]),
        (["--quantization", "bitsandbytes"], ["--quantization: must be one of int8, int4, fp8", "A quantized checkpoint needs no flag"]),
        (["--attention-backend", "triton"], ["--attention-backend", "torch_native", "default: fa3 on Hopper GPUs"]),
        (["--made-up-flag", "x"], ["Unknown argument '--made-up-flag'"]),
    ],
)
def test_what_cannot_be_taken_is_refused_without_a_misleading_guess(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "did you mean" not in str(caught.value)


def outcome(name: str, values: list[str]) -> str:
    """taken, refused or unknown."""
    try:
        return "taken" if take(name, values) else "unknown"
    except ConfigError as error:
        return "refused" if re.fullmatch(r"--\S+ (\S+ )?is not supported: \S.*\.", str(error)) else str(error)


def test_every_flag_of_sglang_is_known() -> None:
    ours = {spelling.removeprefix("--") for flag in flags() for spelling in flag.spellings} | {"config"}
    theirs = set((Path(__file__).parent / "sglang_flags.txt").read_text().split()) - ours
    assert {name: outcome(name, ["x"]) for name in theirs if outcome(name, ["x"]) not in ("taken", "refused")} == {}
    asking_for_nothing = [(name, []) for name in map("no-{}".format, theirs)] + [(name, ["false"]) for name in theirs]
    assert {name: values for name, values in asking_for_nothing if outcome(name, values) != "taken"} == {}


def test_keyword_options_and_files_take_the_same_flags(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("enable-cache-report: true\nnnodes: 1\nspeculative-algorithm: NEXTN\nspeculative-draft-model-path: d\n")
    assert parse(["--config", str(file)]).args.speculative_algorithm == "EAGLE"
    assert from_fields({"enable_cache_report": True, "decode_log_interval": 5, "port": 4}).port == 4
    assert from_fields({"enable_lora": False, "lora_paths": None, "cpu_offload_gb": 0, "port": 4}).port == 4
    with pytest.raises(ConfigError, match="--lora-paths"):
        from_fields({"lora_paths": ["a"]})


def test_the_tables_name_no_flag_of_talon_and_none_twice() -> None:
    ours = {spelling.removeprefix("--") for flag in flags() for spelling in flag.spellings}
    theirs = [*NO_EFFECT, *ONLY]
    assert not ours & set(theirs)
    assert len(theirs) == len(set(theirs))
    beginnings = [beginning for group, _ in REFUSED for beginning in group]
    assert [name for name in theirs for beginning in beginnings if name.startswith(beginning) and name not in ONLY] == []


def test_models_of_the_hub_go_to_the_download_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def snapshot_download(model_id: str, **options: object) -> str:
        asked.update(options)
        return "/models/snapshot"

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    errors = SimpleNamespace(
        GatedRepoError=KeyError, LocalEntryNotFoundError=KeyError, RepositoryNotFoundError=KeyError, RevisionNotFoundError=KeyError
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    assert download("a/b", None, ["x"], "--model-path", "/models") == Path("/models/snapshot")
    assert asked["cache_dir"] == "/models"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("IO error:\nNo space left on device")])
def test_a_full_disk_is_not_taken_for_a_missing_network(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match=r"cannot be downloaded \(.*No space left on device\).*--download-dir"):
        download("a/b", None, ["x"], "--model-path")


def test_a_download_that_breaks_off_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise httpx.RemoteProtocolError("Server disconnected without sending a response.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match=r"a/b cannot be downloaded \(Server disconnected .*\); check the network"):
        download("a/b", None, ["x"], "--model-path")


def test_a_hub_that_does_not_answer_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot_download(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no snapshot") from ConnectionError("429 Too Many Requests")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match=r"not in the local cache and the hub cannot be reached \(429 Too Many Requests\)"):
        download("a/b", None, ["x"], "--model-path")
