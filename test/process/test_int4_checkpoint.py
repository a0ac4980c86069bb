"""Servers of tiny AWQ and GPTQ checkpoints with the real worker: started by the command, with drafts, and on two ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from process import rank_faults
from process.fake import CONTEXT, VOCAB, serving
from runtime import Engine
from unit.int4_files import FORMS, SHUFFLED_FORMS, write_int4
from unit.small_tokenizer import write_small_tokenizer

SAMPLING = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
PROMPTS = [[random.Random(seed).randrange(2, VOCAB) for _ in range(20)] for seed in range(3)]


@pytest.fixture(scope="module", params=["awq", "gptq-activation-order"])
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=CONTEXT, initializer_range=0.1, **sizes)
    write_int4(folder, LlamaForCausalLM(config), (FORMS | SHUFFLED_FORMS)[request.param])
    write_small_tokenizer(folder)
    return str(folder)


def outputs(model: str, **more: Any) -> list[dict[str, Any]]:
    with Engine(model=model, device="cpu", cpu_threads=1, log_level="warning", **more) as engine:
        assert engine.config.weights == "int4"
        return engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING, return_logprob=True, logprob_start_len=0)


@pytest.fixture(scope="module")
def alone(checkpoint: str) -> list[dict[str, Any]]:
    return outputs(checkpoint)


def test_drafts_and_the_flag_of_the_format_do_not_change_the_text(checkpoint: str, alone: list[dict[str, Any]]) -> None:
    flag = "awq" if "awq" in Path(checkpoint).name else "gptq"
    drafted = outputs(checkpoint, quantization=flag, speculative_algorithm="NGRAM", speculative_num_draft_tokens=6)
    assert [each["output_ids"] for each in drafted] == [each["output_ids"] for each in alone]


def test_two_ranks_give_the_prompts_the_same_log_probabilities(checkpoint: str, alone: list[dict[str, Any]]) -> None:
    for mine, its in zip(outputs(checkpoint, tp_size=2), alone, strict=True):
        ours, theirs = (each["meta_info"]["input_token_logprobs"][1:] for each in (mine, its))
        assert len(ours) == len(PROMPTS[0]) - 1
        assert [token for _, token, _ in ours] == [token for _, token, _ in theirs]
        far = max(abs(one - other) for (one, *_), (other, *_) in zip(ours, theirs, strict=True))
        assert far < 0.05, "activations are rounded to bfloat16"


def test_the_command_serves_the_checkpoint(checkpoint: str) -> None:
    with serving(Path(checkpoint), "--load-format", "auto", behaviour="well", program=rank_faults.__file__) as server:
        answer = server.complete(PROMPTS[0])
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert server.get("/v1/models").json()["data"][0]["weights"] == "int4"
