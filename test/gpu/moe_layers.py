"""Random sparse layers in each format, and their definition."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from runtime.config.expert_tuning import WeightFormat

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run under Triton's interpreter, on the CPU. Its matrix multiplication supports float16, not bfloat16."""
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class Kind:
    """A format of weights, with the rows and columns of a scale's block or group."""

    format: WeightFormat
    block: tuple[int, int] = (0, 0)
    bias: bool = False

    def columns(self, least: int) -> int:
        """The smallest number of columns from `least` on that the CUDA kernels for few tokens support."""
        multiple = 128 if self.format == "int4" else 1
        return -(-least // multiple) * multiple


KINDS = {
    "dense": Kind("dense"),
    "dense-bias": Kind("dense", bias=True),
    "fp8-block": Kind("fp8", (128, 128)),
    "fp8-half-block": Kind("fp8", (64, 32)),
    "fp8-row": Kind("fp8"),
    "mxfp4": Kind("mxfp4", bias=True),
    "int4": Kind("int4", (1, 128)),
    "int4-32": Kind("int4", (1, 32), bias=True),
}


def weights(kind: Kind, experts: int, rows: int, columns: int):
    """Random `ExpertWeights`, and the float32 weights [E, N, K] that they represent."""
    from runtime.layers.moe.kernels.expert_weights import ExpertWeights

    bias = torch.randn((experts, rows), device=DEVICE).to(DTYPE) if kind.bias else None
    if kind.format == "dense":
        weight = (torch.randn((experts, rows, columns), device=DEVICE) * columns**-0.5).to(DTYPE)
        return ExpertWeights(weight, None, bias), weight.float()
    if kind.format == "mxfp4":
        return _mxfp4(experts, rows, columns, bias)
    if kind.format == "int4":
        return _int4(experts, rows, columns, kind.block[1], bias)
    weight = (torch.randn((experts, rows, columns), device=DEVICE) * 50).to(torch.float8_e4m3fn)
    if kind.block == (0, 0):
        scale = torch.rand((experts, rows), device=DEVICE) * columns**-0.5 / 50
        return ExpertWeights(weight, scale, bias), weight.float() * scale[:, :, None]
    blocks = [-(-size // block) for size, block in zip((rows, columns), kind.block, strict=True)]
    scale = torch.rand((experts, *blocks), device=DEVICE) * columns**-0.5 / 50
    wide = scale.repeat_interleave(kind.block[0], 1)[:, :rows].repeat_interleave(kind.block[1], 2)[:, :, :columns]
    return ExpertWeights(weight, scale, bias), weight.float() * wide


def _mxfp4(experts: int, rows: int, columns: int, bias: torch.Tensor | None):
    from runtime.layers.moe.kernels.expert_weights import ExpertWeights
    from runtime.layers.quantization.mxfp4 import core_matrices, packed

    codes = torch.randint(16, (experts, rows, columns), device=DEVICE, dtype=torch.uint8)
    scale = torch.randint(116, 124, (experts, rows, columns // 32), device=DEVICE, dtype=torch.uint8)
    halves = codes.view(experts, rows, -1, 2, 16)
    stored = core_matrices(packed(halves[:, :, :, 0], halves[:, :, :, 1]))
    values = torch.tensor(E2M1, device=DEVICE)[codes.long()] * torch.exp2(scale.float() - 127).repeat_interleave(32, 2)
    return ExpertWeights(stored, scale, bias), values


def _int4(experts: int, rows: int, columns: int, group: int, bias: torch.Tensor | None):
    from runtime.layers.moe.kernels.expert_weights import ExpertWeights

    codes = torch.randint(16, (experts, rows, columns), device=DEVICE, dtype=torch.uint8)
    halves = codes.view(experts, rows, -1, 2, 16)
    scale = (torch.rand((experts, rows, columns // group), device=DEVICE) + 0.1) * columns**-0.5 / 4
    numbers = torch.stack((scale, torch.randint_like(scale, 16)), dim=3).half()
    each, zero = numbers.float().repeat_interleave(group, 2).unbind(3)
    return ExpertWeights((halves[:, :, :, 0] | halves[:, :, :, 1] << 4).flatten(2), numbers, bias), (codes - zero) * each


def routed(tokens: int, experts: int, top_k: int, hot: int | None = None, shared: int = 0):
    """Random routing, only to the first `hot` experts if it is given. With `shared` 1 the last expert is the shared one."""
    from runtime.layers.moe.router import Routing

    ids = torch.rand((tokens, experts - shared if hot is None else hot), device=DEVICE).argsort(dim=1)[:, :top_k].to(torch.int32)
    ids = torch.nn.functional.pad(ids, (0, shared), value=experts - 1)
    weights = torch.nn.functional.pad(torch.rand((tokens, top_k), device=DEVICE), (0, shared), value=1.0)
    return Routing(ids, weights, masks(ids, experts))


def masks(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """`Routing.masks` of ids [T, k]."""
    words = -(-experts // 32)
    bits = torch.zeros((len(ids), words * 32), dtype=torch.int64, device=ids.device).scatter_(1, ids.long(), 1)
    found = (bits.view(len(ids), words, 32) << torch.arange(32, device=ids.device)).sum(2)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32)


def reference(x, gate_up, down, biases, routing, act, first: int = 0) -> torch.Tensor:
    """The layer in float64, one expert after the other."""
    from runtime.layers.moe.kernels.gated_act import CLAMPED_SWIGLU, GELU_TANH

    out = torch.zeros((len(x), down.shape[1]), dtype=torch.float64, device=x.device)
    for expert in range(len(gate_up)):
        rows, place = (routing.ids == expert + first).nonzero(as_tuple=True)
        sums = x[rows].double() @ gate_up[expert].double().T
        gate, up = (sums if biases[0] is None else sums + biases[0][expert].double()).chunk(2, dim=1)
        if act.kind == CLAMPED_SWIGLU:
            gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
            h = gate * torch.sigmoid(act.alpha * gate) * (up + 1)
        else:
            h = (torch.nn.functional.gelu(gate, approximate="tanh") if act.kind == GELU_TANH else torch.nn.functional.silu(gate)) * up
        y = h @ down[expert].double().T
        y = y if biases[1] is None else y + biases[1][expert].double()
        out.index_add_(0, rows, y * routing.weights[rows, place, None].double())
    return out


def expert_pass(layer: Any, x: torch.Tensor, routing: Any, out: torch.Tensor, **options: Any):
    """A pass through a layer. `options`: `first` and `pdl`."""
    from runtime.layers.moe.kernels.expert_pass import ExpertPass

    return ExpertPass(x, layer.gate_up, layer.down, routing, layer.act, out, **options)


def relative(out: torch.Tensor, want: torch.Tensor) -> float:
    """`‖out - want‖ / ‖want‖`."""
    return float((out.double() - want).norm() / want.norm())
