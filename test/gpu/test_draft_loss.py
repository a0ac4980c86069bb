"""The loss kernel of draft training against its definition: on a GPU, or under Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from eagle_training.chain_attention import kernel_agrees
from eagle_training.loss import Teacher, compare, cross_entropy
from eagle_training.loss_kernel import compare_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")]


@pytest.mark.parametrize(("rows", "width"), [(3, 40), (5, 256), (2, 8192)])
def test_the_kernel_computes_the_loss_and_its_gradient(rows: int, width: int) -> None:
    g = torch.Generator().manual_seed(width)
    scores, taught = (torch.randn((rows, width), generator=g) * 3 for _ in range(2))
    best = torch.randint(0, width, (rows,), generator=g)
    best[1] = -1
    expected = compare(scores, taught, best, 0.3)
    found = compare_rows(scores.clone().to(DEVICE), taught.to(DEVICE), best.to(DEVICE), 0.3)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_training_in_bfloat16_on_a_gpu_is_near_float32_on_a_cpu() -> None:
    g = torch.Generator().manual_seed(0)
    x, weight, hidden, head = (torch.randn(shape, generator=g) for shape in ((70, 64), (256, 64), (70, 64), (256, 64)))
    best = torch.randint(-1, 256, (70,), generator=g)
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        leaves = [tensor.to(device).requires_grad_() for tensor in (x, weight)]
        teacher = Teacher(hidden.to(device, dtype), head.to(device, dtype), best.to(device))
        loss, _ = cross_entropy(*leaves, teacher, 0.3, dtype, 32)
        found.append([one.detach().float().cpu() for one in (loss, *torch.autograd.grad(loss, leaves))])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.1)


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_chain_attention_takes_the_kernel_on_a_gpu() -> None:
    assert kernel_agrees(9, 3, 64, DEVICE, torch.bfloat16)
