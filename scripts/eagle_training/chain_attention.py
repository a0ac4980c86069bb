"""Attention of a later draft pass: causal over pass 0, and over the later passes of the query's own base.

A flash-attention kernel computes the first part. Its result is merged with the second part by their log-sum-exp, and its backward kernel
gets the merged output and log-sum-exp, as in ring attention (Liu et al. 2023, arXiv:2310.01889). So no L x L matrix is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
TOLERANCE = 0.03
"""Largest difference between kernel and definition that `kernel_agrees` accepts, relative to the largest value."""


def definition(q: torch.Tensor, first: Pair, own: Sequence[Pair]) -> torch.Tensor:
    """One softmax over both parts, with all scores stored.

    Args:
        q: [B, H, L, head_dim].
        first: keys and values of pass 0, each [B, G, L, head_dim].
        own: those of the later passes, the current one last.

    Returns:
        [B, H, L, head_dim].
    """
    k, v = first
    B, G, L, size = k.shape
    grouped = q.reshape(B, G, -1, L, size) * size**-0.5  # [B, G, R, L, size]
    beyond = torch.ones((L, L), dtype=torch.bool, device=q.device).triu(1)
    scores = (grouped.flatten(2, 3) @ k.transpose(-1, -2)).view(B, G, -1, L, L).float().masked_fill(beyond, -torch.inf)
    later = torch.stack([(grouped * key[:, :, None]).sum(-1) for key, _ in own], dim=-1).float()
    weights = torch.cat([scores, later], dim=-1).softmax(-1).to(v.dtype)
    out = (weights[..., :L].flatten(2, 3) @ v).view(B, G, -1, L, size)
    for j, (_, value) in enumerate(own):
        out = out + weights[..., L + j, None] * value[:, :, None]
    return out.flatten(1, 2)


def chain_attention(q: torch.Tensor, first: Pair, own: Sequence[Pair]) -> torch.Tensor:
    """The same as `definition`, with the flash-attention kernel."""
    groups = q.shape[1] // first[0].shape[1]
    wide = [tensor.repeat_interleave(groups, 1) for pair in (first, *own) for tensor in pair]
    return _ChainAttention.apply(q.contiguous(), *wide)  # type: ignore[return-value]


def kernel_agrees(q_heads: int, kv_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `chain_attention` agrees with `definition` on this device, forward and backward, on random values."""
    g = torch.Generator().manual_seed(0)

    def random(heads: int) -> torch.Tensor:
        return torch.randn((2, heads, 96, head_dim), generator=g).to(device, dtype).requires_grad_()

    q, tensors = random(q_heads), [random(kv_heads) for _ in range(6)]
    pairs = list(zip(tensors[::2], tensors[1::2], strict=True))
    wanted = torch.randn(q.shape, generator=g).to(device, dtype)
    found = []
    for attention in (definition, chain_attention):
        try:
            out = attention(q, pairs[0], pairs[1:])
            found.append([out.detach(), *torch.autograd.grad(out, [q, *tensors], wanted)])
        except (RuntimeError, TypeError) as error:
            print(f"the flash-attention kernel cannot be used: {error}")
            return False
    return all(float((a - b).float().abs().max()) <= TOLERANCE * float(a.float().abs().max()) for a, b in zip(*found, strict=True))


class _ChainAttention(torch.autograd.Function):
    """All tensors [B, H, L, head_dim]: q, then keys and values of pass 0 and of each later pass."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *own: torch.Tensor) -> torch.Tensor:
        with torch.autocast(q.device.type, enabled=False):
            scale = q.shape[-1] ** -0.5
            out, lse, state = _flash(q, k, v, scale)
            scores = torch.stack([(q.float() * key.float()).sum(-1) for key in own[::2]], dim=-1) * scale
            total = torch.logaddexp(lse, scores.logsumexp(-1))
            shares = (scores - total[..., None]).exp()
            merged = (lse - total).exp()[..., None] * out.float()
            for j, value in enumerate(own[1::2]):
                merged = merged + shares[..., j, None] * value.float()
            merged = merged.to(q.dtype)
        ctx.state, ctx.scale = state, scale
        ctx.save_for_backward(q, k, v, merged, total, shares, *own)
        return merged

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, merged, total, shares, *own = ctx.saved_tensors
        grad = grads[0].to(q.dtype).contiguous()
        grad_q, grad_k, grad_v = _flash_backward(grad, q, k, v, merged, total, ctx.state, ctx.scale)
        wide, found = grad.float(), []
        common = (wide * merged.float()).sum(-1)
        grad_q = grad_q.float()
        for j, (key, value) in enumerate(zip(own[::2], own[1::2], strict=True)):
            share = shares[..., j]
            slope = (share * ((wide * value.float()).sum(-1) - common) * ctx.scale)[..., None]
            grad_q = grad_q + slope * key.float()
            found += [(slope * q.float()).to(key.dtype), (share[..., None] * wide).to(value.dtype)]
        return grad_q.to(q.dtype), grad_k, grad_v, *found


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """Causal attention: the output, its log-sum-exp float32 [B, H, L], and the further inputs of the backward kernel."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        return out, lse, []
    out, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)
    return out, lse, rest[:-1]


def _flash_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, state: list[Any],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    aten = torch.ops.aten
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True, scale=scale)
    q_starts, k_starts, q_most, k_most, seed, offset = state
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, q_starts, k_starts, q_most, k_most, 0.0, True, seed, offset, scale=scale
    )
