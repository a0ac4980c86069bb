"""A load of real text: the shipped chat prompts, each sent equally often, answered until the model ends the text."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

from benchmark.sweep import Burst
from benchmark.whole_file import write_whole
from runtime.bench.datasets import embedded_prompts

PROMPTS = 80
_A_KIND = 10


def chat_text(concurrency: int, requests: int, output_len: int, prompts: int = PROMPTS, *more: str) -> Burst:
    """A closed loop of at least `requests` requests: the first `prompts` chat prompts with the model's chat template, in whole rounds.

    Prompts repeat, so the server's prefix cache should be off.
    """
    rounds = max(math.ceil(requests / prompts), 1)
    flags = ["--backend", "sglang-oai-chat", "--dataset-name", "custom", "--dataset-path", str(_asked(prompts, rounds))]
    flags += ["--sharegpt-output-len", str(output_len), "--disable-ignore-eos", "--flush-cache"]
    flags += ["--num-prompts", str(rounds * prompts), "--max-concurrency", str(concurrency), *more]
    return Burst({"concurrency": concurrency, "input_len": 0, "output_len": output_len, "num_prompts": rounds * prompts}, flags)


def _asked(prompts: int, rounds: int) -> Path:
    """A file with the first `prompts` chat prompts, interleaved by kind, repeated `rounds` times."""
    known = embedded_prompts()  # sorted by kind
    chosen = sorted(range(len(known)), key=lambda number: number % _A_KIND)[:prompts]
    lines = [json.dumps({"prompt": known[number]["prompt"]}) for number in chosen]
    file = Path(tempfile.gettempdir()) / "talon-benchmark" / f"chat_prompts_{prompts}x{rounds}.jsonl"
    write_whole(file, "\n".join(lines * rounds) + "\n")
    return file
