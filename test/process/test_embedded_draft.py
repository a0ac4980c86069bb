"""The embedded model's own draft: shipped whole, used unasked, and without a trace in greedy text."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import torch
from benchmark.embedded_speculation import chat_prompts, speculation

from process.conftest import ROOT, Embedded, serve_embedded
from runtime import Engine
from runtime.config.speculative import DEFAULT_STEPS, EMBEDDED_DRAFT
from warm_start import ForkedPopen

GREEDY = {"temperature": 0.0, "max_new_tokens": 8}
EXACT = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "context_length": 512, "grammar_backend": "none"}


def answers(shape: str) -> list[Sequence[int]]:
    with Engine(**EXACT, **speculation(shape)) as engine:
        assert engine.config.model.quantization is None, "who names a type gets it"
        outputs = engine.generate(input_ids=chat_prompts(engine)[:5], sampling_params=GREEDY)
    if shape != "off":
        tokens, windows = sum(len(o["output_ids"]) for o in outputs), sum(o["meta_info"]["spec_verify_ct"] for o in outputs)
        assert windows < 0.7 * tokens, "drafts must be accepted for equality to mean anything"
    return [output["output_ids"] for output in outputs]


@pytest.fixture(scope="module")
def plain() -> list[Sequence[int]]:
    return answers("off")


@pytest.mark.parametrize("shape", ["3/1/4", "4/3/8"], ids=["chain", "tree"])
def test_drafts_leave_greedy_answers_as_they_are(shape: str, plain: list[Sequence[int]]) -> None:
    assert answers(shape) == plain


PLAIN: tuple[dict[str, Any], list[int]] = ({"speculative_algorithm": "none"}, [1])
SERVERS: list[tuple[dict[str, Any], list[int]]] = [
    ({"speculative_disable_by_batch_size": 4}, [4, 8]),
    ({"speculative_num_steps": 7, "speculative_disable_by_batch_size": 8}, [1, 8]),
]
"""Flags, and numbers of prompts at once: with drafts and with a pause, and with deep drafts, up to 64 rows of a pass."""
DEEP_AND_PAUSED: tuple[dict[str, Any], list[int]] = ({"speculative_num_steps": 7, "speculative_disable_by_batch_size": 7}, [1, 7, 8])


@pytest.mark.parametrize(
    ("flags", "quantization", "servers"),
    [({}, "int4", SERVERS), ({"quantization": "int8"}, "int8", [DEEP_AND_PAUSED])],
    ids=["default", "int8"],
)
def test_answers_do_not_depend_on_drafts_or_company(
    flags: dict[str, str], quantization: str, servers: list[tuple[dict[str, Any], list[int]]]
) -> None:
    """One prompt after the other without drafts, against drafts, deep ones too, and prompts that share their passes."""
    found, sampling = [], {"temperature": 0.0, "max_new_tokens": 6}
    for drafts, sizes in (PLAIN, *servers):
        with Engine(device="cpu", cpu_threads=1, context_length=512, **flags, **drafts) as engine:
            assert engine.config.model.quantization == quantization
            prompts = sorted(chat_prompts(engine), key=len)[:8]
            for together in sizes:
                engine.flush_cache()
                groups = [prompts[start : start + together] for start in range(0, 8, together)]
                outputs = [output for group in groups for output in engine.generate(input_ids=group, sampling_params=sampling)]
                found.append([output["output_ids"] for output in outputs])
    assert found[1:] == found[:1] * (len(found) - 1)


def test_the_default_server_drafts_says_so_and_accepts(embedded: Embedded) -> None:
    body = {"text": "The three primary colors are", "sampling_params": {"temperature": 0, "max_new_tokens": 32}}
    meta = httpx.post(f"{embedded.url}/generate", json=body, timeout=60).json()["meta_info"]
    assert 0 < meta["spec_verify_ct"] < meta["completion_tokens"]
    steps = DEFAULT_STEPS
    said = embedded.log.read_text(errors="replace")
    assert f"EAGLE3 {steps}/1/{steps + 1}" in said
    assert "--speculative-algorithm none" in said
    assert "SmolLM2-135M-Instruct (int4 weights)" in said


def test_a_request_of_the_default_server_limits_its_own_drafts(embedded: Embedded) -> None:
    body = {"prompt": "The three primary colors are", "temperature": 0, "max_tokens": 16, "return_spec_tokens_details": True}
    texts = set[str]()
    for cap in (None, 0, 1, 2, 3):
        asked = body if cap is None else {**body, "speculative_num_steps": cap}
        answer = httpx.post(f"{embedded.url}/v1/completions", json=asked, timeout=60).json()
        texts.add(answer["choices"][0]["text"])
        details = answer["usage"].get("speculative")
        if cap == 0:
            assert details is None
            continue
        assert details["accepted_tokens"] > 0, cap
        assert details["accept_length"] <= 1 + (DEFAULT_STEPS if cap is None else cap)
    assert len(texts) == 1


@pytest.mark.usefixtures("embedded")
def test_other_programs_start_warm_beside_the_default_server() -> None:
    assert issubclass(subprocess.Popen, ForkedPopen) != torch.cuda.is_available()


def test_the_head_is_shipped_whole_and_its_card_holds_its_figures() -> None:
    files = {path.name: path for path in EMBEDDED_DRAFT.iterdir()}
    for name in ("model.safetensors", "config.json", "README.md", "evaluation.json", "training.json", "run.json", "held_out.jsonl"):
        assert name in files, name
        assert os.stat(files[name]).st_mode & 0o444 == 0o444, f"{name} must be readable by all"
    assert sum(path.stat().st_size for path in files.values()) <= 24_000_000
    card, rows = files["README.md"].read_text(), json.loads(files["evaluation.json"].read_text())
    for row in rows:
        assert f"{row['accept_length']:.3f}" in card
    assert "unknown" not in card
    held_out = {json.loads(line)["prompt"] for line in files["held_out.jsonl"].read_text().splitlines()}
    assert len(held_out) >= 200


def test_packages_carry_the_head() -> None:
    patterns = re.search(r"^runtime = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert patterns is not None
    package = ROOT / "python" / "runtime"
    carried = {path for pattern in re.findall(r'"([^"]+)"', patterns[1]) for path in package.glob(pattern)}
    assert set(EMBEDDED_DRAFT.iterdir()) <= carried


def test_windows_of_copied_and_of_new_text_are_counted_apart() -> None:
    """With a depth controller. Its depth is fixed then, because a busy machine might decode without drafts."""
    quoted = "The harbour opens at six in the morning, and the first ferry leaves for the northern islands a quarter of an hour later."
    asks = ("Write a short poem about the sea.", f"Repeat this sentence word for word, and write nothing else: {quoted}")
    found, answer = [(0, 0)], ""
    with serve_embedded("--speculative-num-steps", "auto", "--device", "cpu", "--dtype", "float32") as server:
        fixed = httpx.post(f"{server.url}/set_internal_state", json={"server_args": {"speculative_num_steps": 3}}, timeout=60)
        assert fixed.json() == {"success": True}
        for text in asks:
            body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24}
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
            answer = reply["choices"][0]["message"]["content"]
            depth = httpx.get(f"{server.url}/get_server_info", timeout=10).json()["internal_states"][0]["worker"]["depth"]
            found.append((depth["greedy"]["windows"], depth["greedy_copied"]["windows"]))
            assert depth["sampled"]["windows"] == depth["sampled_copied"]["windows"] == 0
    assert answer.strip(' "')[:40] == quoted[:40]
    (new, copied), (new_later, copied_later) = found[1:]
    assert new > copied, "a poem"
    assert copied_later - copied > new_later - new, "the sentence again"
