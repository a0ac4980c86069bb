"""The training script from end to end on a tiny model: data from the engine, a head, and its acceptance in the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from eagle_training.conversations import Conversation, ShardFolder
from eagle_training.estimate import estimate
from eagle_training.evaluation import NO_TEMPLATES, TEMPLATES, Shape, count_drafts
from eagle_training.head import EagleHead, head_config
from eagle_training.target import FrozenTarget
from safetensors.torch import load_file

from process.fake import ROOT
from runtime import Engine
from runtime.models.draft_config import load_draft_config
from runtime.models.registry import load_hf_config
from unit.small_tokenizer import write_small_tokenizer
from unit.test_train_eagle import RAW, write_model

VOCAB = 768


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; the model lies beside it."""
    folder = tmp_path_factory.mktemp("run")
    write_small_tokenizer(write_model(folder / "model", RAW | {"vocab_size": VOCAB, "eos_token_id": 2, "max_position_embeddings": 512}))
    command = [
        sys.executable, str(ROOT / "scripts" / "train_eagle.py"), "--model-path", str(folder / "model"), "--output", str(folder / "head"),
        "--device", "cpu", "--threads", "1", "--quick", "--engines", "2", "--generate-tokens", "1500",
        "--train-steps", "40", "--batch-tokens", "512", "--max-length", "192", "--draft-vocab-size", "256", "--learning-rate", "0.003",
        "--hard-share", "1", "--shapes", "3/1/4",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "head"


def test_one_command_leaves_a_whole_head(head_folder: Path) -> None:
    for name in ("config.json", "model.safetensors", "README.md", "evaluation.json", "training.json", "run.json", "held_out.jsonl"):
        assert (head_folder / name).is_file(), name
    rows = json.loads((head_folder / "evaluation.json").read_text())
    assert [(row["set"], row["shape"], row["dtype"]) for row in rows] == [
        (name, "3/1/4", "float32") for name in ("held-out", NO_TEMPLATES, TEMPLATES, "hand-made")
    ]
    assert all(row["iterations"] > 0 for row in rows)
    card = (head_folder / "README.md").read_text()
    for row in rows:
        assert f"{row['accept_length']:.3f}" in card
    history = json.loads((head_folder / "training.json").read_text())["history"]
    assert history[-1]["loss"] < history[0]["loss"]


def test_the_server_accepts_what_training_estimates(head_folder: Path) -> None:
    """The same answers, walked by the estimate and verified by the server: the same windows, all but each answer's last."""
    model, shape, tokens = head_folder.parent / "model", Shape(3, 1, 4), 40
    config = load_hf_config(model)
    draft = load_draft_config(head_folder, "EAGLE3", config)
    talks = [c for c in ShardFolder(head_folder.with_name("head-work") / "data").load() if c.temperature == 0.0][:12]
    prompts = [c.ids[: c.answer_start].tolist() for c in talks]
    options = {
        "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head_folder), "speculative_num_steps": shape.steps,
        "speculative_eagle_topk": shape.topk, "speculative_num_draft_tokens": shape.draft_tokens,
    }  # fmt: skip
    with Engine(model_path=str(model), device="cpu", cpu_threads=1, **options) as engine:
        outputs = engine.generate(input_ids=prompts, sampling_params={"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True})
    served = count_drafts(outputs, shape.steps)

    target = FrozenTarget(str(model), config, draft.aux_layers, torch.float32, torch.device("cpu"), 4096)
    tensors = load_file(next(Path(head_folder).glob("*.safetensors")))
    vocabulary = (tensors["d2t"] + torch.arange(256)).numpy()
    head = EagleHead(head_config(config, draft.model.intermediate_size, 256), target.embed, vocabulary, torch.ones(3 * config.hidden_size))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(tensors[name])
    answers = [
        Conversation(np.array(prompt + output["output_ids"], dtype=np.int32), len(prompt), 0.0, "", True)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    estimated = estimate(head, target, answers, shape.steps, 2048, torch.float32)
    assert served.accepted.sum() > 0, "the head must get something right for this to mean anything"
    assert abs(served.iterations - estimated.iterations) <= len(talks)
    assert (abs(served.accepted - estimated.accepted) <= len(talks)).all(), (served.stats(), estimated.stats())
