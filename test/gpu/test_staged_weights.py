"""Parts of a checkpoint reach the GPU through pinned buffers as `Tensor.to` brings them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.errors import ConfigError
from runtime.layers.quantization.scheme import WeightSlot
from runtime.model_executor.weight_loader import safetensors_weights
from runtime.models.checkpoint_parts import STAGE_BYTES, Staging, parts_of
from runtime.models.parallel_store import store_in_threads

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda")
E4M3 = torch.float8_e4m3fn


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random numbers of a dtype."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.mul(9).to(torch.uint8) if dtype is torch.uint8 else values.to(dtype)


def slot(values: torch.Tensor, index: tuple[slice, ...]) -> tuple[WeightSlot, torch.Tensor]:
    """A place for a part, and the tensor behind it."""
    target = torch.zeros_like(values[index], device=DEVICE)
    return WeightSlot(tuple(values.shape), index, target.copy_), target


def test_a_checkpoint_larger_than_all_buffers_arrives_in_threads(tmp_path: Path) -> None:
    dtypes = (torch.bfloat16, E4M3, torch.float32, torch.uint8)
    saved = {f"t{i}": numbers((96 + i % 7, 4096 + 16 * (i % 5)), dtypes[i % 4], i) for i in range(120)}
    saved["large"] = numbers((3 * STAGE_BYTES // 4096 + 1, 4096), torch.uint8, 0)
    save_file(saved, tmp_path / "a.safetensors")
    slots = {name: slot(values, (slice(3, None), slice(None)) if i % 3 else (slice(None), slice(8, 1000)))
             for i, (name, values) in enumerate(saved.items())}  # fmt: skip
    parts = (part for name, tensor in safetensors_weights(tmp_path, progress=False) for part in parts_of(name, tensor, [slots[name][0]]))
    store_in_threads(Staging(DEVICE).stores(parts))
    for name, (place, target) in slots.items():
        expected = saved[name][place.index].contiguous()
        assert torch.equal(expected.view(torch.uint8), target.cpu().view(torch.uint8)), name


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    saved = {f"t{i}": numbers((64, 256), torch.bfloat16, i) for i in range(9)}
    saved["t5"][63, 255] = torch.nan
    save_file(saved, tmp_path / "a.safetensors")
    whole = (slice(None), slice(None))
    parts = (part for name, tensor in safetensors_weights(tmp_path, progress=False)
             for part in parts_of(name, tensor, [slot(saved[name], whole)[0]]))  # fmt: skip
    with pytest.raises(ConfigError, match="tensor t5 holds NaN"):
        store_in_threads(Staging(DEVICE).stores(parts))
