"""Tuning of the embedded model: the command finds a shape, and a server that starts with its file says so and writes the same text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx

from process.conftest import ROOT, Embedded, serve_embedded
from runtime.config.speculative_tuning import read_tuning

GREEDY = {
    "text": "1, 2, 3, 4, 5, 6, 7, 8,",
    "sampling_params": {"temperature": 0, "max_new_tokens": 24},
    "return_logprob": True,
    "top_logprobs_num": 2,
}


def text_of(server: Embedded) -> str:
    """An answer of which every token leads by far: the shape that was found may be a tree, whose sums round differently."""
    answer = httpx.post(f"{server.url}/generate", json=GREEDY, timeout=120).json()
    assert min(first[0] - second[0] for first, second in answer["meta_info"]["output_top_logprobs"]) > 1.0
    return answer["text"]


def test_a_server_starts_with_what_was_measured_for_it(embedded: Embedded, tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    command = [sys.executable, "-m", "runtime.tune", "--output", str(file), "--seconds", "6", "--batch-sizes", "1", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "tokens/s of chains" in done.stdout
    found = read_tuning(str(file))
    assert found.measurement.seconds > 0
    assert found.made_for.algorithm == "EAGLE3"
    with serve_embedded("--speculative-tuning", str(file)) as tuned:
        said, unasked = (server.log.read_text(errors="replace") for server in (tuned, embedded))
        shape = f"{found.num_steps}/{found.topk}/{found.num_draft_tokens}"
        assert f"speculative tuning, best depths: {found.lines()}" in said
        assert f": {shape} (steps, topk, draft tokens)" in said
        assert "speculative tuning" not in unasked
        shown = httpx.get(f"{tuned.url}/get_server_info", timeout=10).json()["speculative"]
        assert shown["tuning"]["made_for"]["model_files"] == found.made_for.model_files
        assert tuple(shown["depths"]) == found.depths
        assert text_of(tuned) == text_of(embedded), "drafts never change greedy text"
