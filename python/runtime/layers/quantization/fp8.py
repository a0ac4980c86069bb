"""FP8 weights (e4m3) with one float32 scale per block or per row, for 16-bit activations."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

from runtime.config.quant_config import BLOCK, block_length
from runtime.layers.quantization.scheme import LinearPart, NewWeight, QuantScheme, Storage, WeightSlot

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""The largest number of e4m3; it has no infinities."""


class BlockFp8(QuantScheme):
    """Weights in FP8 (e4m3), with a float32 scale for each block of 128 x 128 entries.

    `weight` is e4m3 [out, in]; the value of block [i, j] is `weight * scale[i, j]`.
    If a part of a fused layer, or a rank's shard of it, starts inside a block of the checkpoint, the stored blocks are smaller, so that
    each lies within one block of the checkpoint. Their size is the largest power of two that fits the shape of `scale` (`block_size`).
    Activations keep 16 bits, so only the weights are rounded; but on a GPU, expert batches above the limits of the kernels for few tokens
    round activations to e4m3.
    """

    name = "fp8"
    gemm_format = "fp8"

    def __init__(self, scale_name: str, stored: bool) -> None:
        """`stored`: whether checkpoints contain e4m3 and scales; otherwise weights of any float dtype are quantised while loading."""
        self.scale_name, self._stored = scale_name, stored

    def allocate(self, new: NewWeight) -> Storage:
        """Empty weights and scales, for activations of any dtype."""
        rows, columns = common_block(new.parts)
        scale = new.empty(-(-new.out_features // rows), -(-new.in_features // columns), dtype=torch.float32)
        return Storage(new.empty(new.out_features, new.in_features, dtype=E4M3), scale)

    def places(self, part: LinearPart, storage: Storage) -> Mapping[str, WeightSlot]:
        """`prefix.weight` and its scales, or one tensor of any float dtype that is quantised when it is stored."""
        weight, block = storage.weight[part.rows], block_size(storage)
        scale = storage.scales[part.rows.start // block[0] : -(-part.rows.stop // block[0])]
        first = part.index[0].start % BLOCK, part.index[1].start % BLOCK
        blocks = tuple(slice(index.start // BLOCK, -(-index.stop // BLOCK)) for index in part.index)

        def put_scales(scales: torch.Tensor) -> None:
            scale.copy_(_finer(scales, first, scale.shape, block))

        def quantize(values: torch.Tensor) -> None:
            quantized, scales = quantize_blocks(values.to(weight.device))
            weight.copy_(quantized[first[0] :, first[1] :][: weight.shape[0], : weight.shape[1]])
            put_scales(scales)

        if not self._stored:
            # Whole blocks of the checkpoint's matrix, so that values do not depend on the number of ranks.
            around = tuple(slice(b.start * BLOCK, min(b.stop * BLOCK, size)) for b, size in zip(blocks, part.shape, strict=True))
            return {part.prefix + ".weight": WeightSlot(part.shape, around, quantize, finite=True)}
        whole = -(-part.shape[0] // BLOCK), -(-part.shape[1] // BLOCK)
        return {
            part.prefix + ".weight": WeightSlot(part.shape, part.index, weight.copy_, E4M3),
            f"{part.prefix}.{self.scale_name}": WeightSlot(whole, blocks, put_scales, finite=True),
        }

    def dequantize(self, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
        """Multiply each block by its scale in float32, and round to `dtype`."""
        (out, width), (rows, columns) = storage.weight.shape[-2:], block_size(storage)
        scale = storage.scales.repeat_interleave(rows, dim=-2)[..., :out, :]
        if width % columns:
            return (storage.weight.float() * scale.repeat_interleave(columns, dim=-1)[..., :width]).to(dtype)
        blocks = storage.weight.unflatten(-1, (-1, columns)).float()
        return blocks.mul_(scale[..., None]).to(dtype).flatten(-2)

    def select_rows(self, storage: Storage, rows: torch.Tensor) -> Storage:
        """The rows, each with its own scales."""
        return Storage(storage.weight[rows], storage.scales[rows // block_size(storage)[0]])


class RowFp8(QuantScheme):
    """Weights in FP8 (e4m3), with a float32 scale for each row.

    `weight` is e4m3 [out, in] and `scale` [out]; the value of row i is `weight[i] * scale[i]`. A checkpoint has one scale per row, or one
    for the whole tensor.
    """

    name = "fp8-row"
    gemm_format = "fp8"

    def __init__(self, scale_name: str) -> None:
        self.scale_name = scale_name

    def allocate(self, new: NewWeight) -> Storage:
        """Empty weights and scales, for activations of any dtype."""
        weight = new.empty(new.out_features, new.in_features, dtype=E4M3)
        return Storage(weight, new.empty(new.out_features, dtype=torch.float32))

    def places(self, part: LinearPart, storage: Storage) -> Mapping[str, WeightSlot]:
        """`prefix.weight` and its scales: [out, 1], [out], or one number."""
        weight, scale = storage.weight[part.rows], storage.scales[part.rows]
        put = lambda scales: scale.copy_(scales.reshape(-1))  # noqa: E731
        slot = WeightSlot((part.shape[0], 1), (part.index[0], slice(None)), put, broadcast=True, finite=True)
        return {
            part.prefix + ".weight": WeightSlot(part.shape, part.index, weight.copy_, E4M3),
            f"{part.prefix}.{self.scale_name}": slot,
        }

    def dequantize(self, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
        """Multiply each row by its scale in float32, and round to `dtype`."""
        return storage.weight.float().mul_(storage.scales[..., None]).to(dtype)


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks of 128 x 128 entries, the last ones smaller, so that the largest of each becomes 448.

    Args:
        weight: [out, in], any float dtype.

    Returns:
        e4m3 [out, in], and float32 scales [⌈out / 128⌉, ⌈in / 128⌉] to multiply by.
    """
    out, width = weight.shape
    padded = F.pad(weight.float(), (0, -width % BLOCK, 0, -out % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [rows of blocks, 128, columns of blocks, 128]
    scales = blocks.abs().amax(dim=(1, 3)).clamp_(min=1e-12) / E4M3_MAX
    blocks /= scales[:, None, :, None]
    return padded[:out, :width].clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scales


def common_block(parts: Sequence[LinearPart]) -> tuple[int, int]:
    """Rows and columns of the largest blocks of a fused layer such that each lies within one block of the checkpoint.

    Ranks with equal shards have equal blocks, because they use the kernels that rank 0 chooses.
    """
    rows, columns = (math.gcd(BLOCK, *(bound for part in parts for bound in _cuts(part, dim))) for dim in (0, 1))
    return math.gcd(rows, *(part.start for part in parts)), columns


def _cuts(part: LinearPart, dim: int) -> tuple[int, int]:
    """Multiples of these numbers include the start of this rank's shard, and of the other ranks' if all are equal."""
    shard, whole = part.index[dim], part.shape[dim]
    size = shard.stop - shard.start
    return shard.start, 0 if size == whole else size


def block_size(storage: Storage) -> tuple[int, int]:
    """Rows and columns of a block of `storage`."""
    rows, columns = (block_length(size, count) for size, count in zip(storage.weight.shape[-2:], storage.scales.shape[-2:], strict=True))
    return rows, columns


def _finer(scales: torch.Tensor, first: tuple[int, int], shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """The scales of smaller blocks, [*shape], which start `first` rows and columns inside a block of `scales`."""
    if first == (0, 0) and block == (BLOCK, BLOCK):
        return scales
    rows, columns = (_coarse_blocks(*of, scales.device) for of in zip(first, shape, block, strict=True))
    return scales[rows][:, columns]


@functools.lru_cache
def _coarse_blocks(start: int, count: int, length: int, device: torch.device) -> torch.Tensor:
    """The checkpoint block that contains each of `count` blocks of `length` entries, the first of which begins at entry `start`."""
    return (start + torch.arange(count, device=device) * length) // BLOCK
