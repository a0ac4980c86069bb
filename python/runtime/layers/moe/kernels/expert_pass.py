"""The arguments of a pass of tokens through a layer's experts, for GPU kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.layers.moe.kernels.expert_weights import ExpertWeights
from runtime.layers.moe.kernels.gated_act import GatedAct
from runtime.layers.moe.router import Routing


class ExpertPass(NamedTuple):
    """A pass through the experts: `out[t] = sum(weight * down(act(gate(x[t]), up(x[t]))))` over the experts of each token.

    Attributes:
        x: [T, hidden] contiguous.
        gate_up: [E, 2 * I, hidden]: the gate's rows, then the up projection's.
        down: [E, hidden, I].
        routed: the experts of each token.
        out: [T, hidden] contiguous, any float dtype.
        first: id of the first of these E experts; experts of other ranks are skipped.
        pdl: as in `triton_gemm`.
        shared: whether the last expert of each token is the last of these: the one that all tokens use.
        total: number of experts on all ranks; 0 if these are all.
    """

    x: torch.Tensor
    gate_up: ExpertWeights
    down: ExpertWeights
    routed: Routing
    act: GatedAct
    out: torch.Tensor
    first: int = 0
    pdl: bool = False
    shared: bool = False
    total: int = 0

    @property
    def share(self) -> float:
        """The fraction of tokens that choose an expert, on average."""
        return self.routed.ids.shape[1] / (self.total or self.down.shape[0])

    def check(self) -> None:
        """Assert the requirements of all kernels."""
        x, gate_up, down, out = self.x, self.gate_up, self.down, self.out
        (T, hidden), (E, _, inner) = x.shape, down.shape
        assert T > 0, "expected at least one row"
        assert gate_up.shape == (E, 2 * inner, hidden), f"expected gate and up rows {(E, 2 * inner, hidden)}; got {gate_up.shape}"
        assert down.shape[1] == hidden, f"expected a down projection of {hidden} rows; got {down.shape[1]}"
        assert x.is_contiguous(), "expected a contiguous x"
        assert out.is_contiguous(), "expected a contiguous out"
