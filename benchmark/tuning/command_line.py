"""The command line of a tuning tool, which requires a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch


def arguments(tool: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags that all tools share."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmark.tuning.{tool}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for result files instead of benchmark/results")
    return parser


def parse_on_gpu(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line on a machine with a GPU.

    Raises:
        SystemExit: there is no GPU, or a flag is wrong.
    """
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit(f"{parser.prog}: a CUDA GPU is required, and torch finds none")
    return args
