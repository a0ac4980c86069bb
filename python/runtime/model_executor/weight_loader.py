"""Sources of a model's tensors as (name, tensor) pairs: safetensors files, read by slice, or random numbers."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

import torch

from runtime.errors import ConfigError
from runtime.model_files.checkpoint_folder import safetensors_files
from runtime.model_files.safetensors_header import read_header
from runtime.models.file_tensor import FileTensor, UnreadableTensor, WeightFile, damaged, row_major
from runtime.progress_bar import ProgressBar, progress_bar

DUMMY_STD = 0.02
FP8_SCALES = (".weight_scale_inv", ".weight_scale")
MXFP4_SCALE = 127 - 7
"""The exponent byte with which random e2m1 numbers, whose std is 2.9, have a std near `DUMMY_STD`."""
INT4_CODES = (".qweight", ".weight_packed")
INT4_ZERO_POINTS = (".qzeros", ".weight_zero_point")
INT4_SCALE = DUMMY_STD / 4.6
"""The size of a scale with which random codes from 0 to 15, whose std is 4.6, have `DUMMY_STD`. Signs are random, because the mean of codes
minus zero points is not zero: with equal signs it would soon dominate the hidden states.
"""
INT4_ZEROS = 0x77777777
"""Eight zero points near the mean of the codes."""
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16},
    **{"I8": torch.int8, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
}
"""torch dtypes by safetensors' names."""


def safetensors_weights(folder: str | Path, progress: bool = True) -> Generator[tuple[str, FileTensor | UnreadableTensor]]:
    """Every tensor of a checkpoint folder, unread, with a progress bar in bytes; the tensors of a file in the order of their bytes.

    Raises:
        ConfigError: there are no safetensors files, a file that the index names is missing or damaged, or two files have the same tensor.
    """
    files = safetensors_files(Path(folder))
    total = sum(f.stat().st_size for f in files)
    with progress_bar(shown=progress, total=total, unit="B", unit_scale=True, desc="Loading weights") as bar:
        found = dict[str, Path]()
        for file in files:
            for name, tensor in _tensors_of(file, bar):
                if (other := found.setdefault(name, file)) is not file:
                    raise ConfigError(f"tensor {name} is in {other} and in {file}; remove the file that is not part of the checkpoint")
                yield name, tensor


def dummy_weights(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Generator[tuple[str, torch.Tensor]]:
    """Random weights that depend only on the seed and the order of `shapes`: norms one, biases and `d2t` zero, others normal, std 0.02.

    The variance of the residual stream then stays bounded, so activations are finite at any depth. Quantised weights are random in their
    own format, with equal scales. Tensors are not sharded, and equal on all ranks.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in shapes.items():
        if (int4 := _dummy_int4(name, shapes, device, generator)) is not None:
            yield name, int4
        elif name.endswith(FP8_SCALES):
            yield name, torch.full(shape, DUMMY_STD, device=device)
        elif any(name.removesuffix(".weight") + scale in shapes for scale in FP8_SCALES):
            yield name, torch.empty(shape, device=device).normal_(generator=generator).to(torch.float8_e4m3fn)
        elif name.endswith("_scales"):
            yield name, torch.full(shape, MXFP4_SCALE, dtype=torch.uint8, device=device)
        elif name.endswith("_blocks"):
            yield name, torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
        elif name == "d2t":
            yield name, torch.zeros(shape, dtype=torch.int64, device=device)
        elif name.endswith(".bias"):
            yield name, torch.zeros(shape, dtype=dtype, device=device)
        elif len(shape) == 1:
            yield name, torch.ones(shape, dtype=dtype, device=device)
        else:
            yield name, torch.empty(shape, dtype=dtype, device=device).normal_(0.0, DUMMY_STD, generator=generator)


def _dummy_int4(name: str, shapes: Mapping[str, tuple[int, ...]], device: torch.device, generator: torch.Generator) -> torch.Tensor | None:
    """A tensor of an int4 weight in one of the checkpoint formats; None for other tensors."""
    shape, layer = shapes[name], name.rpartition(".")[0]
    if name.endswith(".scales") or (name.endswith(".weight_scale") and f"{layer}.weight_packed" in shapes):
        return INT4_SCALE * (2.0 * torch.randint(2, shape, device=device, generator=generator) - 1.0)
    if name.endswith(INT4_CODES):
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device, generator=generator)
    if name.endswith(INT4_ZERO_POINTS):
        return torch.full(shape, INT4_ZEROS, dtype=torch.int32, device=device)
    if name.endswith(".g_idx"):
        columns, groups = shape[0], shapes[f"{layer}.scales"][0]
        return torch.arange(columns, dtype=torch.int32, device=device) // (columns // groups)
    return None


def _tensors_of(path: Path, bar: ProgressBar) -> Iterator[tuple[str, FileTensor | UnreadableTensor]]:
    try:
        file, entries = WeightFile(path), read_header(path)
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error
    for name, stored, shape, start, stop in entries:
        dtype = DTYPES.get(stored)
        if dtype is None:
            yield name, UnreadableTensor(name, shape, stored)
        elif stop - start != math.prod(shape) * dtype.itemsize:
            raise damaged(path, f"tensor {name} has dtype {stored} and shape {list(shape)} in {stop - start} bytes")
        else:
            yield name, FileTensor(file, dtype, start, shape, row_major(shape))
        bar.update(stop - start)
