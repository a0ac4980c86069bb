"""Two GPUs: sharded models compute what one GPU does, with and without drafts, and the exchanges are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
PROMPTS = [[(31 * i + 7 * j + 3) % 3000 + 2 for j in range(4 + 5 * i)] for i in range(8)]
SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}
SPREAD = 0.1
"""Log-probabilities in bfloat16: those of one GPU differ by as much between batch sizes."""


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
    """The log-probabilities agree up to the first token that differs, which is a tie."""
    same = 0
    for a, b in zip(mine, its, strict=True):
        for left, right in zip(a["meta_info"]["output_token_logprobs"], b["meta_info"]["output_token_logprobs"], strict=True):
            assert abs(left[0] - right[0]) < SPREAD
            if left[1] != right[1]:
                break
            same += 1
    assert same > 64


@pytest.mark.parametrize("drafts", ["plain", "chain", "chain by whole drafts", "tree", "sampled chain"])
def test_two_gpus_give_the_log_probabilities_of_one(model: Path, drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more: dict[str, Any] = {}
    if drafts != "plain":
        more = eagle(model, speculative_num_steps=3, speculative_eagle_topk=3 if drafts == "tree" else 1,
                     speculative_num_draft_tokens=6 if drafts == "tree" else 4)  # fmt: skip
    if drafts == "sampled chain":
        monkeypatch.setitem(SAMPLING, "temperature", 0.01)
        monkeypatch.setitem(SAMPLING, "seed", 3)
    alone, _ = run(model, 1, **more)
    if drafts != "plain":
        more["speculative_draft_tp_size"] = 1 if drafts == "chain by whole drafts" else 2
    together, worker = run(model, 2, **more)
    assert_close(together, alone)
    assert worker["token_checks"] > 0
    assert worker["exchange_micros"], "our own exchanges work on this machine"
    print(drafts, worker["exchange_micros"])


def test_graphs_of_two_gpus_compute_what_eager_passes_do(model: Path) -> None:
    run(model, 2, **eagle(model, speculative_check_parity=True, speculative_draft_tp_size=2))
