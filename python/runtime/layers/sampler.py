"""The sampler: from logits to tokens, by filters and draws. A row's result depends only on that row.

Tokens are drawn by the inverse of the cumulative distribution, with one uniform number per token.
"""

from __future__ import annotations

import torch

from runtime.layers.kernels.argmax import argmax
from runtime.layers.logits_processors import LogitsContext, process_logits
from runtime.layers.random_streams import RandomStream, uniforms
from runtime.layers.sampling_tables import MIN_P, ROWS_AT_ONCE, TEMPERATURE, TOP_P, SamplingNeeds, SamplingTables
from runtime.layers.token_mask import TokenMask


def target_probs(logits: torch.Tensor, tables: SamplingTables, rows: torch.Tensor, filtered: bool, greedy: bool = True) -> torch.Tensor:
    """The distribution that each request samples from: after temperature, top-k, top-p and min-p.

    Args:
        logits: float32 [N, V], after the logits processors.
        rows: int64 [N].
        filtered: whether any request has top_k, top_p or min_p.
        greedy: whether any request is greedy.

    Returns:
        float32 [N, V]. Greedy rows are one-hot at their argmax; if `greedy` is false, they are computed at temperature 1 instead.
    """
    if len(rows) > ROWS_AT_ONCE:
        parts = zip(logits.split(ROWS_AT_ONCE), rows.split(ROWS_AT_ONCE), strict=True)
        out = torch.empty_like(logits)
        for target, (part, index) in zip(out.split(ROWS_AT_ONCE), parts, strict=True):
            target.copy_(target_probs(part, tables, index, filtered, greedy))
        return out
    floats = tables.floats[rows]
    temperature = floats[:, TEMPERATURE : TEMPERATURE + 1]
    cold = temperature == 0.0
    probs = torch.softmax(logits / torch.where(cold, 1.0, temperature), dim=-1)
    if filtered:
        probs = tables.ops.filter(probs, tables.top_k[rows], floats[:, TOP_P], floats[:, MIN_P])
    if not greedy:
        return probs
    one_hot = torch.zeros_like(probs).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(cold, one_hot, probs)


def filter_probs(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keep the top_k most likely tokens, of these the fewest whose mass reaches top_p, and of these the ones with at least min_p times the
    largest probability.

    Args:
        probs: float32 [N, V], each row sums to 1.
        top_k: int32 [N]; top_p, min_p: float32 [N].

    Returns:
        float32 [N, V], renormalised. Of equal probabilities the smaller token id is kept, so exactly top_k tokens remain.
    """
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    keep = rank[None] < top_k[:, None]
    ranked = torch.where(keep, ranked, 0.0)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    before = ranked.cumsum(-1) - ranked
    keep = keep & ((before < top_p[:, None]) | (rank[None] == 0)) & (ranked >= min_p[:, None] * ranked[:, :1])
    ranked = torch.where(keep, ranked, 0.0)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(1, order, ranked)


def draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw by inverse cumulative distribution: probs float32 [N, V], uniform float32 [N] in [0, 1) -> int64 [N].

    Never draws a token of probability 0.
    """
    if len(probs) > ROWS_AT_ONCE:
        parts = zip(probs.split(ROWS_AT_ONCE), uniform.split(ROWS_AT_ONCE), strict=True)
        return torch.cat([draw(part, number) for part, number in parts])
    cumulative = probs.to(torch.float64).cumsum(-1)
    threshold = uniform.to(torch.float64)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).to(torch.int8).argmax(-1)
    return torch.minimum(index, last)


class TorchSampling:
    """`SamplingOps` by definition, on any device."""

    def filter(self, probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
        """See `filter_probs`."""
        # Rows without a filter must keep their bits, so that a draw does not depend on other requests' filters.
        plain = (top_k >= probs.shape[1]) & (top_p >= 1.0) & (min_p <= 0.0)
        return torch.where(plain[:, None], probs, filter_probs(probs, top_k, top_p, min_p))

    def draw(self, probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """See `draw`."""
        return draw(probs, uniform)

    def uniforms(self, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
        """See `uniforms`."""
        return uniforms(seeds, positions, stream)


def sample(
    logits: torch.Tensor,
    tables: SamplingTables,
    rows: torch.Tensor,
    positions: torch.Tensor,
    needs: SamplingNeeds,
    mask: TokenMask | None = None,
) -> torch.Tensor:
    """Choose one token per request.

    Args:
        logits: float32 [B, V] from the model.
        rows, positions: int64 [B].
        mask: the tokens that grammars allow; required if `needs.constrained` is not empty.

    Returns:
        int64 [B].
    """
    if needs.all_greedy and not needs.adjusts:
        return argmax(logits)
    if len(rows) > ROWS_AT_ONCE:
        spans = [slice(start, start + ROWS_AT_ONCE) for start in range(0, len(rows), ROWS_AT_ONCE)]
        masks = [None if mask is None else mask.part(s.start, s.stop) for s in spans]
        parts = zip(spans, masks, strict=True)
        return torch.cat([sample(logits[s], tables, rows[s], positions[s], needs.part(s.start, s.stop), m) for s, m in parts])
    logits = process_logits(logits[:, None], LogitsContext(tables, rows, positions[:, None], mask=mask), needs)[:, 0]
    if needs.all_greedy:
        return argmax(logits)
    probs = target_probs(logits, tables, rows, needs.filtered, needs.any_greedy)
    return tables.ops.draw(probs, tables.ops.uniforms(tables.seeds[rows], positions, RandomStream.TARGET))


def top_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, k: int, index: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities under the model's own distribution, before temperature, penalties and filters.

    Args:
        logits: float32 [N, V].
        chosen: int64 [N].
        k: number of most likely tokens to return; may be 0.
        index: int64 [N], the row of `logits` for each chosen token; None: row i for token i.

    Returns:
        float32 [N] of the chosen tokens; int32 [N, k] ids and float32 [N, k] of the most likely tokens, in descending order.
    """
    if len(chosen) > ROWS_AT_ONCE:
        spans = [slice(start, start + ROWS_AT_ONCE) for start in range(0, len(chosen), ROWS_AT_ONCE)]
        parts = [top_logprobs(logits[s], chosen[s], k) if index is None else top_logprobs(logits, chosen[s], k, index[s]) for s in spans]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), torch.cat([p[2] for p in parts])
    logprobs = torch.log_softmax(logits if index is None else logits[index], dim=-1)
    values, ids = logprobs.topk(k, dim=-1) if k else (logprobs[:, :0], torch.zeros_like(chosen)[:, None][:, :0])
    return logprobs.gather(1, chosen[:, None])[:, 0], ids.to(torch.int32), values
