"""Compares greedy text of two servers of a model, for models of every family with random weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpu.family_shapes import VOCAB
from gpu.one_request import DEVICE
from runtime.entrypoints.engine import Engine
from runtime.layers.torch_ops import TorchOps
from runtime.model_executor.weight_loader import dummy_weights
from runtime.model_files.synthetic_tokenizer import write_synthetic_tokenizer
from runtime.models.mtp import MtpDraft
from runtime.models.registry import build_model, load_hf_config

LENGTHS = [17, 64, 130, 300, 5, 90, 33, 257, 128, 71]
"""Lengths of the prompts. There are enough requests that sparse models draft."""
NEAR = 0.3
"""Largest gap between the log-probabilities of two tokens that counts as a near-tie. Rounding changes experts, which moves single
log-probabilities by as much: plain decoding of gpt-oss by up to 0.27 if the prompts come one by one instead of together.
"""
COMMON: dict[str, Any] = {
    "random_seed": 1, "context_length": 1024, "max_total_tokens": 16384, "max_running_requests": 16, "cuda_graph_max_bs": 16,
    "disable_radix_cache": True, "log_level": "info", "disable_fp8_activations": True,
}  # fmt: skip
"""Use 16-bit activations in all passes: with e4m3 experts, activations of windows of more than 64 tokens would be rounded to e4m3, but not
those of a decode step."""
TAME = {
    "q_norm|query_layernorm": 0.15, r"\.experts\.\d+\.(down_proj|w2)": 0.05, "down_proj|w2": 0.2, "o_proj": 0.5,
    "post_feedforward_layernorm_2": 0.1,
}  # fmt: skip
"""Factors of weights by name pattern; the first match counts. The last one is for the norm after Gemma 4's experts. With weights of equal
magnitude, heads with normed queries would attend to one token only, and a change of experts by rounding would change the whole answer: the
definition in bfloat16 would differ from the one in float32 as much as with a real error."""
CLOSE = 0.04
"""Largest difference allowed for the log-probabilities of 90 % of the tokens, as long as the texts are equal. A KV slot that is off by one
changes all of them; a change of experts by rounding changes few."""


def prompts() -> list[list[int]]:
    """Random tokens, the same in every process."""
    g = torch.Generator().manual_seed(11)
    return [torch.randint(3, VOCAB, (length,), generator=g).tolist() for length in LENGTHS]


def assert_same_text(label: str, usual: list[Any], other: list[Any], close: float = CLOSE) -> None:
    """Check that texts differ only from a near-tie on, and that log-probabilities before it are close."""
    apart = torch.tensor([part for one, its in zip(usual, other, strict=True) for part in differences(one, its)])
    print(f"{label}: log-probabilities differ by {[round(apart.quantile(q).item(), 4) for q in (0.5, 0.9, 0.99, 1.0)]}")
    assert len(apart) > 2 * len(usual)
    assert apart.quantile(0.9) < close
    for one, its in zip(usual, other, strict=True):
        differ = [i for i, (a, b) in enumerate(zip(one["output_ids"], its["output_ids"], strict=True)) if a != b]
        if differ:  # with another number of rows, rounding may select the other token of a near-tie
            first, second = (entry[0] for entry in one["meta_info"]["output_top_logprobs"][differ[0]][:2])
            assert first - second < NEAR, f"token {differ[0]}: {first} against {second}"


def differences(one: Any, other: Any) -> list[float]:
    """Differences of the log-probabilities of the same tokens, up to the position where the texts differ."""
    found, first, second = [], one["meta_info"]["output_top_logprobs"], other["meta_info"]["output_top_logprobs"]
    for a, b, mine, theirs in zip(one["output_ids"], other["output_ids"], first, second, strict=True):
        known = {entry[1]: entry[0] for entry in mine}
        found += [abs(known[entry[1]] - entry[0]) for entry in theirs if entry[1] in known]
        if a != b:
            break
    return found


def random_weights(shapes: dict[str, tuple[int, ...]], norm_offset: float = 0.0) -> dict[str, torch.Tensor]:
    """Weights in the formats of a checkpoint, the same for every dtype of the model. `norm_offset` is what it adds to those of norms."""
    generator = torch.Generator(DEVICE).manual_seed(7)
    weights = {}
    for name, tensor in dummy_weights(shapes, torch.bfloat16, DEVICE, seed=3):
        factor = next((factor for pattern, factor in TAME.items() if re.search(pattern, name)), 1.0)
        if tensor.dtype is torch.uint8:  # exponents of 4-bit blocks
            tensor = tensor - 3 if factor < 1 and name.endswith("_scales") else tensor
        elif tensor.dtype is not torch.float8_e4m3fn:
            if tensor.dim() == 1:  # norms of ones and biases of zeros would hide a swapped one
                tensor = tensor + torch.randn(tensor.shape, device=DEVICE, generator=generator).to(tensor.dtype) * 0.1
            has_offset = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
            tensor = tensor * factor - (norm_offset if has_offset else 3.0 if name.endswith("A_log") else 0.0)  # states last many tokens
        weights[name] = tensor.contiguous()
    return weights


def save(folder: Path, with_mtp: bool) -> None:
    """Write random weights and a tokenizer beside the config."""
    write_synthetic_tokenizer(folder, VOCAB)
    model = build_model(load_hf_config(str(folder)), TorchOps(), torch.bfloat16, torch.device("meta"))
    shapes = model.expected_weights() | (MtpDraft(model).expected_weights() if with_mtp else {})
    weights = random_weights(shapes, model.config.norm_offset)
    save_file({name: tensor.cpu() for name, tensor in weights.items()}, folder / "model.safetensors")


def generate(folder: Path, **options: Any) -> list[Any]:
    """Start an engine and generate 24 greedy tokens for all prompts in one call."""
    sampling = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    with Engine(model_path=str(folder), **COMMON, **options) as engine:
        return engine.generate(input_ids=prompts(), sampling_params=sampling, return_logprob=True, top_logprobs_num=2)
