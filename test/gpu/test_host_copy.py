"""Results that a kernel writes to pinned memory."""

from __future__ import annotations

import pytest
import torch

from runtime.model_executor.staging import HostCopy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(0, 2), (1, 2), (3, 5), (256, 9)])
def test_a_kernel_copies_what_a_copy_engine_copies(shape: tuple[int, int], dtype: torch.dtype) -> None:
    source = torch.randint(1 << 20, shape, device="cuda").to(dtype)
    assert HostCopy(source, by_kernel=True).wait()[0].tolist() == HostCopy(source).wait()[0].tolist() == source.tolist()


def test_the_result_of_earlier_kernels_is_copied_and_not_that_of_later_ones() -> None:
    source, copies = torch.zeros(64, dtype=torch.int32, device="cuda"), list[HostCopy]()
    torch.cuda._sleep(10_000_000)  # the host is ahead
    for _ in range(20):
        source.add_(1)
        copies.append(HostCopy(source, by_kernel=True))
    assert [copy.wait()[0].tolist() for copy in copies] == [[i] * 64 for i in range(1, 21)]
