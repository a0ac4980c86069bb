"""`TorchGroup` over gloo in processes, against the definition of each exchange."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from runtime.distributed.parallel_group import Shard
from runtime.distributed.rendezvous import Rendezvous
from runtime.distributed.torch_group import TorchGroup

SIZE, PATIENCE = 2, 60.0


def part(rank: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank contributes: small whole numbers, whose sums are exact."""
    return torch.randint(-9, 9, (rows, columns), generator=torch.Generator().manual_seed(rank)).to(dtype)


def check(rank: int, folder: str) -> None:
    """The process of a rank."""
    torch.set_num_threads(1)
    group = TorchGroup.join(Rendezvous.in_folder(folder), rank, SIZE, PATIENCE)
    assert group.agree(rank) == 0
    assert group.gather(rank) == list(range(SIZE))
    for dtype in (torch.float32, torch.bfloat16):
        parts = [part(index, 2 * SIZE, 6, dtype) for index in range(SIZE)]
        own, total = parts[rank], sum(parts)
        assert isinstance(total, torch.Tensor)
        assert torch.equal(group.all_reduce(own.clone()), total)
        assert torch.equal(group.all_reduce(own.clone()[:, 2:5]), total[:, 2:5])
        assert torch.equal(group.all_reduce(own.t().clone().t()), total)
        assert torch.equal(group.scatter_sum(own.clone()), total.chunk(SIZE)[rank])
        assert torch.equal(group.gather_rows(own[:, 2:5]), torch.cat(parts)[:, 2:5])
        for columns in (5, 6):
            shard = Shard(rank, SIZE).of(columns)
            assert torch.equal(group.gather_columns(parts[0][:, shard], columns), parts[0][:, :columns])
    dist.destroy_process_group()  # else a thread of torch may call std::terminate when the other process ends first


def test_exchanges_of_processes_are_what_they_are_defined_as(tmp_path: Path) -> None:
    folder = tmp_path / "a#b?c d%20"  # no URL of a file
    folder.mkdir()
    spawn(check, (str(folder),), SIZE)
    assert list(tmp_path.iterdir()) == [folder]
