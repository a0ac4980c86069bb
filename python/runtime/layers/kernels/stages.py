"""Sizes of the shared-memory stages of weights in CUDA kernels (`stages.cu`)."""

from __future__ import annotations

from pathlib import Path

from runtime.config.expert_tuning import WeightFormat
from runtime.layers.kernels.fragments import COLUMNS

STAGES = Path(__file__).with_name("stages.cu")
STAGE_COLUMNS = {kind: 8 * columns for kind, columns in COLUMNS.items()}
"""Columns of a stage: two loads of a warp, with four lanes per row."""
TOKEN_PADDING = {"dense": 64, "fp8": 16, "mxfp4": 64, "int4": 64}
"""Bytes after a token, so that adjacent tokens are in different banks: after a multiple of the 128 bytes of all banks."""
INT4_COLUMNS = 128
"""The number of columns of an int4 weight must be a multiple: a lane copies the scales and zero points of 128 columns together."""


def stage_bytes(kind: WeightFormat, group: int = 0) -> int:
    """The size of a stage: 128 bytes of each of 16 weight rows, and their scales. `group`: columns of an int4 group."""
    of_row = {"dense": 0, "fp8": 4, "mxfp4": 16}
    return 16 * (128 + (4 * STAGE_COLUMNS[kind] // group if kind == "int4" else of_row[kind]))
