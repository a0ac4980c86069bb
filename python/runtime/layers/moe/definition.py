"""Routing and experts in plain torch: the reference for all other implementations, and the implementation for CPUs."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from runtime.layers.activation import gated
from runtime.layers.moe.experts import Experts
from runtime.layers.moe.router import Router, Routing

TINY = 1e-20
"""Added to the sum of sigmoid weights, because all of them may be zero."""

WORD = 32
"""Bits of a word of a mask."""


def route(x: torch.Tensor, router: Router) -> Routing:
    """Choose the `top_k` experts of each row of `x` [T, hidden], best first; of equal scores the smaller id. A stacked shared expert
    follows. Does not synchronise with the device.

    Source: Shazeer et al. 2017, arXiv:1701.06538; groups scored by their best expert: DeepSeek-V2, arXiv:2405.04434; by their two best,
    with correction bias: DeepSeek-V3, arXiv:2412.19437.
    """
    rule = router.rule
    logits = row_products(x, router.weight)
    logits = logits if router.bias is None else logits + router.bias.float()
    scores = {"softmax": lambda: logits.softmax(dim=1), "sigmoid": lambda: sigmoid(logits), "topk_softmax": lambda: logits}[rule.scoring]()
    choice = scores if router.correction_bias is None else scores + router.correction_bias
    if rule.num_groups > 1:
        choice = _within_best_groups(choice, rule.num_groups, rule.top_groups, rule.group_best)
    ids = choice.sort(dim=1, descending=True, stable=True).indices[:, : rule.top_k]
    weights = scores.gather(1, ids)
    if rule.scoring == "topk_softmax":
        weights = weights.softmax(dim=1)
    elif rule.renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + TINY)
    ids, weights = F.pad(ids, (0, rule.shared), value=router.num_experts), F.pad(weights * rule.scaling, (0, rule.shared), value=1.0)
    masks, kept = masks_of(ids, router.num_experts + rule.shared), router.kept_masks(len(x))
    return Routing(ids.to(torch.int32), weights, masks if kept is None else kept.copy_(masks))


def row_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [T, hidden] times `weight` [n, hidden] in float32, [T, n]. On a CPU it runs one GEMM per row, because in a GEMM of all rows
    the order of a row's sums depends on the number of rows.
    """
    x, columns = x.float(), weight.float().t()
    if x.device.type != "cpu":
        return x @ columns
    return torch.bmm(x[:, None], columns.expand(len(x), -1, -1))[:, 0]


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The sigmoid of float32 `x`, computed in float64, because in float32 a CPU rounds the last elements of a tensor differently."""
    return x.double().sigmoid().float()


def masks_of(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """`Routing.masks` of ids [T, k]."""
    words = torch.arange(-(-num_experts // WORD), device=ids.device)
    bits = torch.where(ids[:, :, None] // WORD == words, 1 << (ids[:, :, None].to(torch.int64) % WORD), 0).sum(dim=1)
    return torch.where(bits >= 1 << (WORD - 1), bits - (1 << WORD), bits).to(torch.int32)


def _within_best_groups(choice: torch.Tensor, num_groups: int, top_groups: int, group_best: int) -> torch.Tensor:
    """`choice` [T, E], -inf outside the best groups: those with the largest sum of their `group_best` best entries."""
    grouped = choice.view(len(choice), num_groups, -1)
    score = grouped.topk(min(group_best, grouped.shape[2]), dim=2).values.sum(dim=2)
    best = score.sort(dim=1, descending=True, stable=True).indices[:, :top_groups]
    kept = torch.zeros_like(score, dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~kept[:, :, None], float("-inf")).view_as(choice)


def run_experts(x: torch.Tensor, experts: Experts, routing: Routing, in_prompt: bool = False) -> torch.Tensor:
    """The weighted sum of the outputs of each row's experts on this rank: float32 [T, hidden].

    Runs the selected experts one after another; synchronises with the device.
    """
    out = torch.zeros((len(x), experts.size[0]), dtype=torch.float32, device=x.device)
    for expert in routing.ids.unique().tolist():
        own = int(expert) - experts.first
        if not 0 <= own < experts.count:
            continue
        rows, place = (routing.ids == expert).nonzero(as_tuple=True)
        result = run_expert(x[rows], experts, own, in_prompt)
        out.index_add_(0, rows, result.float() * routing.weights[rows, place, None])
    return out


def run_expert(x: torch.Tensor, experts: Experts, own: int, in_prompt: bool = False) -> torch.Tensor:
    """`down(activation(gate(x)) * up(x))` of one expert: [T, hidden] -> [T, hidden], a partial sum if the expert is sharded."""
    scheme = experts.scheme
    biases = [None if bias is None else bias[own] for bias in (experts.gate_up_bias, experts.down_bias)]
    inner = gated(experts.activation, scheme.matmul(x, experts.gate_up.at(own), biases[0], in_prompt))
    return scheme.matmul(inner, experts.down.at(own), biases[1], in_prompt)
