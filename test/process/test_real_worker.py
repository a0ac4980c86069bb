"""Servers of a tiny random model with the real worker: what a fake one cannot show."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from process.fake import VOCAB, dummy_model
from runtime import Engine

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True},
    {"temperature": 1.0, "max_new_tokens": 60, "ignore_eos": True, "seed": 7},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "max_new_tokens": 40, "ignore_eos": True, "seed": 8},
    {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.3, "max_new_tokens": 50, "ignore_eos": True, "seed": 9},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "max_new_tokens": 60, "ignore_eos": True, "seed": 10},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(dummy_model(tmp_path_factory.mktemp("models") / "tiny"))


def options(model: str, **more: object) -> dict[str, object]:
    return {"model": model, "load_format": "dummy", "device": "cpu", "dtype": "float32", "random_seed": 3, "log_level": "warning", **more}


def work(seed: int, count: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(2, VOCAB) for _ in range(draw.randint(1, 40))] for _ in range(count)]
    return prompts, [SAMPLING[i % len(SAMPLING)] for i in range(count)]


@pytest.mark.parametrize("more", [{}, {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}], ids=["plain", "speculating"])
def test_no_request_changes_anothers_output_and_full_memory_changes_none(model: str, more: dict[str, object]) -> None:
    prompts, sampling = work(1, 15)
    with Engine(**options(model, disable_radix_cache=True, **more)) as engine:
        alone = [engine.generate(input_ids=[p], sampling_params=[s])[0]["output_ids"] for p, s in zip(prompts, sampling, strict=True)]
        together = engine.generate(input_ids=prompts, sampling_params=sampling)
        assert [output["output_ids"] for output in together] == alone
    # KV for some four of the fifteen: the rest are retracted and resumed, or wait
    with Engine(**options(model, page_size=1, max_total_tokens=330, schedule_conservativeness=0.1, context_length=256, **more)) as engine:
        crowded = engine.generate(input_ids=prompts, sampling_params=sampling)
        state = engine.get_server_info()["internal_states"][0]
    # after a retraction other positions stand at the border of two steps, and there speculation draws from other random numbers
    same = range(0, len(prompts), len(SAMPLING)) if more else range(len(prompts))
    assert [crowded[i]["output_ids"] for i in same] == [alone[i] for i in same]
    assert [len(output["output_ids"]) for output in crowded] == [s["max_new_tokens"] for s in sampling]
    assert state["num_retracted_requests_total"] > 0
    assert state["token_usage"] == 0


def test_decoding_in_the_passes_of_prompts_changes_no_output(model: str) -> None:
    prompts, sampling = work(2, 15)
    with Engine(**options(model)) as engine:
        apart = engine.generate(input_ids=prompts, sampling_params=sampling)
        assert engine.get_server_info()["internal_states"][0]["mixed_steps"] == 0
    more = {"enable_mixed_chunk": True, "chunked_prefill_size": 32, "page_size": 1, "max_total_tokens": 330, "context_length": 256}
    with Engine(**options(model, schedule_conservativeness=0.1, **more)) as engine:
        together = engine.generate(input_ids=prompts, sampling_params=sampling)
        state = engine.get_server_info()["internal_states"][0]
    assert [output["output_ids"] for output in together] == [output["output_ids"] for output in apart]
    assert min(state["mixed_steps"], state["num_retracted_requests_total"]) > 0


def test_the_package_of_a_wheel_serves_without_its_checkout(model: str, tmp_path: Path) -> None:
    from setuptools import find_packages  # what the build uses

    root = Path(__file__).parents[2]
    packages = set(find_packages(str(root / "python")))
    folders = {p.parent for p in (root / "python" / "runtime").rglob("*.py")}
    assert {".".join(f.relative_to(root / "python").parts) for f in folders} == packages  # no folder without __init__.py is left out
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-c", "from runtime.launch_server import main; raise SystemExit(main())", "--port", port]
        done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(root / "python")}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
