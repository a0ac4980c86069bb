"""Runs the offline `Engine` over a data set with Ray Data: one engine per GPU, or one on a CPU.

    pip install 'talon-runtime[ray]' 'ray[data]'
    python examples/ray_data.py --input prompts.jsonl --output answers --engines 2

Each line of the input is an object with a `prompt`; the output has the same objects with an `answer`.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
import ray.data

from runtime import Engine


class Answer:
    """An actor of Ray Data with an engine of its own. `map_batches` calls it with columns of a batch."""

    def __init__(self, flags: dict[str, Any], max_tokens: int) -> None:
        self._engine = Engine(**flags)
        self._sampling = {"max_new_tokens": max_tokens, "temperature": 0.0}

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add the answers."""
        outputs = self._engine.generate(batch["prompt"].tolist(), self._sampling)
        return {**batch, "answer": [output["text"] for output in outputs]}


def main() -> None:
    """Read, answer and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, help="JSON lines")
    parser.add_argument("--output", required=True, help="a folder for JSON lines")
    parser.add_argument("--model-path", help="default: the embedded model")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=1.0, help="of each engine; 0 for a CPU")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    flags: dict[str, Any] = {"model_path": args.model_path} if args.model_path else {}
    rows = ray.data.read_json(args.input, lines=True)
    answers = rows.map_batches(
        Answer,
        fn_constructor_kwargs={"flags": flags, "max_tokens": args.max_tokens},
        batch_size=args.batch_size,
        num_gpus=args.gpus,
        concurrency=args.engines,
    )
    answers.write_json(args.output)


if __name__ == "__main__":
    main()
