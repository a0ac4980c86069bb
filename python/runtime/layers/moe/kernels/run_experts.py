"""Runs the experts of a sparse MLP on a GPU, by the kernels for few or for many tokens."""

from __future__ import annotations

import torch

from runtime.config.expert_tuning import ExpertTuning
from runtime.config.kernel_configs import StepConfig
from runtime.layers.gemm.deferred_norm import DeferredNorm
from runtime.layers.moe.kernels.expert_pass import ExpertPass
from runtime.layers.moe.kernels.few_rows import experts_in_triton
from runtime.layers.moe.kernels.fragment_rows import experts_by_fragments, supports
from runtime.layers.moe.kernels.grouped_gemm import experts_by_wgmma
from runtime.layers.moe.kernels.grouped_gemm import supports as takes_wgmma
from runtime.layers.moe.kernels.many_rows import Added, experts_many_rows
from runtime.layers.moe.kernels.widened_experts import supports as takes_widened
from runtime.layers.moe.kernels.widened_experts import widened_experts


def run_experts(experts: ExpertPass, tuning: ExpertTuning, added: Added | None = None) -> torch.Tensor:
    """Run the pass; returns its `out`.

    `added`: adds the sums to `out`, the float32 residual stream; only for token counts above the limits of the kernels for few tokens.
    """
    x, gate_up, down, routed, act, out, *_ = experts
    few = tuning.few_rows(gate_up.format, len(x))
    if few is not None:
        assert added is None, "few rows are added by `experts_few_rows`"
        return experts_few_rows(experts, few)
    pairs = tuning.widened_pairs(gate_up.format, len(x), experts.share)
    if pairs and takes_widened(x, gate_up, down, act, pairs):
        return widened_experts(experts, pairs, added)
    if len(x) <= tuning.most_streamed[gate_up.format] and supports(x, gate_up, down, routed.ids.shape[1]):
        if added is not None and added.addend is not None:
            out.add_(added.addend)
        return experts_by_fragments(experts, add=added is not None)
    wgmma = tuning.wgmma_rows(gate_up.format, len(x))
    if wgmma is not None and takes_wgmma(x, gate_up, down, wgmma):
        return experts_by_wgmma(experts, wgmma, added)
    return experts_many_rows(experts, tuning.many_rows(gate_up.format, len(x)), added)


def experts_few_rows(
    experts: ExpertPass, configs: tuple[StepConfig, StepConfig], *, add: bool = False, deferred: DeferredNorm | None = None
) -> torch.Tensor:
    """Like `experts_in_triton`, but by `experts_by_fragments`, which does not use `configs`, if that supports the arguments."""
    if supports(experts.x, experts.gate_up, experts.down, experts.routed.ids.shape[1], deferred):
        return experts_by_fragments(experts, add=add, deferred=deferred)
    return experts_in_triton(experts, configs, add=add, deferred=deferred)
