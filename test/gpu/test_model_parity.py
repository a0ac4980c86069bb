"""Logits of tiny checkpoints on the GPU are as close to a float32 reference as those of `transformers` in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.one_request import DEVICE, LENGTH, PARTS, OneRequest, errors
from runtime.config.device_tuning import H200
from runtime.errors import ConfigError
from runtime.layers.backend_selection import select_ops
from runtime.layers.gemm.timings import GemmTimings
from runtime.model_executor.weight_loader import safetensors_weights
from runtime.models.registry import build_model, load_hf_config
from unit.int4_files import SHUFFLED_FORMS, write_int4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("model_parity"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BACKENDS = ["fa3", "flashinfer"]
VOCAB = 1003
"""Not a multiple of any tile."""
WORSE = 1.5
"""Largest allowed ratio of our mean error to that of `transformers`."""
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.06,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-64": ("Llama", {"hidden_size": 256, "intermediate_size": 704, "head_dim": 64}),
    "llama-128-llama3-tied": (
        "Llama",
        {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "qwen3-128": ("Qwen3", {"hidden_size": 320, "intermediate_size": 896, "head_dim": 128}),
    "gpt-oss": (
        "GptOss",
        # Every token uses all experts, so that rounding cannot change the choice.
        {
            "hidden_size": 256,
            "intermediate_size": 256,
            "head_dim": 64,
            "num_attention_heads": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "sliding_window": 64,
        },
    ),
    "qwen3-64": (
        "Qwen3",
        {"hidden_size": 576, "intermediate_size": 1536, "head_dim": 64, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
}


INT4_SIZES = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
"""Multiples of 128, the largest group of columns."""


class Checkpoint:
    """A random bfloat16 model in a folder, a text, and the text's logits from `transformers` in float32 and in bfloat16.

    With `int4`, one of `SHUFFLED_FORMS`, the folder holds the model in int4; `transformers` computes with the weights that it stands for.
    """

    def __init__(self, name: str, folder: Path, int4: str | None = None) -> None:
        import transformers

        family, sizes = FAMILIES[name]
        torch.manual_seed(len(name))
        cls = getattr(transformers, f"{family}ForCausalLM")
        model = cls(getattr(transformers, f"{family}Config")(**{**COMMON, **sizes, **(INT4_SIZES if int4 else {})}))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms of ones would hide a swapped one
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        model.to(torch.bfloat16)
        if int4:
            write_int4(folder, model, SHUFFLED_FORMS[int4])
        else:
            model.save_pretrained(folder)
        self.name, self.folder, self.ids = name, folder, torch.randint(0, VOCAB, (LENGTH,))
        wide = folder / "exact" if int4 else folder
        self.exact, self.theirs = (self._logits(cls, wide, dtype) for dtype in (torch.float32, torch.bfloat16))

    def _logits(self, cls: Any, folder: Path, dtype: torch.dtype) -> torch.Tensor:
        model = cls.from_pretrained(folder, dtype=dtype).to(DEVICE).eval()
        with torch.inference_mode():
            return model(self.ids[None].to(DEVICE)).logits[0].double()


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp("model"))


def one_request(folder: Path, backend: str) -> OneRequest:
    """The model of a folder in bfloat16."""
    dtype = torch.bfloat16
    model = build_model(load_hf_config(str(folder)), select_ops(DEVICE, dtype, GemmTimings(H200))[0], dtype, DEVICE)
    model.load(safetensors_weights(str(folder), progress=False))
    return OneRequest(model, backend, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_prompts_windows_and_decode_steps_follow_transformers(checkpoint: Checkpoint, backend: str) -> None:
    if (checkpoint.name, backend) == ("gpt-oss", "flashinfer"):
        with pytest.raises(ConfigError, match="Attention backend flashinfer does not support attention sinks"):
            one_request(checkpoint.folder, backend)
        return
    assert_follows(checkpoint, backend)


@pytest.mark.parametrize("form", SHUFFLED_FORMS)
def test_logits_of_int4_weights_in_activation_order_follow_transformers(form: str, tmp_path: Path) -> None:
    assert_follows(Checkpoint("llama-64", tmp_path, form), "fa3")


def assert_follows(checkpoint: Checkpoint, backend: str) -> None:
    """Logits of prompts, windows and decode steps are about as exact as those of `transformers`."""
    got = one_request(checkpoint.folder, backend).all_logits(checkpoint.ids)
    ours, theirs = errors(got, checkpoint.exact), errors(checkpoint.theirs, checkpoint.exact)
    print(f"{backend}: mean error {ours.mean():.2e}, transformers {theirs.mean():.2e}; largest {ours.max():.2e} and {theirs.max():.2e}")
    assert theirs.mean() < 0.05, "the reference itself is off: the model is too wild for the comparison"
    for part in PARTS:
        assert ours[part].mean() <= WORSE * theirs.mean(), f"positions {part.start} to {part.stop}"
