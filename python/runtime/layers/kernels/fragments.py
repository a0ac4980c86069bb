"""Arguments of CUDA kernels that load weights by `fragments.cu`, straight from memory into tensor-core fragments."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import torch

from runtime.config.expert_tuning import WeightFormat
from runtime.layers.kernels.cuda_program import program

FORMATS: dict[WeightFormat, int] = {"dense": 0, "fp8": 1, "mxfp4": 2, "int4": 3}
"""Constants of kernels: the activations' dtype; e4m3 with float32 scales of blocks or rows; pairs of e2m1 with one scale per 32; pairs of
codes with a scale and a zero point per group."""
COLUMNS = {"dense": 8, "fp8": 16, "mxfp4": 32, "int4": 32}
"""Columns that a lane loads at once; the number of columns of a weight must be a multiple."""


class Weights(ctypes.Structure):
    """`Weights` in the CUDA source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "bias")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "expert_scales", "row_scales", "scale_rows", "scale_columns")),
    )


def weights_argument(
    weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, shape: tuple[int, int], layout: tuple[int, int, int, int]
) -> Weights:
    """The kernel parameter for a weight.

    Args:
        shape: rows and columns of one matrix.
        layout: scales per matrix, scales per row of blocks, rows per block, columns per block.
    """
    return Weights(*(None if tensor is None else tensor.data_ptr() for tensor in (weight, scale, bias)), *shape, *layout)


def readable(weight: torch.Tensor, kind: str, columns: int, scale_columns: int) -> bool:
    """Whether the rows of the format `kind` consist of whole pieces for lanes, each with one scale."""
    lane = COLUMNS[kind]
    return weight.is_contiguous() and columns % lane == 0 and (kind != "fp8" or scale_columns % (4 * lane) == 0)


def source(file: Path, constants: Mapping[str, int], *shared: Path | str) -> str:
    """The program: `fragments.cu`, other `shared` files or text, and the kernel's `file`."""
    return program(constants, Path(__file__).with_name("fragments.cu"), *shared, file)
