"""Every family with real layer shapes: logits against the torch operations in float32, and greedy text with and without its drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.family_shapes import FAMILIES, VOCAB
from gpu.one_request import DEVICE, LENGTH, PARTS, OneRequest, errors
from runtime.entrypoints.engine import Engine
from runtime.layers.backend_selection import select_ops
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.weight_loader import dummy_weights
from runtime.models.decoder import DecoderModel
from runtime.models.registry import build_model, load_hf_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WORSE = 1.5
"""How much larger our mean error may be than that of the torch operations in bfloat16."""
CASES = [(name, backend) for name, family in FAMILIES.items() for backend in family.backends]
PROMPTS = [17, 64, 130, 300]
NEAR = 0.15
"""Difference of two log-probabilities that rounding may turn around."""
COMMON: dict[str, Any] = {
    "load_format": "dummy", "random_seed": 1, "context_length": 1024, "max_total_tokens": 8192, "max_running_requests": 8,
    "cuda_graph_max_bs": 8, "disable_radix_cache": True, "log_level": "info",
}  # fmt: skip


def random_model(folder: Path, torch_ops: bool, dtype: torch.dtype) -> DecoderModel:
    """The model of `folder`, with random weights that are the same for every `dtype`."""
    model = build_model(load_hf_config(str(folder)), TorchOps() if torch_ops else select_ops(DEVICE, dtype)[0], dtype, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(7)
    weights = []
    for name, tensor in dummy_weights(model.expected_weights(), torch.bfloat16, DEVICE, seed=3):
        if tensor.dim() == 1 and tensor.is_floating_point():  # norms are ones and biases zeros, which would hide a swapped one
            tensor = tensor + torch.randn(tensor.shape, device=DEVICE, generator=generator).to(tensor.dtype) * 0.1
        weights.append((name, tensor))
    model.load(weights)
    return model


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_logits_of_prompts_windows_and_decode_steps_follow_the_definition(name: str, backend: str, tmp_path: Path) -> None:
    folder, _ = FAMILIES[name].write(tmp_path)
    ids = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(5))
    exact = OneRequest(random_model(folder, True, torch.float32), "torch_native", torch.float32).all_logits(ids)
    theirs = errors(OneRequest(random_model(folder, True, torch.bfloat16), "torch_native", torch.bfloat16).all_logits(ids), exact)
    ours = errors(OneRequest(random_model(folder, False, torch.bfloat16), backend, torch.bfloat16).all_logits(ids), exact)
    print(
        f"FIGURE {name} {backend}: mean error {ours.mean():.2e}, torch {theirs.mean():.2e}; largest {ours.max():.2e} and {theirs.max():.2e}"
    )
    assert theirs.mean() < 0.1, "the reference itself is off: the model is too wild for the comparison"
    for part in PARTS:
        assert ours[part].mean() <= WORSE * theirs.mean(), f"positions {part.start} to {part.stop}"


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_greedy_text_with_drafts_is_that_of_plain_decoding(name: str, backend: str, tmp_path: Path) -> None:
    folder, drafts = FAMILIES[name].write(tmp_path)
    g = torch.Generator().manual_seed(11)
    prompts = [torch.randint(3, VOCAB, (length,), generator=g).tolist() for length in PROMPTS]
    plain = generate(folder, prompts, attention_backend=backend)
    drafted = generate(folder, prompts, attention_backend=backend, **drafts)
    for one, other in zip(plain, drafted, strict=True):
        differ = [i for i, (a, b) in enumerate(zip(one["output_ids"], other["output_ids"], strict=True)) if a != b]
        if differ:  # the rounding of another number of rows may choose the other of two tokens that are about as likely
            first, second = (entry[0] for entry in one["meta_info"]["output_top_logprobs"][differ[0]][:2])
            assert first - second < NEAR, f"token {differ[0]}: {first} against {second}"


def generate(folder: Path, prompts: list[list[int]], **options: Any) -> list[Any]:
    """24 greedy tokens after each prompt, all of them together, by a server of its own."""
    sampling = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    with Engine(model_path=str(folder), **COMMON, **options) as engine:
        return engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True, top_logprobs_num=2)
