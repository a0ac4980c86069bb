"""Experts by torch's grouped GEMM, for a GPU without kernels of ours for the weights' format. Never reads the device."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from runtime.layers.activation import gated
from runtime.layers.moe.experts import Experts
from runtime.layers.moe.router import Routing
from runtime.layers.quantization.scheme import Storage


def grouped_experts(x: torch.Tensor, experts: Experts, routing: Routing) -> torch.Tensor:
    """The definition's `run_experts`, with rows sorted by expert: [T, hidden] in the dtype of `x`."""
    top_k, own = routing.ids.shape[1], routing.ids.flatten() - experts.first
    held = (own >= 0) & (own < experts.count)
    keys, order = torch.where(held, own, experts.count).sort(stable=True)
    ends = torch.searchsorted(keys, torch.arange(experts.count, dtype=keys.dtype, device=x.device), right=True, out_int32=True)
    expert = keys.clamp(max=experts.count - 1)

    def multiply(rows: torch.Tensor, storage: Storage, bias: torch.Tensor | None) -> torch.Tensor:
        out = F.grouped_mm(rows, experts.scheme.dequantize(storage, x.dtype).transpose(1, 2), offs=ends)
        return out if bias is None else out + bias[expert]

    inner = gated(experts.activation, multiply(x[order // top_k], experts.gate_up, experts.gate_up_bias))
    sorted_rows = multiply(inner, experts.down, experts.down_bias)
    rows = torch.empty_like(sorted_rows).index_copy_(0, order, sorted_rows).view(len(x), top_k, -1)
    weighted = rows.float() * routing.weights[:, :, None]
    return torch.where(held.view(len(x), top_k, 1), weighted, 0.0).sum(dim=1).to(x.dtype)  # rows of others' experts are not written
