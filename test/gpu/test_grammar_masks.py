"""Grammars on the GPU: with every kind of draft, the text is valid and equals that of eager torch operations, except at near-ties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from gpu.test_worker import Setup, build, speculation
from runtime.constrained.backends import make_backend
from runtime.constrained.compiler import GrammarCompiler
from runtime.managers.messages import GenerateReq
from runtime.sampling_params import SamplingParams
from unit.grammars import Served, serve, vocabulary

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
VOCAB, TOKENS = 1000, 100
NEAR = 0.05
"""Difference of two log-probabilities that rounding may reverse."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["left", "right"]}, "ok": {"type": "boolean"}},
    "required": ["name", "kind", "ok"],
    "additionalProperties": False,
}
KINDS: list[tuple[str, str | None, int]] = [
    *((backend, *kind) for backend in ("fa3", "flashinfer") for kind in ((None, 1), ("EAGLE3", 1), ("EAGLE", 4))),
    ("fa3", "STANDALONE", 1),
    ("fa3", "NGRAM", 1),
]
"""Attention backend, algorithm and topk."""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: make_backend("llguidance", vocabulary(VOCAB)), None)


def asks() -> list[GenerateReq]:
    """Greedy requests; every fourth is free text."""
    rng = np.random.default_rng(3)
    schema = json.dumps(SCHEMA)
    free, constrained = (SamplingParams(temperature=0.0, max_new_tokens=TOKENS, json_schema=text) for text in (None, schema))
    prompts = [rng.integers(3, 400, 4 + 5 * i).tolist() for i in range(8)]
    samplings = [constrained if i % 4 else free for i in range(len(prompts))]
    pairs = enumerate(zip(prompts, samplings, strict=True))
    return [GenerateReq(rid=str(i), input_ids=ids, sampling=sampling, top_logprobs=2, seed=i) for i, (ids, sampling) in pairs]


def answers(worker: Any, compiler: GrammarCompiler) -> Served:
    overlap = not worker.limits.needs_history
    served, scheduler = serve(worker, asks(), compiler, page_size=16, max_total_tokens=8192, radix_cache=False, overlap=overlap)
    worker.close()
    assert scheduler.stats.num_failed_steps_total == 0
    return served


def margins(served: Served, rid: str) -> list[float]:
    """The log-probability margin over the second choice at each token; infinite if there was none."""
    tops = [top for out in served.outs if out.rid == rid and out.logprobs is not None for top in out.logprobs.top]
    return [top[0][1] - top[1][1] if len(top) > 1 else float("inf") for top in tops]


@pytest.fixture(scope="module")
def expected(compiler: GrammarCompiler) -> Served:
    return answers(build("torch_native", "eager"), compiler)


@pytest.mark.parametrize(("backend", "algorithm", "topk"), KINDS)
def test_texts_with_grammars_are_those_of_plain_torch_operations(
    tmp_path: Path, compiler: GrammarCompiler, expected: Served, backend: str, algorithm: str | None, topk: int
) -> None:
    spec = None if algorithm is None else speculation(tmp_path, algorithm, backend, topk)
    found, same = answers(build(Setup(backend, backend), "cuda", spec), compiler), 0
    for ask in asks():
        got, want = found.tokens[ask.rid], expected.tokens[ask.rid]
        at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
        assert at is not None or got == want, f"{ask.rid} ends elsewhere without a different token"
        assert at is None or margins(expected, ask.rid)[at] < NEAR, f"{ask.rid}, token {at}: {got[at]} in place of {want[at]}"
        same += len(want) if at is None else at
        if ask.sampling.json_schema is not None and found.ends[ask.rid].reason == "stop":
            jsonschema.validate(json.loads(found.text(ask.rid)), SCHEMA)
    assert same > sum(map(len, expected.tokens.values())) / 5, "answers part early"
