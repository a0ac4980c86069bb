"""Every family with real layer shapes: logits against the torch operations in float32, and greedy text with and without its drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu.family_shapes import FAMILIES, VOCAB
from gpu.family_text import assert_same_text, generate, random_weights, save
from gpu.one_request import DEVICE, LENGTH, PARTS, OneRequest, errors
from runtime.config.device_tuning import H200
from runtime.layers.backend_selection import select_ops
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.torch_ops import TorchOps
from runtime.models.decoder import DecoderModel
from runtime.models.registry import build_model, load_hf_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WORSE = 1.5
"""Largest allowed ratio of our median error to that of the torch operations in bfloat16."""
PROMPTS = 4
CASES = [(name, backend) for name, family in FAMILIES.items() for backend in family.backends]


def random_model(folder: Path, torch_ops: bool, dtype: torch.dtype) -> DecoderModel:
    """The model of `folder` with random weights."""
    model = build_model(
        load_hf_config(str(folder)), TorchOps() if torch_ops else select_ops(DEVICE, dtype, GemmTimings(H200))[0], dtype, DEVICE
    )
    model.load(random_weights(model.expected_weights(), model.config.norm_offset).items())
    return model


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_logits_of_prompts_windows_and_decode_steps_follow_the_definition(name: str, backend: str, tmp_path: Path) -> None:
    folder, _ = FAMILIES[name].write(tmp_path)
    prompts = torch.randint(0, VOCAB, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(5))

    def all_logits(torch_ops: bool, backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        request = OneRequest(random_model(folder, torch_ops, dtype), backend, dtype)
        return [request.all_logits(ids) for ids in prompts]

    exact = all_logits(True, "torch_native", torch.float32)
    passes = (True, "torch_native"), (False, backend)
    theirs, ours = (torch.stack([*map(errors, all_logits(*each, torch.bfloat16), exact)]) for each in passes)
    print(f"{name} {backend}: median error {ours.median():.2e}, torch {theirs.median():.2e}; mean {ours.mean():.1e}, {theirs.mean():.1e}")
    assert theirs.median() < 0.1, "the reference itself is off: the model is too wild for the comparison"
    # Medians of several prompts: if rounding changes an expert, the error is large from there on, in either of them.
    for part in PARTS:
        assert ours[:, part].median() <= WORSE * theirs[:, part].median(), f"positions {part.start} to {part.stop}"


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_greedy_text_with_drafts_is_that_of_plain_decoding(name: str, backend: str, tmp_path: Path) -> None:
    folder, drafts = FAMILIES[name].write(tmp_path)
    save(folder, FAMILIES[name].algorithm == "MTP")
    plain = generate(folder, attention_backend=backend)
    drafted = generate(folder, attention_backend=backend, **drafts)
    assert_same_text(f"{name} {backend}", plain, drafted)
