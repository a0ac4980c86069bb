"""The command line of a tuning tool, which is refused where there is no GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch


def arguments(tool: str, description: str | None) -> argparse.ArgumentParser:
    """The flags that all tools share."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmark.tuning.{tool}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the result files, in place of benchmark/results")
    return parser


def parse_on_gpu(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, on a machine that can obey it.

    Raises:
        SystemExit: there is no GPU, in one line; or bad flags.
    """
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit(f"{parser.prog}: this times kernels on a CUDA GPU, and torch finds none here")
    return args


def counts(text: str) -> list[int]:
    """`1,4,16` as a list.

    Raises:
        argparse.ArgumentTypeError: not numbers, or one below 1.
    """
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 1 on, such as 1,4,16")
    return [int(part) for part in parts]
