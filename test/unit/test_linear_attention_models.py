"""Qwen 3.5 and Qwen3-Next: long prompts, published forms of their tensors, several ranks, and files that are refused."""

from __future__ import annotations

import torch

from runtime.layers.torch_ops import TorchOps


def test_a_gate_gives_a_row_the_same_bits_in_every_batch() -> None:
    x, gate = torch.randn(7, 12), torch.randn(7, 12)
    together = TorchOps().gate(x.clone(), gate)
    torch.testing.assert_close(together, x * gate.sigmoid())
    for i in range(7):
        assert torch.equal(TorchOps().gate(x[i : i + 1].clone(), gate[i : i + 1]), together[i : i + 1])
    assert torch.equal(TorchOps().gate(torch.ones(1, 2), torch.tensor([[-200.0, 200.0]])), torch.tensor([[0.0, 1.0]]))
