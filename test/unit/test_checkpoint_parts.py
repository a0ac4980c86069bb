"""Parts of a checkpoint reach a model's tensors in batches as they do one by one. Here the device is the CPU too."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from runtime.errors import ConfigError
from runtime.layers.quantization.scheme import AtMost, Joint, WeightSlot
from runtime.models.checkpoint_parts import STAGE_BYTES, Part, Staging
from runtime.models.file_tensor import FileTensor, WeightFile, row_major

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
Batch = list[tuple[Part, FileTensor]]


def in_file(tensors: Sequence[torch.Tensor], path: Path) -> list[FileTensor]:
    """The tensors, which are written to a file without gaps, behind bytes that are no part of them."""
    found, offset = list[FileTensor](), 24
    path.write_bytes(bytes(offset) + b"".join(bits(tensor).numpy().tobytes() for tensor in tensors))
    file = WeightFile(path)
    for tensor in tensors:
        shape = tuple(tensor.shape)
        found.append(FileTensor(file, tensor.dtype, offset, shape, row_major(shape)))
        offset += tensor.nbytes
    return found


def parts_of_file(values: Sequence[torch.Tensor | FileTensor], **rules) -> tuple[Batch, list[torch.Tensor]]:
    """Parts of a file that are stored into the tensors beside them."""
    batch, targets = Batch(), list[torch.Tensor]()
    for i, each in enumerate(values):
        assert isinstance(each, FileTensor)
        targets.append(torch.zeros(each.shape, dtype=each.dtype))
        slot = WeightSlot(each.shape, (slice(None),) * len(each.shape), targets[-1].copy_, **rules)
        batch.append((Part(f"t{i}", each, slot), each))
    return batch, targets


def whole_and_views(path: Path, count: int = 60) -> tuple[list[torch.Tensor], list[FileTensor]]:
    """Tensors of all dtypes, of sizes that fill buffers unevenly, some of them cut or transposed; the same in a file."""
    generator, tensors, views = torch.Generator().manual_seed(3), list[torch.Tensor](), []
    for i in range(count):
        rows, columns = 1 + 7 * i % 50, 3 + 5 * i % 64
        whole = torch.randn((2 * rows, columns + 4), generator=generator)
        dtype = (torch.float32, torch.bfloat16, torch.float16, E4M3)[i % 4]
        tensors.append(whole.to(dtype) if i % 5 else whole.mul(9).to(torch.uint8))
        cut = [lambda t: t, lambda t: t[::2, 2:-2], lambda t, n=rows: t[:n].t(), lambda t: t[0, :1], lambda t: t[0, 0]]
        views.append(cut[i % 3 if i % 7 else 3 + i % 2])
    files = in_file(tensors, path)
    return [view(each) for view, each in zip(views, tensors, strict=True)], [view(each) for view, each in zip(views, files, strict=True)]


def bits(values: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return values.contiguous().reshape(-1).view(torch.uint8)


def test_parts_arrive_together_as_they_are(tmp_path: Path) -> None:
    expected, files = whole_and_views(tmp_path / "t")
    batch, targets = parts_of_file(files)
    Staging(CPU).store(batch)
    for each, target in zip(expected, targets, strict=True):
        assert torch.equal(bits(each), bits(target)), each.shape


def test_numbers_of_an_earlier_batch_between_parts_are_not_checked(tmp_path: Path) -> None:
    staging = Staging(CPU)
    staging.store(parts_of_file(in_file([torch.full((4096,), 255, dtype=torch.uint8)], tmp_path / "nan"))[0])  # NaN as any float
    for dtype in (E4M3, torch.bfloat16, torch.float32):
        expected = [torch.ones(size).to(dtype) for size in (3, 5, 1, 9)]
        batch, targets = parts_of_file(in_file(expected, tmp_path / str(dtype)), finite=dtype is not E4M3)
        staging.store(batch)
        assert all(torch.equal(bits(target), bits(each)) for each, target in zip(expected, targets, strict=True))


@pytest.mark.parametrize("shape", [(9, 3 << 20), (STAGE_BYTES + 5,), (3, STAGE_BYTES - 7), (2, STAGE_BYTES + 1)])
def test_a_part_larger_than_a_buffer_arrives(shape: tuple[int, ...], tmp_path: Path) -> None:
    values = torch.arange(256, dtype=torch.uint8).repeat(-(-torch.Size(shape).numel() // 256))[: torch.Size(shape).numel()].view(shape)
    large, (target,) = parts_of_file(in_file([values], tmp_path / "t"))
    Staging(CPU).store(large)
    assert torch.equal(values, target)


def test_batches_fit_the_buffers_and_hold_every_part(tmp_path: Path) -> None:
    sizes = [STAGE_BYTES // 3, STAGE_BYTES // 2, 1, STAGE_BYTES // 4, 2 * STAGE_BYTES, 0, STAGE_BYTES, 17, 16]
    wanted, _ = parts_of_file(in_file([torch.zeros(size, dtype=torch.uint8) for size in sizes], tmp_path / "t"))
    staging, batches = Staging(CPU), list[Batch]()
    staging.store = lambda batch: batches.append(list(batch))  # pyright: ignore[reportAttributeAccessIssue]
    for store in staging.stores(part for part, _ in wanted):
        store()
    assert [each for batch in batches for each in batch] == [each for each in wanted if each[1].nbytes], "in order"
    assert all(len(batch) == 1 or sum(-(-values.nbytes // 16) * 16 for _, values in batch) <= STAGE_BYTES for batch in batches)
    assert len(batches) == 5, "and no more of them than needed"


@pytest.mark.parametrize(
    ("values", "rules", "message"),
    [
        (torch.tensor([1.0, torch.nan]), {}, "tensor bad holds NaN"),
        (torch.tensor([1.0, torch.nan]).to(torch.bfloat16), {}, "tensor bad holds NaN"),
        (torch.tensor([0, 127], dtype=torch.uint8).view(E4M3), {}, "tensor bad holds NaN"),
        (torch.tensor([0, 255], dtype=torch.uint8).view(E4M3), {}, "tensor bad holds NaN"),
        (torch.tensor([1.0, -torch.inf]), {"finite": True}, "tensor bad holds infinity"),
        (torch.tensor([1, 9], dtype=torch.uint8), {"rule": AtMost(8)}, "tensor bad holds 9; at most 8 is supported"),
    ],
)
def test_a_damaged_tensor_of_a_batch_is_named(values: torch.Tensor, rules: dict[str, object], message: str, tmp_path: Path) -> None:
    good, _ = parts_of_file(whole_and_views(tmp_path / "good", 20)[1])
    slot = WeightSlot((2,), (slice(None),), torch.zeros(2, dtype=values.dtype).copy_, **rules)
    bad, behind = in_file([values, torch.ones(5, dtype=values.dtype)], tmp_path / "bad")
    with pytest.raises(ConfigError, match=message):
        Staging(CPU).store([*good, (Part("bad", bad, slot), bad), *parts_of_file([behind])[0]])
    (store,) = Staging(CPU).stores([Part("bad", values, slot)])  # in memory already
    with pytest.raises(ConfigError, match=message):
        store()


def test_numbers_that_only_look_bad_together_are_stored(tmp_path: Path) -> None:
    expected = [torch.tensor([torch.inf, 1.0]), torch.tensor([-torch.inf]), torch.full((8,), 3e38), torch.full((8,), -3e38)]
    batch, targets = parts_of_file(in_file(expected, tmp_path / "t"))
    Staging(CPU).store(batch)
    assert all(torch.equal(target, each) for target, each in zip(targets, expected, strict=True))
    few, many = in_file([torch.full((3,), 8, dtype=torch.uint8), torch.full((3,), 200, dtype=torch.uint8)], tmp_path / "limit")
    limited, (target,) = parts_of_file([few], rule=AtMost(8))
    free, (other,) = parts_of_file([many])
    Staging(CPU).store([*limited, *free])
    assert (int(target.max()), int(other.max())) == (8, 200)


def test_parts_of_one_shape_and_conversion_are_converted_together(tmp_path: Path) -> None:
    calls = list[tuple[int, ...]]()

    def negated(parts: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(parts.shape))
        return -parts

    def halved(parts: torch.Tensor) -> torch.Tensor:
        return parts / 2

    expected = [torch.randn(shape) for shape in [(3, 5)] * 6 + [(5, 3)] * 2 + [(4, 5), (2, STAGE_BYTES // 4)]]
    files = in_file(expected, tmp_path / "t")
    expected[6:8], files[6:8] = [each.t() for each in expected[6:8]], [each.t() for each in files[6:8]]
    batch, targets = Batch(), [torch.zeros(values.shape) for values in expected]
    for i, (values, target) in enumerate(zip(files, targets, strict=True)):
        joint = None if i == 0 else Joint(halved if i in (2, 3) else negated, target.copy_)
        slot = WeightSlot(values.shape, (slice(None),) * 2, target.copy_, joint=joint)
        batch.append((Part(f"t{i}", values, slot), values))
    for store in Staging(CPU).stores(part for part, _ in batch):
        store()
    for i, (target, values) in enumerate(zip(targets, expected, strict=True)):
        assert torch.equal(target, values if i in (0, 9) else values / 2 if i in (2, 3) else -values), i
    assert sorted(calls) == [(1, 4, 5), (2, 3, 5), (3, 3, 5)], "one larger than a buffer is stored by `put`"


def test_threads_have_buffers_of_their_own(tmp_path: Path) -> None:
    staging = Staging(CPU)
    expected, files = whole_and_views(tmp_path / "t", 40)
    made = [parts_of_file(files) for _ in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda batch: staging.store(batch[0]), made))
    for _, targets in made:
        assert all(torch.equal(bits(each), bits(target)) for each, target in zip(expected, targets, strict=True))


def test_a_file_that_ends_early_is_damaged(tmp_path: Path) -> None:
    batch, _ = parts_of_file(in_file([torch.ones(8), torch.ones(8)], tmp_path / "t"))
    (tmp_path / "t").write_bytes((tmp_path / "t").read_bytes()[:-20])
    with pytest.raises(ConfigError, match="damaged or truncated: it ends before byte"):
        Staging(CPU).store(batch)


def test_one_read_fills_more_buffers_than_a_system_call(tmp_path: Path) -> None:
    expected = [torch.tensor([i], dtype=torch.int16) for i in range(5000)]
    batch, targets = parts_of_file(in_file(expected, tmp_path / "t"))
    Staging(CPU).store(batch)
    assert torch.equal(torch.cat(targets), torch.cat(expected))
