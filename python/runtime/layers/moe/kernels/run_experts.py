"""The experts of a sparse MLP on a GPU: with the kernels for few tokens or for many."""

from __future__ import annotations

import torch

from runtime.config.expert_tuning import ExpertTuning
from runtime.config.kernel_configs import StepConfig
from runtime.layers.gemm.deferred_norm import DeferredNorm
from runtime.layers.moe.kernels.expert_weights import ExpertWeights
from runtime.layers.moe.kernels.few_rows import experts_in_triton
from runtime.layers.moe.kernels.fragment_rows import experts_by_fragments, supports
from runtime.layers.moe.kernels.gate import GatedAct
from runtime.layers.moe.kernels.grouped_gemm import experts_by_wgmma
from runtime.layers.moe.kernels.grouped_gemm import supports as takes_wgmma
from runtime.layers.moe.kernels.many_rows import Added, experts_many_rows
from runtime.layers.moe.kernels.widened_experts import supports as takes_widened
from runtime.layers.moe.kernels.widened_experts import widened_experts
from runtime.layers.moe.router import Routing


def run_experts(
    x: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    routed: Routing,
    act: GatedAct,
    tuning: ExpertTuning,
    out: torch.Tensor,
    *,
    first: int = 0,
    added: Added | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`out[t] = sum(weight * down(act(gate(x[t]), up(x[t]))))` over the experts of each token; returns `out`.

    Args:
        x: [T, hidden] contiguous.
        gate_up: [E, 2 * I, hidden]: the gate's rows, then the up projection's.
        down: [E, hidden, I].
        out: [T, hidden] contiguous, any float dtype.
        added: `out` is the residual stream, float32, and gets the sums; for numbers of tokens that `tuning` has for many rows.
        first: id of the first of these E experts; tokens' other experts are left out.
        pdl: as in `triton_gemm`.
    """
    few = tuning.few_rows(gate_up.format, len(x))
    if few is not None:
        assert added is None, "few rows are added by `experts_few_rows`"
        return experts_few_rows(x, gate_up, down, routed, act, few, out, first=first, pdl=pdl)
    pairs = tuning.widened_pairs(gate_up.format, len(x))
    if pairs and takes_widened(x, gate_up, down, act, pairs):
        return widened_experts(x, gate_up, down, routed, act, pairs, out, first=first, added=added, pdl=pdl)
    if len(x) <= tuning.most_streamed[gate_up.format] and supports(x, gate_up, down, routed.ids.shape[1]):
        if added is not None and added.beside is not None:
            out.add_(added.beside)
        return experts_by_fragments(x, gate_up, down, routed, act, out, first=first, add=added is not None, pdl=pdl)
    wgmma = tuning.wgmma_rows(gate_up.format, len(x))
    if wgmma is not None and takes_wgmma(x, gate_up, down, wgmma):
        return experts_by_wgmma(x, gate_up, down, routed, act, wgmma, out, first=first, added=added, pdl=pdl)
    config = tuning.many_rows(gate_up.format, len(x))
    return experts_many_rows(x, gate_up, down, routed, act, config, out, first=first, added=added, pdl=pdl)


def experts_few_rows(
    x: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    routed: Routing,
    act: GatedAct,
    configs: tuple[StepConfig, StepConfig],
    out: torch.Tensor,
    *,
    first: int = 0,
    add: bool = False,
    deferred: DeferredNorm | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`experts_in_triton`, by tensor core fragments where those kernels can; they do not read `configs`."""
    if supports(x, gate_up, down, routed.ids.shape[1], deferred):
        return experts_by_fragments(x, gate_up, down, routed, act, out, first=first, add=add, deferred=deferred, pdl=pdl)
    return experts_in_triton(x, gate_up, down, routed, act, configs, out, first=first, add=add, deferred=deferred, pdl=pdl)
