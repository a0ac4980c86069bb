"""Several GPUs: sharded models give the results of one GPU, with and without drafts, and the exchanges are correct."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from gpu.family_shapes import FAMILIES
from gpu.family_text import assert_same_text, generate, save
from process import rank_life
from process.fake import ENV
from runtime import Engine
from runtime.errors import ConfigError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
PROMPTS = [[(31 * i + 7 * j + 3) % 3000 + 2 for j in range(4 + 5 * i)] for i in range(8)]
SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}
CLOSE_SUMS = 0.06
"""As `CLOSE` of `family_text.py`, for ranks that also round their partial sums to bfloat16."""
PAUSE = 12.0
SPREAD = 0.1
"""Largest difference of log-probabilities in bfloat16; on one GPU they differ by as much between batch sizes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    config: dict[str, Any] = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=4096, hidden_size=1024, intermediate_size=2816,
        num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=128, rms_norm_eps=1e-5, rope_theta=10000.0,
        max_position_embeddings=2048, eos_token_id=1, bos_token_id=0, tie_word_embeddings=False, torch_dtype="bfloat16", hidden_act="silu",
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    head = config | dict(architectures=["LlamaForCausalLMEagle"], num_hidden_layers=1)
    (folder / "head").mkdir()
    (folder / "head" / "config.json").write_text(json.dumps(head))
    return folder


def run(model: Path, tp_size: int, **more: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    options = dict(
        model=str(model), load_format="dummy", device="cuda", random_seed=5, context_length=1024, max_total_tokens=16384,
        cuda_graph_max_bs=8, tp_size=tp_size, disable_radix_cache=True, log_level="info", **more,
    )  # fmt: skip
    with Engine(**options) as engine:
        outputs = engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING, return_logprob=True)
        return outputs, engine.get_server_info()["internal_states"][0]["worker"]


def eagle(model: Path, **more: Any) -> dict[str, Any]:
    return {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(model / "head"), **more}


def assert_close(mine: list[dict[str, Any]], its: list[dict[str, Any]]) -> None:
    """Check that log-probabilities agree up to the first token that differs, which must be a near-tie."""
    same = 0
    for a, b in zip(mine, its, strict=True):
        for left, right in zip(a["meta_info"]["output_token_logprobs"], b["meta_info"]["output_token_logprobs"], strict=True):
            assert abs(left[0] - right[0]) < SPREAD
            if left[1] != right[1]:
                break
            same += 1
    assert same > 64


def needs(gpus: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(torch.cuda.device_count() < gpus, reason=f"needs {gpus} GPUs")


def drafting(model: Path, drafts: str) -> dict[str, Any]:
    if drafts == "plain":
        return {}
    topk, tokens = (3, 6) if drafts == "tree" else (1, 4)
    return eagle(model, speculative_num_steps=3, speculative_eagle_topk=topk, speculative_num_draft_tokens=tokens)


@pytest.fixture(scope="module")
def alone(model: Path) -> Callable[[str], list[dict[str, Any]]]:
    """The outputs of one GPU, by kind of drafts."""
    return cache(lambda drafts: run(model, 1, **drafting(model, drafts))[0])


CASES = {2: ["plain", "chain", "chain by whole drafts", "tree", "sampled chain"], 4: ["plain", "chain", "tree"]}


@pytest.mark.parametrize(
    ("tp_size", "drafts"), [pytest.param(tp_size, drafts, marks=needs(tp_size)) for tp_size, kinds in CASES.items() for drafts in kinds]
)
def test_several_gpus_give_the_log_probabilities_of_one(
    model: Path, alone: Callable[[str], list[dict[str, Any]]], drafts: str, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if drafts == "sampled chain":
        monkeypatch.setitem(SAMPLING, "temperature", 0.01)
        monkeypatch.setitem(SAMPLING, "seed", 3)
    more = drafting(model, drafts)
    if drafts != "plain":
        more["speculative_draft_tp_size"] = 1 if drafts == "chain by whole drafts" else tp_size
    together, worker = run(model, tp_size, enable_iteration_graph=drafts != "tree", **more)
    assert_close(together, alone(drafts))
    assert worker["token_checks"] > 0
    assert worker["exchange_micros"], "our own exchanges work on this machine"
    iterations = [runs["replayed"] for runs in worker["graph_runs"] if runs["runner"].startswith("iteration")]
    assert any(iterations) is (drafts != "tree")
    print(drafts, worker["exchange_micros"])


@pytest.mark.parametrize(
    ("drafts", "flags"),
    [
        ("plain", []),
        ("plain", ["--disable-custom-all-reduce"]),
        ("EAGLE", ["--speculative-draft-tp-size", "2"]),
        ("EAGLE", ["--speculative-draft-tp-size", "1", "--disable-custom-all-reduce"]),
        ("STANDALONE", ["--speculative-draft-tp-size", "2"]),
        ("STANDALONE", ["--speculative-draft-tp-size", "2", "--disable-custom-all-reduce"]),
    ],
)
def test_iteration_graphs_of_two_gpus_change_no_token(model: Path, drafts: str, flags: list[str]) -> None:
    """The same storm, greedy and sampled, at depths 0 and 3, with eager samples, through the same kernels. NCCL and our own exchanges."""
    flags = [*flags, "--enable-iteration-graph", "--model", str(model), "--load-format", "dummy", "--device", "cuda", "--tp-size", "2"]
    flags += [
        "--context-length",
        "1024",
        "--max-total-tokens",
        "16384",
        "--max-running-requests",
        "40",
        "--cuda-graph-bs",
        "1",
        "2",
        "4",
        "8",
        "16",
        "32",
        "40",
    ]
    if drafts != "plain":
        draft = str(model / "head" if drafts == "EAGLE" else model)
        flags += ["--speculative-algorithm", drafts, "--speculative-draft-model-path", draft, "--speculative-num-steps", "3"]
        flags += ["--speculative-disable-by-batch-size", "8"]
    paths = os.pathsep.join([ENV["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, rank_life.__file__, *flags], env={**ENV, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole, separate = json.loads(done.stdout.splitlines()[-1]).values()
    assert whole["life"] == separate["life"]
    for name in ["iteration K=0", *(["iteration K=3"] if drafts != "plain" else [])]:
        assert whole["replays"][name] > 0 == separate["replays"][name]
    assert (whole["samples"] > 0) is (drafts != "plain")


def test_fp8_shards_that_cut_blocks_give_the_log_probabilities_of_one(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"intermediate_size": 2880}  # of which a rank has 11 blocks and a quarter
    (tmp_path / "config.json").write_text(json.dumps(config))
    alone, together = (run(tmp_path, tp_size, quantization="fp8")[0] for tp_size in (1, 2))
    assert_close(together, alone)


@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=needs(4))])
def test_graphs_of_several_gpus_compute_what_eager_passes_do(model: Path, tp_size: int) -> None:
    run(model, tp_size, **eagle(model, speculative_check_parity=True, speculative_draft_tp_size=tp_size))


ONE_LONG_ANSWER = """
import sys
from runtime import Engine
with Engine(model=sys.argv[1], load_format="dummy", device="cuda", tp_size=2, context_length=2048, cuda_graph_max_bs=2) as engine:
    for tokens in (8, 1900):
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        print(engine.generate(input_ids=[5, 6, 7], sampling_params=sampling)["meta_info"]["completion_tokens"], flush=True)
"""


def test_a_pause_of_all_processes_ends_nothing(model: Path) -> None:
    """The kernels of a rank that is stopped last wait for the other one; `PAUSE` is longer than they wait at start-up."""
    with subprocess.Popen([sys.executable, "-c", ONE_LONG_ANSWER, str(model)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "8\n"
        processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in processes:
            each.suspend()
        time.sleep(PAUSE)
        assert not select.select([process.stdout], [], [], 0)[0], "the answer goes on after the pause"
        for each in reversed(processes):
            each.resume()
        assert process.communicate(timeout=60.0)[0] == "1900\n"


@needs(3)
def test_unequal_shards_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="--tp-size 3 does not divide LlamaForCausalLM into equal shards"):
        run(model, 3)


SLICES: dict[str, Any] = {"tp_size": 4}
WHOLE_EXPERTS = SLICES | {"ep_size": 4}
GROUPS = WHOLE_EXPERTS | {"dp_size": 4, "enable_dp_attention": True}
PAIRS = WHOLE_EXPERTS | {"dp_size": 2, "enable_dp_attention": True}
"""Two attention groups of two ranks each."""


@needs(4)
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("qwen3-moe", {"slices": SLICES, "whole experts": WHOLE_EXPERTS, "groups": GROUPS, "pairs": PAIRS}),
        ("minimax-fp8", {"whole experts": WHOLE_EXPERTS, "groups": GROUPS}),
        ("gpt-oss", {"slices": SLICES, "whole experts": WHOLE_EXPERTS}),
        ("deepseek-fp8", {"slices": SLICES, "groups": GROUPS}),
    ],
)
def test_sparse_models_on_four_gpus_write_the_text_of_one(name: str, layouts: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    folder, drafts = FAMILIES[name].write(tmp_path)
    save(folder, FAMILIES[name].algorithm == "MTP")
    alone = generate(folder, attention_backend="fa3")
    for label, layout in layouts.items():
        for kind, more in (("plain", {}), ("drafts", drafts)):
            assert_same_text(f"{name}, {label}, {kind}", alone, generate(folder, attention_backend="fa3", **layout, **more), CLOSE_SUMS)
