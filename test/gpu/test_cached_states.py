"""Text of models with linear attention behind cached states, compared with the text of whole prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.family_shapes import FAMILIES, VOCAB
from gpu.family_text import COMMON, assert_same_text, save
from runtime.entrypoints.engine import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHARED = (0, 700, 700, 1500, 0, 1500, 1500, 700, 330, 1500, 330, 1500)
"""How many tokens each prompt has in common with the others."""


def prompts() -> list[list[int]]:
    """The same in every process."""
    generator = torch.Generator().manual_seed(3)
    stem = torch.randint(3, VOCAB, (max(SHARED),), generator=generator).tolist()
    return [stem[:n] + torch.randint(3, VOCAB, (40 + 7 * i,), generator=generator).tolist() for i, n in enumerate(SHARED)]


def generate(folder: Path, **options: Any) -> tuple[list[Any], list[int]]:
    """24 greedy tokens for each prompt alone, then for all together with one more token; and how many tokens of each were cached."""
    sampling = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    asked = {"sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    changed = {"context_length": 2048, "max_total_tokens": 65536, "attention_backend": "fa3"}
    with Engine(model_path=str(folder), **{**COMMON, **changed, **options}) as engine:
        found = [engine.generate(input_ids=ids, **asked) for ids in prompts()]
        found += engine.generate(input_ids=[[*ids, 5] for ids in prompts()], **asked)
    return found, [answer["meta_info"]["cached_tokens"] for answer in found]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_text_behind_cached_states_is_that_of_whole_prompts(name: str, drafts: bool, tmp_path: Path) -> None:
    folder, options = FAMILIES[name].write(tmp_path)
    save(folder, True)
    options = options if drafts else {}
    whole, none = generate(folder, **options)
    behind, cached = generate(folder, **options, disable_radix_cache=False, max_mamba_cache_size=40)
    assert not any(none)
    # Alone: a prompt that parts from an earlier one leaves a state there for the next. Together: each has the state near its own end.
    assert sum(cached[: len(SHARED)]) > 5000, cached
    assert all(count >= 0.8 * shared for count, shared in zip(cached[len(SHARED) :], SHARED, strict=True)), cached
    assert_same_text(name, whole, behind)
