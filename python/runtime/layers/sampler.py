"""From logits to tokens: penalties, filters and draws that depend on nothing but the request itself.

Every random number is a hash of (seed, position, stream), so a request draws the same tokens whatever else is in the batch, after a
retraction, and with any batch size. Drawing is by the inverse of the cumulative distribution: one uniform number per token.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import torch

TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION = range(6)


class RandomStream(enum.IntEnum):
    """Independent random streams of one request; one position may draw from each."""

    TARGET = 1
    DRAFT = 2
    ACCEPT = 3
    SYNTHETIC = 4


class SamplingOps(Protocol):
    """The operations of sampling that take long over a large vocabulary or many launches. A row's result depends on that row alone."""

    def filter(self, probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
        """As `filter_probs`; rows without a filter keep their bits. May reuse the storage of `probs`."""
        ...

    def draw(self, probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """As `draw`."""
        ...

    def uniforms(self, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
        """As `uniforms`, bit for bit."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """What the sampler reads by request row; R rows, V vocabulary.

    Attributes:
        ops: how it computes.
        floats: float32 [R, 6]: temperature (0: greedy), top_p, min_p, presence, frequency, repetition penalty.
        top_k: int32 [R].
        seeds: int64 [R].
        min_positions: int64 [R]. Tokens at positions before this one may not be in `eos_ids`.
        eos_ids: int64 [R, E], -1 where unused.
        bias_ids, bias_values: int64, float32 [R, 1024]; unused entries are id 0, value 0.
        output_counts: int16 [R, V]. Output tokens so far; kept for penalised rows only.
        in_prompt: bool [R, V].
    """

    ops: SamplingOps
    floats: torch.Tensor
    top_k: torch.Tensor
    seeds: torch.Tensor
    min_positions: torch.Tensor
    eos_ids: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    output_counts: torch.Tensor
    in_prompt: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """Which steps a batch needs; indices are into the batch.

    Attributes:
        all_greedy, any_greedy: whether all requests have temperature 0, and whether any may have.
        filtered: whether any has top_k, top_p or min_p.
        penalised, biased, at_least: who has penalties, a logit bias, a minimum length.
    """

    all_greedy: bool
    any_greedy: bool
    filtered: bool
    penalised: list[int]
    biased: list[int]
    at_least: list[int]

    @classmethod
    def every(cls) -> SamplingNeeds:
        """All that one request may need."""
        return cls(all_greedy=False, any_greedy=True, filtered=True, penalised=[0], biased=[0], at_least=[0])

    @property
    def adjusts(self) -> bool:
        """Whether logits change before the choice."""
        return bool(self.penalised or self.biased or self.at_least)

    def part(self, start: int, stop: int) -> SamplingNeeds:
        """The needs of requests `start` to `stop` alone."""
        lists = ([i - start for i in which if start <= i < stop] for which in (self.penalised, self.biased, self.at_least))
        return SamplingNeeds(self.all_greedy, self.any_greedy, self.filtered, *lists)


STREAM_STEP = 0x9E3779B97F4A7C15
POSITION_STEP = 0xD1B54A32D192ED03
"""What a stream and a position add to the key of a random number: odd, with no pattern in their bits."""


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """Uniform numbers in [0, 1 - 2^-24], float32, shape of the broadcast of int64 `seeds` and `positions`.

    Two rounds of the splitmix64 finaliser (Steele et al. 2014) over seed, position and stream.
    """
    x = _mix(seeds + signed(STREAM_STEP * (stream + 1)))
    x = _mix(x + positions.to(torch.int64) * signed(POSITION_STEP))
    return ((x >> 40) & 0xFFFFFF).to(torch.float32) * (1.0 / (1 << 24))


def signed(constant: int) -> int:
    """The int64 with the low 64 bits of `constant`."""
    constant &= (1 << 64) - 1
    return constant - (1 << 64) if constant >= 1 << 63 else constant


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def adjust(
    logits: torch.Tensor,
    tables: SamplingTables,
    rows: torch.Tensor,
    positions: torch.Tensor,
    needs: SamplingNeeds,
    path: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply penalties, logit bias and minimum length; returns new logits where anything changes.

    Args:
        logits: float32 [B, W, V]: W window positions of each request (1 in plain decoding).
        rows: int64 [B].
        positions: int64 [B, W]. Where the token chosen from each will stand.
        needs: which requests need what.
        path: int64 [B, W, A]. The drafts that stand before each window position, -1 for none: they count as output. None: nothing is
            drafted.
    """
    if not needs.adjusts:
        return logits
    logits = logits.clone()
    if needs.penalised:
        _penalise(logits, tables, rows, needs.penalised, path)
    for i in needs.biased:
        row = rows[i : i + 1]
        logits[i].index_add_(1, tables.bias_ids[row][0], tables.bias_values[row].expand(logits.shape[1], -1))
    for i in needs.at_least:
        _forbid_eos(logits[i], tables, rows[i : i + 1], positions[i])
    return logits


def _penalise(logits: torch.Tensor, tables: SamplingTables, rows: torch.Tensor, which: list[int], drafted: torch.Tensor | None) -> None:
    """In place. `drafted`: int64 [B, W, A], ancestors of each window position among the drafts, -1 for none; they count as output."""
    for i in which:
        row = rows[i : i + 1]
        counts = tables.output_counts[row].to(torch.float32).expand(logits.shape[1], -1)
        if drafted is not None:
            ids = drafted[i]
            counts = counts.scatter_add(1, ids.clamp(min=0), (ids >= 0).to(torch.float32))
        floats = tables.floats[row]
        seen = counts > 0
        repeated = seen | tables.in_prompt[row]
        x = logits[i]
        repetition = floats[:, REPETITION : REPETITION + 1]
        x = torch.where(repeated, torch.where(x > 0, x / repetition, x * repetition), x)
        logits[i] = x - counts * floats[:, FREQUENCY : FREQUENCY + 1] - seen * floats[:, PRESENCE : PRESENCE + 1]


def _forbid_eos(logits: torch.Tensor, tables: SamplingTables, row: torch.Tensor, positions: torch.Tensor) -> None:
    """In place on [W, V]: end-of-text ids are impossible where the output would be too short."""
    ids = tables.eos_ids[row][0]
    early = (positions < tables.min_positions[row])[:, None] & (ids >= 0)[None]
    banned = torch.zeros_like(logits).scatter_add(1, ids.clamp(min=0).expand(logits.shape[0], -1), early.to(logits.dtype)) > 0
    logits.masked_fill_(banned, -torch.inf)


PROBS_CHUNK = 64
"""Rows whose temporaries are alive at once: sorting 64 rows of 128,256 takes 0.3 GiB, sorting a full verify window would take 10.

All that takes several numbers for each token of the vocabulary keeps to it, so that the largest batch needs no more than this many rows.
"""


def target_probs(logits: torch.Tensor, tables: SamplingTables, rows: torch.Tensor, filtered: bool, greedy: bool = True) -> torch.Tensor:
    """The distribution that each request samples from: after temperature, top-k, top-p and min-p.

    Args:
        logits: float32 [N, V], adjusted.
        rows: int64 [N].
        filtered: whether any request has top_k, top_p or min_p.
        greedy: whether any request is greedy.

    Returns:
        float32 [N, V]. Greedy rows are one-hot at their argmax; if none was said to be there, they are as of temperature 1.
    """
    if len(rows) > PROBS_CHUNK:
        parts = zip(logits.split(PROBS_CHUNK), rows.split(PROBS_CHUNK), strict=True)
        out = torch.empty_like(logits)
        for target, (part, index) in zip(out.split(PROBS_CHUNK), parts, strict=True):
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
    """Keep the top_k most likely, of those the smallest head whose mass reaches top_p, of those what reaches min_p times the largest.

    Args:
        probs: float32 [N, V], each row sums to 1.
        top_k: int32 [N]; top_p, min_p: float32 [N].

    Returns:
        float32 [N, V], renormalised. Ties at the border of top_k are resolved by token id, so exactly top_k stay.
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
    """Draw by inverse cumulative distribution. probs float32 [N, V], uniform float32 [N] in [0, 1) -> int64 [N], never of probability 0."""
    if len(probs) > PROBS_CHUNK:
        parts = zip(probs.split(PROBS_CHUNK), uniform.split(PROBS_CHUNK), strict=True)
        return torch.cat([draw(part, number) for part, number in parts])
    cumulative = probs.to(torch.float64).cumsum(-1)
    threshold = uniform.to(torch.float64)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).to(torch.int8).argmax(-1)
    return torch.minimum(index, last)


class TorchSampling:
    """`SamplingOps` by the definitions, on any device."""

    def filter(self, probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
        """See `filter_probs`."""
        # Rows without a filter keep their bits: what a request draws may not depend on its neighbours' filters.
        plain = (top_k >= probs.shape[1]) & (top_p >= 1.0) & (min_p <= 0.0)
        return torch.where(plain[:, None], probs, filter_probs(probs, top_k, top_p, min_p))

    def draw(self, probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """See `draw`."""
        return draw(probs, uniform)

    def uniforms(self, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
        """See `uniforms`."""
        return uniforms(seeds, positions, stream)


def sample(logits: torch.Tensor, tables: SamplingTables, rows: torch.Tensor, positions: torch.Tensor, needs: SamplingNeeds) -> torch.Tensor:
    """Choose one token per request. logits float32 [B, V] unadjusted, rows and positions int64 [B] -> int64 [B]."""
    if needs.all_greedy and not needs.adjusts:
        return logits.argmax(-1)
    if len(rows) > PROBS_CHUNK:
        spans = [slice(start, start + PROBS_CHUNK) for start in range(0, len(rows), PROBS_CHUNK)]
        return torch.cat([sample(logits[s], tables, rows[s], positions[s], needs.part(s.start, s.stop)) for s in spans])
    logits = adjust(logits[:, None], tables, rows, positions[:, None], needs)[:, 0]
    if needs.all_greedy:
        return logits.argmax(-1)
    probs = target_probs(logits, tables, rows, needs.filtered, needs.any_greedy)
    return tables.ops.draw(probs, tables.ops.uniforms(tables.seeds[rows], positions, RandomStream.TARGET))


def top_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, k: int, index: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities under the model's own distribution, before temperature, penalties and filters.

    Args:
        logits: float32 [N, V].
        chosen: int64 [N].
        k: how many of the most likely to return; may be 0.
        index: int64 [N], which rows of `logits` are meant, of any number of them; None: all, in order.

    Returns:
        float32 [N] of the chosen, int32 [N, k] ids and float32 [N, k] of the most likely, falling.
    """
    if len(chosen) > PROBS_CHUNK:
        spans = [slice(start, start + PROBS_CHUNK) for start in range(0, len(chosen), PROBS_CHUNK)]
        parts = [top_logprobs(logits[s], chosen[s], k) if index is None else top_logprobs(logits, chosen[s], k, index[s]) for s in spans]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), torch.cat([p[2] for p in parts])
    logprobs = torch.log_softmax(logits if index is None else logits[index], dim=-1)
    values, ids = logprobs.topk(k, dim=-1) if k else (logprobs[:, :0], torch.zeros_like(chosen)[:, None][:, :0])
    return logprobs.gather(1, chosen[:, None])[:, 0], ids.to(torch.int32), values
