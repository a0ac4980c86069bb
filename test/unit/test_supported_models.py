"""docs/models.md is what the registries say."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import error_texts
import pytest
import supported_models

from runtime.config.draft_algorithms import ALGORITHM_CAPS
from runtime.errors import ConfigError
from runtime.models.draft_config import DRAFT_FAMILIES, load_draft_config
from runtime.models.registry import FAMILIES, parse_hf_config
from runtime.models.rope_fields import REQUIRED


@functools.cache
def page() -> str:
    return supported_models.page()


def test_the_committed_page_is_up_to_date() -> None:
    assert supported_models.main(["--check"]) == 0, "run: python scripts/supported_models.py"


def test_every_registered_name_is_on_the_page() -> None:
    for name in (*FAMILIES, *DRAFT_FAMILIES, *REQUIRED, *ALGORITHM_CAPS):
        assert f"`{name}`" in page()


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 8,
    "num_attention_heads": 4,
}  # fmt: skip
HEAD = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32}


def assert_on_the_page(error: ConfigError) -> None:
    """The page has a message of which the error is a case."""
    messages = re.findall(r"^- `(.*)`$", page(), re.MULTILINE)
    patterns = [re.sub(r"\\{\w+\\}", ".*", re.escape(message)) for message in messages]
    assert any(re.search(f"(^|: ){pattern}$", str(error)) for pattern in patterns), error


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["GPT2LMHeadModel"]},
        {"hidden_act": "gelu"},
        {"num_key_value_heads": 3},
        {"head_dim": 15},
        {"rms_norm_eps": -1},
        {"rope_scaling": {"rope_type": "mrope"}},
        {"rope_scaling": {"rope_type": "linear"}},
        {"quantization_config": {"quant_method": "awq"}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9},
    ],
)
def test_the_message_of_a_refused_model_is_on_the_page(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_hf_config({**LLAMA, **changes}, "config.json")
    assert_on_the_page(refused.value)


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("EAGLE", {}),
        ("EAGLE3", {"architectures": ["GPT2ForCausalLM"]}),
        ("EAGLE3", {"architectures": ["DFlashDraftModel"]}),
        ("EAGLE3", {"vocab_size": 100}),
        ("EAGLE3", {"target_hidden_size": 32}),
        ("EAGLE3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 9]}}),
    ],
)
def test_the_message_of_a_refused_draft_is_on_the_page(tmp_path: Path, algorithm: Any, changes: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**HEAD, **changes}))
    with pytest.raises(ConfigError) as refused:
        load_draft_config(tmp_path, algorithm, parse_hf_config(LLAMA, "config.json"))
    assert_on_the_page(refused.value)


def test_no_message_of_the_source_is_missing() -> None:
    literal = re.compile(r'(?:ConfigError|\.error)\(\s*f?"([^"{\\]{12,})')
    found = 0
    for _, folder, words in supported_models.REFUSALS:
        for path in (error_texts.ROOT / folder).glob("*.py"):
            source = path.read_text()
            for text in literal.findall(source) if any(word in source for word in words) else ():
                assert text in page(), f"{path.name}: {text}"
                found += 1
    assert found > 40


def test_check_finds_a_stale_page_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "models.md"
    page.write_text("# Models\n")
    assert supported_models.main([str(page), "--check"]) == 1
    assert page.read_text() == "# Models\n"
    assert "out of date" in capsys.readouterr().err
    assert supported_models.main([str(page)]) == 0
    assert supported_models.main([str(page), "--check"]) == 0
