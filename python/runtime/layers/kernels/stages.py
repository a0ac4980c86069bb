"""Sizes of the shared-memory stages of weights in CUDA kernels (`stages.cu`)."""

from __future__ import annotations

from pathlib import Path

from runtime.layers.kernels.fragments import COLUMNS

STAGES = Path(__file__).with_name("stages.cu")
STAGE_BYTES = {"dense": 2048, "fp8": 2048 + 64, "mxfp4": 2048 + 256}
"""128 bytes of each of 16 weight rows, and their scales."""
STAGE_COLUMNS = {kind: 8 * columns for kind, columns in COLUMNS.items()}
"""Columns of a stage: two loads of a warp, with four lanes per row."""
TOKEN_PADDING = {"dense": 64, "fp8": 16, "mxfp4": 64, "int4": 64}
"""Bytes after a token, so that adjacent tokens are in different banks: after a multiple of the 128 bytes of all banks."""
