"""Adding a drafter takes one class, and one row of the table of algorithms."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from process.fake import dummy_model
from runtime.config.flag_parser import build_parser, from_fields, parse
from runtime.entrypoints.prepare import prepare
from runtime.errors import ConfigError
from runtime.model_executor.build import build_worker
from runtime.model_executor.context import BuildOptions
from runtime.sampling_params import SamplingParams
from runtime.speculative.registry import make_drafter
from unit.driver import Driver
from unit.predicting import RUNTIME, VOCAB, calm, model_config, plain
from unit.tiny import tiny_runtime
from unit.toy_drafter import RepeatDrafter, toy_row

PROMPTS = {r: np.random.default_rng(r).integers(0, VOCAB, 5 + r).tolist() for r in (1, 2, 3)}


@pytest.mark.parametrize("replay", [None, "eager"])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_toy_drafter_serves_the_text_of_plain_decoding(replay: str | None, mixed: bool) -> None:
    sampling = SamplingParams(temperature=0.0, logit_bias={7: 9.0}, max_new_tokens=1 << 20)  # repeats a token often
    config = tiny_runtime(**{**RUNTIME, "mixed_chunk": mixed})
    options = BuildOptions(replay, [2, 4] if replay else None)
    worker = build_worker(config, model_config(), lambda context, target: RepeatDrafter(3), options)
    with torch.inference_mode():
        calm(worker.parts.target.runner.model, 1.0)
    expected = Driver(plain()).generate(PROMPTS, 30, sampling=sampling)
    driver = Driver(worker)
    driver.prefill({1: PROMPTS[1]}, sampling=sampling, chunk=4)
    driver.prefill({row: PROMPTS[row] for row in (2, 3)}, sampling=sampling, chunk=4, along=lambda: [1])
    while any(len(driver.out[row]) < 30 for row in PROMPTS):
        driver.decode([row for row in PROMPTS if len(driver.out[row]) < 30])
    assert {row: text[:30] for row, text in driver.out.items()} == expected
    assert driver.mean_accept_len() > 1.2
    acceptance = worker.info().acceptance
    assert acceptance is not None
    assert acceptance.graph.iterations + acceptance.eager.iterations == sum(len(lens) for lens in driver.accepts)


def flags_of(folder: Path, *more: str) -> list[str]:
    """The command line of a tiny model on a CPU."""
    model = ("--model-path", str(dummy_model(folder)), "--load-format", "dummy", "--dtype", "float32", "--random-seed", "3")
    return [*model, "--device", "cpu", "--attention-backend", "torch_native", *more]


def test_one_row_makes_the_toy_drafter_an_algorithm(tmp_path: Path) -> None:
    drafts = ("--speculative-algorithm", "TOY", "--speculative-num-steps", "2")
    with toy_row():
        expected, found = (Driver(build_worker(*prepare(parse(flags_of(tmp_path, *more)).args), make_drafter)) for more in ((), drafts))
        assert "TOY" in build_parser().format_help()
    assert isinstance(found.worker.parts.drafter, RepeatDrafter)
    sampling = SamplingParams(temperature=0.0, frequency_penalty=0.1, max_new_tokens=1 << 20)  # repeats each token a few times
    assert found.generate(PROMPTS, 30, sampling=sampling) == expected.generate(PROMPTS, 30, sampling=sampling)
    assert 1.2 < found.mean_accept_len() < 3.0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--speculative-draft-model-path", "d"), "--speculative-draft-model-path has no effect: TOY repeats the last token."),
        (("--disable-draft-extend-cuda-graph",), "--disable-draft-extend-cuda-graph has no effect: TOY repeats the last token."),
        (
            ("--speculative-token-map", "t"),
            "--speculative-token-map works with EAGLE, MTP, DFLASH, STANDALONE only; TOY repeats the last token.",
        ),
        (("--speculative-eagle-topk", "2"), "--speculative-eagle-topk must be 1: TOY drafts chains."),
    ],
)
def test_the_row_refuses_flags_without_effect(tmp_path: Path, more: tuple[str, ...], message: str) -> None:
    with toy_row(), pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        prepare(parse(flags_of(tmp_path, "--speculative-algorithm", "TOY", *more)).args)


def test_without_the_row_the_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be one of EAGLE, .*NGRAM, none, not 'TOY'"):
        parse(["--speculative-algorithm", "TOY"])
    with pytest.raises(ConfigError, match=r"'speculative_algorithm' must be one of EAGLE, .*NGRAM, none; got 'TOY'"):
        from_fields({"speculative_algorithm": "TOY"})
