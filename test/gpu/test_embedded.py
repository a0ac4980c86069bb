"""The embedded model on the GPU gives the same text as on the CPU in float32, with and without speculation, except at near-ties."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.check_acceptance import EMBEDDED_PROMPTS, read_prompts, tokenised
from runtime.config.flag_parser import parse
from runtime.entrypoints.child import build_worker
from runtime.entrypoints.prepare import prepare
from runtime.text.tokenizer import Tokenizer
from unit.driver import Driver

GGUF = os.environ.get("GGUF", "")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("embedded"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not GGUF, reason="needs the embedded model's file in $GGUF"),
]
BACKENDS = ["fa3", "flashinfer"]
PROMPTS, TOKENS = 24, 48
NEAR_TIE = 0.25
"""The two most likely tokens are a near-tie if their log-probabilities differ by less: twice the largest difference at which bfloat16
instead of float32, or four rows instead of one, was observed to change the choice."""
CUDA = ["--max-running-requests", "32", "--max-total-tokens", "16384", "--cuda-graph-max-bs", "32", "--dtype", "bfloat16"]
CPU = ["--device", "cpu", "--dtype", "float32", "--quantization", "none", "--max-running-requests", "32", "--max-total-tokens", "16384"]


@dataclass(frozen=True)
class Answers:
    """Greedy tokens of each prompt, and at each of them the log-probability margin over the second choice."""

    tokens: dict[int, list[int]]
    margins: dict[int, list[float]]


def answers(flags: list[str]) -> tuple[Answers, Tokenizer]:
    """Run the held-out prompts through a worker built by the server's flags."""
    config, model_config = prepare(parse(["--model-path", GGUF, "--random-seed", "1", *flags]).args)
    tokenizer = Tokenizer.load(config.model.tokenizer_path)
    ids = tokenised(tokenizer, read_prompts(EMBEDDED_PROMPTS, PROMPTS))
    worker: Any = build_worker(config, model_config)
    driver = Driver(worker)
    rows = list(range(1, len(ids) + 1))
    margins: dict[int, list[float]] = {r: [] for r in rows}

    def note(result: Any, which: list[int]) -> None:
        gaps, at = result.logprobs.top[:, 0] - result.logprobs.top[:, 1], 0
        for r, n in zip(which, result.accept_lens.tolist(), strict=True):
            margins[r].extend(gaps[at : at + n].tolist())
            at += n

    for row, prompt in zip(rows, ids, strict=True):  # one by one: no guarantee depends on how prompts are batched
        note(driver.prefill({row: prompt}, room=TOKENS + 64, logprobs=2)[-1], [row])
    while live := [r for r in rows if len(driver.out[r]) < TOKENS]:
        note(driver.decode(live, logprobs=2), live)
    worker.close()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    tokens = {r: _until_end(driver.out[r][:TOKENS], model_config.eos_ids) for r in rows}
    return Answers(tokens, margins), tokenizer


def _until_end(tokens: list[int], eos_ids: tuple[int, ...]) -> list[int]:
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in eos_ids), tokens)


def compare(name: str, got: Answers, want: Answers, tokenizer: Tokenizer) -> None:
    """Check that each answer equals the wanted one up to its first near-tie, and print the differences."""
    ties, wrong, same = [], [], 0
    for row, expected in want.tokens.items():
        found = got.tokens[row]
        at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
        if at is None:
            assert found == expected, f"{name}: prompt {row} ends elsewhere without a different token"
            same += len(expected)
            continue
        same += at
        words = [tokenizer.decode([tokens[at]], skip_special_tokens=False) for tokens in (expected, found)]
        line = f"{name}: prompt {row}, token {at}: {words[0]!r} became {words[1]!r}, margin {want.margins[row][at]:.3f}"
        (ties if want.margins[row][at] < NEAR_TIE else wrong).append(line)
    equal = len(want.tokens) - len(ties) - len(wrong)
    print(f"{name}: {equal} of {len(want.tokens)} answers equal, {same} tokens; near-ties:", *ties, sep="\n  ")
    assert not wrong, "\n".join(wrong)
    assert same > sum(map(len, want.tokens.values())) / 3, "answers part early"


@pytest.fixture(scope="module")
def reference() -> Answers:
    threads = str(min(len(os.sched_getaffinity(0)), 16))
    return answers([*CPU, "--cpu-threads", threads])[0]


@pytest.fixture(scope="module", params=BACKENDS)
def plain(request: pytest.FixtureRequest) -> tuple[str, Answers, Tokenizer]:
    return (request.param, *answers([*CUDA, "--attention-backend", request.param]))


def shipped_head() -> str | None:
    """The folder of the EAGLE-3 head that is shipped with the package, or None."""
    assets = Path(EMBEDDED_PROMPTS).parent
    heads = [file.parent for file in sorted(assets.glob("*/config.json")) if "Eagle3" in json.loads(file.read_text())["architectures"][0]]
    return str(heads[0]) if heads else None


def test_greedy_text_is_the_cpus(plain: tuple[str, Answers, Tokenizer], reference: Answers) -> None:
    backend, got, tokenizer = plain
    compare(f"{backend} against float32 on the CPU", got, reference, tokenizer)


@pytest.mark.parametrize(("steps", "topk", "drafts"), [(3, 1, 4), (3, 4, 8)])
@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE3"])
def test_speculation_changes_no_greedy_text(
    plain: tuple[str, Answers, Tokenizer], algorithm: str, steps: int, topk: int, drafts: int
) -> None:
    backend, want, tokenizer = plain
    flags = ["--speculative-algorithm", algorithm, "--speculative-num-steps", str(steps)]
    if algorithm == "EAGLE3":
        head = shipped_head()
        if head is None:
            pytest.skip("no EAGLE-3 head is shipped")
        flags += ["--speculative-draft-model-path", head, "--speculative-eagle-topk", str(topk)]
        flags += ["--speculative-num-draft-tokens", str(drafts)]
    elif topk > 1:
        pytest.skip("prompt lookup drafts chains")
    got, _ = answers([*CUDA, "--attention-backend", backend, *flags])
    compare(f"{algorithm} {steps}/{topk}/{drafts} on {backend} against none", got, want, tokenizer)
    assert np.isfinite([m for margins in got.margins.values() for m in margins]).all()
