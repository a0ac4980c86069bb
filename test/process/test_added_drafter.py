"""A server with a drafter that one class and one row of the table of algorithms add."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from process.fake import dummy_model
from process.toy_scheduler import scheduler_command
from runtime import Engine
from unit.toy_drafter import toy_row

PROMPTS = [[5, 6, 7], [9, 9, 9, 9, 9, 9], list(range(100, 140))]
SAMPLING = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True, "frequency_penalty": 0.1}  # repeats each token a few times


def served(model: Path, algorithm: str, command: Sequence[str] | None = None) -> list[dict[str, Any]]:
    options = {"model": str(model), "load_format": "dummy", "device": "cpu", "dtype": "float32", "random_seed": 3}
    with Engine(scheduler_command=command, speculative_algorithm=algorithm, **options) as engine:
        return engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)


def test_a_server_with_the_toy_algorithm_serves_plain_greedy_text(tmp_path: Path) -> None:
    model = dummy_model(tmp_path)
    plain = served(model, "none")
    with toy_row():
        drafted = served(model, "TOY", scheduler_command())
    assert [output["output_ids"] for output in drafted] == [output["output_ids"] for output in plain]
    rates = [output["meta_info"]["spec_accept_rate"] for output in drafted]
    assert all(0.0 < rate < 1.0 for rate in rates)
