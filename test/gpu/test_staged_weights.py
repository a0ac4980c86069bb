"""Parts of a checkpoint that reach the GPU through pinned buffers equal those copied by `Tensor.to`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.errors import ConfigError
from runtime.layers.quantization.scheme import WeightSlot
from runtime.model_executor.weight_loader import safetensors_weights
from runtime.models.checkpoint_parts import STAGE_BYTES, Part, Staging, parts_of
from runtime.models.file_tensor import FileTensor, WeightFile, row_major
from runtime.models.parallel_store import store_in_threads

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda")
E4M3 = torch.float8_e4m3fn


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random numbers of a dtype."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.mul(9).to(torch.uint8) if dtype is torch.uint8 else values.to(dtype)


def slot(values: torch.Tensor, index: tuple[slice, ...]) -> tuple[WeightSlot, torch.Tensor]:
    """A slot for a part of a weight, and its tensor."""
    target = torch.zeros_like(values[index], device=DEVICE)
    return WeightSlot(tuple(values.shape), index, target.copy_, values.dtype), target


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


def test_a_buffer_is_filled_anew_only_after_the_device_has_read_it(tmp_path: Path) -> None:
    """Copies and stores wait on the device for slow ones, while the only thread could already read the next batch."""
    dtypes = (E4M3, torch.uint8, torch.bfloat16)
    saved = {f"t{i}": numbers((1 + i % 3, 1 << 20), dtypes[i // 8 % 3], i) for i in range(64)}
    save_file(saved, tmp_path / "a.safetensors")
    targets = {name: torch.zeros_like(values, device=DEVICE) for name, values in saved.items()}

    def late(name: str, values: torch.Tensor) -> None:
        torch.cuda._sleep(2_000_000)
        targets[name].copy_(values)

    whole = (slice(None), slice(None))
    parts = (part for name, tensor in safetensors_weights(tmp_path, progress=False)
             for part in parts_of(name, tensor, [WeightSlot(tensor.shape, whole, partial(late, name), saved[name].dtype)]))  # fmt: skip
    store_in_threads(Staging(DEVICE).stores(parts), threads=1)
    for name, target in targets.items():
        assert torch.equal(saved[name].view(torch.uint8), target.cpu().view(torch.uint8)), name


def test_cut_and_transposed_parts_arrive_whatever_their_place_in_the_file(tmp_path: Path) -> None:
    """Offsets in the file are odd, so bfloat16 views there are not aligned. One part exceeds the buffer and is not contiguous."""
    whole = [numbers((70 + i, 130 + 2 * i), (torch.bfloat16, torch.float32, E4M3)[i % 3], i) for i in range(48)]
    whole.append(numbers((3 * STAGE_BYTES // 4096, 8192), torch.uint8, 1))
    data = b"".join(b"-" + values.contiguous().view(torch.uint8).numpy().tobytes() for values in whole)
    (tmp_path / "t").write_bytes(data)
    file, offset, parts, expected = WeightFile(tmp_path / "t"), 0, list[Part](), list[tuple[torch.Tensor, torch.Tensor]]()
    for i, values in enumerate(whole):
        in_file = FileTensor(file, values.dtype, offset + 1, tuple(values.shape), row_major(tuple(values.shape)))
        offset += 1 + values.nbytes
        large = i == len(whole) - 1
        cut = (
            (lambda t: t[:, 100:5000])
            if large
            else (lambda t: t[1::2, 3:-5], lambda t: t.t(), lambda t: t[4:9], lambda t: t[:, 7:8])[i % 4]
        )
        want, part = cut(values), cut(in_file)
        target = torch.zeros(want.shape, dtype=want.dtype, device=DEVICE)
        parts.append(Part(f"t{i}", part, WeightSlot(tuple(want.shape), (slice(None),) * 2, target.copy_)))
        expected.append((want, target))
    store_in_threads(Staging(DEVICE).stores(parts))
    for i, (want, target) in enumerate(expected):
        assert torch.equal(want.contiguous().view(torch.uint8), target.cpu().view(torch.uint8)), i
