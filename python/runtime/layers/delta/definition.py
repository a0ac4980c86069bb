"""The gated delta rule with its convolution and gates, in torch operations. It defines the results; a CPU runs it.

Source: Yang et al. 2024, arXiv:2412.06464. For each value head, with state S [key_dim, value_dim], decay a and rate b in (0, 1):

    S = a * S;  S = S + k (b * (v - k^T S))^T;  o = S^T q

q, k and v come from a causal convolution over the last tokens of each channel, then SiLU. q and k are normed to length 1, and q is divided
by sqrt(key_dim).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from runtime.layers.delta.heads import DeltaHeads
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.state_pool import LayerStates, StatePass

CHUNK = 64
"""Tokens of a prompt that are applied to the state together."""
NORM_EPS = 1e-6


class Tokens(NamedTuple):
    """n tokens of each of B requests, float32: queries and keys [B, n, H, key_dim], values [B, n, H, value_dim], and the logarithm of the
    decay and the rate, [B, n, H].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor

    def part(self, tokens: slice) -> Tokens:
        """Some of the tokens of all requests."""
        return Tokens(*(tensor[:, tokens] for tensor in self))


def delta_rule(
    rows: torch.Tensor, gates: torch.Tensor, heads: DeltaHeads, layer: int, states: StatePass, batch: ForwardBatch
) -> torch.Tensor:
    """The outputs of linear attention; applies or stores the tokens in the states of `layer`. Reads lengths on the host.

    Args:
        rows: [T, C], queries, keys and values before the convolution.
        gates: [T, 2 * H], the inputs of each head's rate, then of its decay.

    Returns:
        [T, H * value_dim], the dtype of `rows`.
    """
    own, both = states.layers[layer], gate_values(gates, heads)
    if batch.tokens_per_req and batch.tokens_per_req <= own.window_width:
        width = batch.tokens_per_req
        out = _windows(rows.unflatten(0, (-1, width)), both.unflatten(0, (-1, width)), heads, own, states, slice(0, batch.batch_size))
        return out.flatten(0, 1)
    assert batch.extend_lens is not None, "prompts have lengths on the host"
    outputs, start = list[torch.Tensor](), 0
    for i, count in enumerate(batch.extend_lens.tolist()):
        if not count:  # an unused place of a pass of several prompts
            continue
        tokens = slice(start, start + count)
        run = _windows if count <= own.window_width else _prompt
        outputs.append(run(rows[None, tokens], both[None, tokens], heads, own, states, slice(i, i + 1))[0])
        start += count
    return torch.cat(outputs)


def gate_values(gates: torch.Tensor, heads: DeltaHeads) -> torch.Tensor:
    """float32 [T, 2, H]: the logarithm of the decay, and the rate, from their inputs [T, 2 * H]."""
    rate, decay = (part.contiguous() for part in gates.float().chunk(2, dim=1))
    decay = decay + heads.decay_bias
    # Torch's own softplus and sigmoid round the last entries of a tensor differently, so that a token would depend on the others.
    softplus = decay.clamp(min=0.0) + decay.abs().neg_().exp_().log1p_()
    return torch.stack([-heads.decay_log.exp() * softplus, 1.0 / (1.0 + rate.neg().exp_())], dim=1)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The RMS norm of each head times SiLU of its gate: x and gate [T, H * dim], weight [dim] -> [T, H * dim], the dtype of x."""
    heads, gates = (tensor.float().unflatten(1, (-1, len(weight))) for tensor in (x, gate))
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (normed * F.silu(gates)).flatten(1).to(x.dtype)


def _windows(
    rows: torch.Tensor, gates: torch.Tensor, heads: DeltaHeads, own: LayerStates, states: StatePass, requests: slice
) -> torch.Tensor:
    """Outputs [B, n, H * value_dim] of windows [B, n, C] with gates [B, n, 2, H]: applies what is pending, stores the windows."""
    at, pending = states.rows[requests], states.pending[requests]
    matrices, tail = _start(own, states, requests)
    most, width, before = int(pending.max()), rows.shape[1], tail.shape[1]
    # The inputs of each request without gaps: its tail, its pending tokens, its window.
    numbers = torch.arange(before + most + width, device=rows.device)
    index = numbers - before
    places = torch.where(index < pending[:, None], index + before, index - pending[:, None] + before + most)
    places = places.clamp_(max=before + most + width - 1)[:, :, None].expand(-1, -1, rows.shape[2])
    inputs = torch.cat([tail, own.window[at, :most], rows], dim=1).gather(1, places)
    convolved = _convolved(inputs, heads)
    is_pending = (numbers[:most] < pending[:, None])[:, :, None]
    old_gates = own.gates[at, :most].transpose(1, 2).unbind(1)
    old = split_heads(convolved[:, :most], heads, *(torch.where(is_pending, gate, 0.0) for gate in old_gates))
    for i in range(most):  # a decay of log 0 and a rate of 0 leave a matrix as it is, bit by bit
        _advance(matrices, old.part(slice(i, i + 1)))
    newest = (pending[:, None] + numbers[:width])[:, :, None].expand(-1, -1, convolved.shape[2])
    new = split_heads(convolved.gather(1, newest), heads, *gates.transpose(1, 2).unbind(1))
    last = (pending[:, None] + numbers[:before])[:, :, None].expand(-1, -1, rows.shape[2])
    own.matrices[at], own.tail[at] = matrices, inputs.gather(1, last)
    own.window[at, :width], own.gates[at, :width] = rows, gates
    outputs = [_advance(matrices, new.part(slice(i, i + 1))) for i in range(width)]
    return torch.stack(outputs, dim=1).flatten(2).to(rows.dtype)


def _prompt(
    rows: torch.Tensor, gates: torch.Tensor, heads: DeltaHeads, own: LayerStates, states: StatePass, requests: slice
) -> torch.Tensor:
    """Outputs [1, n, H * value_dim] of a prompt chunk of one request: applies what is pending and the chunk."""
    at, pending = states.rows[requests], int(states.pending[requests])
    matrices, tail = _start(own, states, requests)
    inputs = torch.cat([tail, own.window[at, :pending], rows], dim=1)
    both = torch.cat([own.gates[at, :pending], gates], dim=1)
    tokens = split_heads(_convolved(inputs, heads), heads, *both.transpose(1, 2).unbind(1))
    parts, kept, before = list[torch.Tensor](), int(states.kept[requests]), tail.shape[1]
    for start in range(0, tokens.q.shape[1], CHUNK):
        parts.append(_apply_chunk(matrices, tokens.part(slice(start, start + CHUNK))))
        if start + CHUNK == kept:
            copy = states.kept_rows[requests]
            own.matrices[copy], own.tail[copy] = matrices, inputs[:, kept : kept + before]
    own.matrices[at], own.tail[at] = matrices, inputs[:, -before:]
    return torch.cat(parts, dim=1)[:, pending:].flatten(2).to(rows.dtype)


def _start(own: LayerStates, states: StatePass, requests: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the matrices and tails of these requests; zeros at a request's first token."""
    at, fresh = states.rows[requests], states.fresh[requests]
    return own.matrices[at].masked_fill_(fresh[:, None, None, None], 0.0), own.tail[at].masked_fill_(fresh[:, None, None], 0.0)


def _convolved(inputs: torch.Tensor, heads: DeltaHeads) -> torch.Tensor:
    """SiLU of the causal convolution: [B, conv_width - 1 + n, C] -> [B, n, C] in the model's dtype."""
    weight, count = heads.conv_weight.float(), inputs.shape[1] - heads.conv_width + 1
    sums = sum(inputs[:, i : i + count].float() * weight[:, i] for i in range(heads.conv_width))
    assert isinstance(sums, torch.Tensor), "a convolution has a width"
    return F.silu(sums).to(inputs.dtype)


def split_heads(convolved: torch.Tensor, heads: DeltaHeads, decay: torch.Tensor, rate: torch.Tensor) -> Tokens:
    """Tokens from convolved rows [B, n, C] and gates [B, n, H]."""
    keys = heads.num_key_heads * heads.key_dim
    q, k, v = convolved.float().split([keys, keys, heads.num_value_heads * heads.value_dim], dim=2)
    q, k = (_unit(part.unflatten(2, (-1, heads.key_dim))) for part in (q, k))
    per_key = heads.num_value_heads // heads.num_key_heads
    q, k = (part.repeat_interleave(per_key, dim=2) for part in (q * heads.key_dim**-0.5, k))
    return Tokens(q, k, v.unflatten(2, (-1, heads.value_dim)), decay, rate)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _advance(matrices: torch.Tensor, token: Tokens) -> torch.Tensor:
    """Apply one token to matrices [B, H, key_dim, value_dim] in place; its outputs [B, H, value_dim]."""
    q, k, v, decay, rate = (tensor[:, 0] for tensor in token)
    matrices.mul_(decay.exp()[:, :, None, None])
    delta = (v - (matrices * k[..., None]).sum(-2)) * rate[..., None]
    matrices.addcmul_(k[..., None], delta[:, :, None])
    return (matrices * q[..., None]).sum(-2)


def _apply_chunk(matrices: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Apply up to `CHUNK` tokens to matrices [1, H, key_dim, value_dim] in place; their outputs [1, n, H, value_dim].

    The tokens' updates U solve (I + A) U = b * (V - decays * K S), where A holds the products of keys below the diagonal (section 3.3 of
    the paper).
    """
    q, k, v, decay, rate = (tensor.transpose(1, 2) for tensor in tokens)  # [1, H, n, ...]
    total = decay.cumsum(-1)
    ratio = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    system = (rate[..., None] * (k @ k.mT) * ratio).tril(-1)
    wanted = rate[..., None] * (v - total.exp()[..., None] * (k @ matrices))
    updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    outputs = total.exp()[..., None] * (q @ matrices) + ((q @ k.mT) * ratio) @ updates
    last = total[..., -1:]
    matrices.mul_(last.exp()[..., None]).add_((k * (last - total).exp()[..., None]).mT @ updates)
    return outputs.transpose(1, 2)
