"""Parts of a checkpoint reach a model's tensors in batches as they do one by one. Here the device is the CPU too."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from runtime.errors import ConfigError
from runtime.layers.quantization.scheme import WeightSlot
from runtime.models.checkpoint_parts import STAGE_BYTES, Part, Staging

CPU = torch.device("cpu")
ELSEWHERE = torch.device("meta")
"""A device that tensors on the host are brought to."""
E4M3 = torch.float8_e4m3fn


def part(values: torch.Tensor, name: str = "t", **rules) -> tuple[Part, torch.Tensor]:
    """A part that is stored into the tensor beside it."""
    target = torch.zeros(values.shape, dtype=values.dtype)
    return Part(name, values, WeightSlot(tuple(values.shape), (slice(None),) * values.dim(), target.copy_, **rules)), target


def mixed(count: int = 60) -> Iterator[torch.Tensor]:
    """Tensors of all dtypes, of sizes that fill buffers unevenly, some of them views as slices of files are."""
    generator = torch.Generator().manual_seed(3)
    for i in range(count):
        rows, columns = 1 + 7 * i % 50, 3 + 5 * i % 64
        whole = torch.randn((2 * rows, columns + 4), generator=generator)
        whole = whole.to((torch.float32, torch.bfloat16, torch.float16, E4M3)[i % 4]) if i % 5 else whole.mul(9).to(torch.uint8)
        yield (whole, whole[::2, 2:-2], whole[:rows].t(), whole[0, :1], whole[0, 0])[i % 3 if i % 7 else 3 + i % 2]


def bits(values: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return values.contiguous().reshape(-1).view(torch.uint8)


def test_parts_arrive_together_as_they_are() -> None:
    parts, targets = zip(*map(part, mixed()), strict=True)
    Staging(CPU).store(parts)
    for each, target in zip(parts, targets, strict=True):
        assert torch.equal(bits(each.values), bits(target)), each.values.shape


def test_numbers_of_an_earlier_batch_between_parts_are_not_checked() -> None:
    staging = Staging(CPU)
    staging.store([part(torch.full((4096,), 255, dtype=torch.uint8))[0]])  # NaN as e4m3, bfloat16 and float32
    for dtype in (E4M3, torch.bfloat16, torch.float32):
        parts, targets = zip(*(part(torch.ones(size).to(dtype), finite=dtype is not E4M3) for size in (3, 5, 1, 9)), strict=True)
        staging.store(parts)
        assert all(torch.equal(bits(target), bits(each.values)) for each, target in zip(parts, targets, strict=True))


@pytest.mark.parametrize("shape", [(9, 3 << 20), (STAGE_BYTES + 5,), (3, STAGE_BYTES - 7), (2, STAGE_BYTES + 1)])
def test_a_part_larger_than_a_buffer_arrives_piece_by_piece(shape: tuple[int, ...]) -> None:
    values = torch.arange(256, dtype=torch.uint8).repeat(-(-torch.Size(shape).numel() // 256))[: torch.Size(shape).numel()].view(shape)
    large, target = part(values)
    Staging(CPU).store([large])
    assert torch.equal(values, target)


def test_batches_fit_the_buffers_and_hold_every_part() -> None:
    sizes = [STAGE_BYTES // 3, STAGE_BYTES // 2, 1, STAGE_BYTES // 4, 2 * STAGE_BYTES, 0, STAGE_BYTES, 17, 16]
    parts = [part(torch.zeros(size, dtype=torch.uint8), str(size))[0] for size in sizes]
    staging, batches = Staging(ELSEWHERE), list[list[Part]]()
    staging.store = lambda batch: batches.append(list(batch))  # pyright: ignore[reportAttributeAccessIssue]
    for store in staging.stores(parts):
        store()
    assert [each for batch in batches for each in batch] == [each for each in parts if each.values.numel()], "in order"
    assert all(len(batch) == 1 or sum(each.space for each in batch) <= STAGE_BYTES for batch in batches)
    assert len(batches) == 5, "and no more of them than needed"


@pytest.mark.parametrize(
    ("values", "rules", "message"),
    [
        (torch.tensor([1.0, torch.nan]), {}, "tensor bad holds NaN"),
        (torch.tensor([1.0, torch.nan]).to(torch.bfloat16), {}, "tensor bad holds NaN"),
        (torch.tensor([0, 127], dtype=torch.uint8).view(E4M3), {}, "tensor bad holds NaN"),
        (torch.tensor([0, 255], dtype=torch.uint8).view(E4M3), {}, "tensor bad holds NaN"),
        (torch.tensor([1.0, -torch.inf]), {"finite": True}, "tensor bad holds infinity"),
        (torch.tensor([1, 9], dtype=torch.uint8), {"largest": 8}, "tensor bad holds 9; at most 8 is supported"),
    ],
)
def test_a_damaged_tensor_of_a_batch_is_named(values: torch.Tensor, rules: dict[str, object], message: str) -> None:
    good = [part(tensor)[0] for tensor in mixed(20)]
    damaged = part(values, "bad", **rules)[0]
    with pytest.raises(ConfigError, match=message):
        Staging(CPU).store([*good, damaged, part(torch.ones(5, dtype=values.dtype), "behind")[0]])
    (store,) = Staging(CPU).stores([damaged])  # it lies on the device already
    with pytest.raises(ConfigError, match=message):
        store()


def test_numbers_that_only_look_bad_together_are_stored() -> None:
    values = [torch.tensor([torch.inf, 1.0]), torch.tensor([-torch.inf]), torch.full((8,), 3e38), torch.full((8,), -3e38)]
    parts, targets = zip(*map(part, values), strict=True)
    Staging(CPU).store(parts)
    assert all(torch.equal(target, each) for target, each in zip(targets, values, strict=True))
    limited, target = part(torch.full((3,), 8, dtype=torch.uint8), largest=8)
    large, other = part(torch.full((3,), 200, dtype=torch.uint8))
    Staging(CPU).store([limited, large])
    assert (int(target.max()), int(other.max())) == (8, 200)


def test_threads_have_buffers_of_their_own() -> None:
    staging, made = Staging(CPU), [list(zip(*map(part, mixed(40)), strict=True)) for _ in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda batch: staging.store(batch[0]), made))
    for parts, targets in made:
        assert all(torch.equal(bits(each.values), bits(target)) for each, target in zip(parts, targets, strict=True))
