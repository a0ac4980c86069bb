"""Logits processors: changes to the target's logits before a token is chosen, vectorised over the requests that need them.

A step runs every processor of `LOGITS_PROCESSORS` in order, each over the requests that it selects from `SamplingNeeds`. The grammar mask
comes after all changes of single logits, so that none of them allows a forbidden token again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from runtime.layers.sampling_tables import FREQUENCY, PRESENCE, REPETITION, ROWS_AT_ONCE, SamplingNeeds, SamplingTables
from runtime.layers.token_mask import TokenMask, forbid


@dataclass(frozen=True, slots=True)
class LogitsContext:
    """The inputs of processors in addition to the logits. B requests, W window positions (1 in plain decoding), A ancestors.

    Attributes:
        tables: sampling state by request row.
        rows: int64 [B].
        positions: int64 [B, W]. Sequence position of the token chosen from each window position.
        path: int64 [B, W, A]. Drafts before each window position, -1 for none; they count as output. None: nothing is drafted.
        mask: the tokens that grammars allow at the W positions; None if no request is constrained.
    """

    tables: SamplingTables
    rows: torch.Tensor
    positions: torch.Tensor
    path: torch.Tensor | None = None
    mask: TokenMask | None = None


@dataclass(frozen=True, slots=True)
class LogitsProcessor:
    """One change to the logits.

    Attributes:
        selects: the indices of the requests to change, known on the host.
        apply: changes float32 logits [B, W, V] in place for the selected requests, int64 [N]; does not synchronise with the device.
    """

    selects: Callable[[SamplingNeeds], list[int]]
    apply: Callable[[torch.Tensor, torch.Tensor, LogitsContext], None]


def penalise(logits: torch.Tensor, selected: torch.Tensor, context: LogitsContext) -> None:
    """Apply penalties over the prompt, the output and the drafts before a position: divide or multiply by that for repetition, then
    subtract those for frequency and presence.
    """
    tables, rows = context.tables, context.rows[selected]
    counts = tables.output_counts[rows].to(torch.float32)[:, None].expand(-1, logits.shape[1], -1)
    if context.path is not None:
        ids = context.path[selected]
        counts = counts.scatter_add(2, ids.clamp(min=0), (ids >= 0).to(torch.float32))
    frequency, presence, repetition = (tables.floats[rows, i][:, None, None] for i in (FREQUENCY, PRESENCE, REPETITION))
    seen = counts > 0
    x = logits[selected]
    x = torch.where(seen | tables.in_prompt[rows][:, None], torch.where(x > 0, x / repetition, x * repetition), x)
    logits[selected] = x - counts * frequency - seen * presence


def add_bias(logits: torch.Tensor, selected: torch.Tensor, context: LogitsContext) -> None:
    """Add a constant to the logits of chosen tokens; unused table entries add 0 to token 0."""
    rows = context.rows[selected]
    _add_at(logits, selected, context.tables.bias_ids[rows], context.tables.bias_values[rows][:, None])


def forbid_end(logits: torch.Tensor, selected: torch.Tensor, context: LogitsContext) -> None:
    """Set the logits of end-of-text ids to minus infinity while the output is too short."""
    rows = context.rows[selected]
    ids = context.tables.eos_ids[rows]
    early = context.positions[selected] < context.tables.min_positions[rows][:, None]
    banned = torch.where(early[:, :, None] & (ids >= 0)[:, None], -torch.inf, 0.0)
    _add_at(logits, selected, ids.clamp(min=0), banned)


def mask_by_grammar(logits: torch.Tensor, selected: torch.Tensor, context: LogitsContext) -> None:
    """Set the logits of tokens that the grammar forbids to minus infinity."""
    assert context.mask is not None, "constrained requests come with a mask"
    forbid(logits, selected, context.mask.allowed(selected, logits.shape[-1]))


def end_by_grammar(logits: torch.Tensor, selected: torch.Tensor, context: LogitsContext) -> None:
    """Where a grammar ends before the minimum length, so that no token is left, make all tokens that it allows equally likely."""
    assert context.mask is not None, "constrained requests come with a mask"
    allowed, masked = context.mask.allowed(selected, logits.shape[-1]), logits[selected]
    nothing_left = masked.amax(-1, keepdim=True) == -torch.inf
    logits[selected] = torch.where(nothing_left & allowed, 0.0, masked)


LOGITS_PROCESSORS = (
    LogitsProcessor(lambda needs: needs.penalised, penalise),
    LogitsProcessor(lambda needs: needs.biased, add_bias),
    LogitsProcessor(lambda needs: needs.min_length, forbid_end),
    LogitsProcessor(lambda needs: needs.constrained, mask_by_grammar),
    LogitsProcessor(lambda needs: sorted(set(needs.constrained) & set(needs.min_length)), end_by_grammar),
)


def process_logits(
    logits: torch.Tensor, context: LogitsContext, needs: SamplingNeeds, processors: Sequence[LogitsProcessor] = LOGITS_PROCESSORS
) -> torch.Tensor:
    """Run the processors over float32 `logits` [B, W, V]. Returns new logits if a request needs a change, else `logits` itself."""
    selections = [(processor, processor.selects(needs)) for processor in processors]
    if not any(selected for _, selected in selections):
        return logits
    logits = logits.clone()
    for processor, selected in selections:
        for part in _parts(selected, max(ROWS_AT_ONCE // logits.shape[1], 1)):
            processor.apply(logits, _on_device(part, logits.device), context)
    return logits


def _parts(selected: list[int], size: int) -> Iterator[list[int]]:
    """Slices of at most `size` requests, because processors allocate several numbers per vocabulary entry and request."""
    return (selected[start : start + size] for start in range(0, len(selected), size))


def _on_device(selected: list[int], device: torch.device) -> torch.Tensor:
    index = torch.tensor(selected, dtype=torch.int64)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index


def _add_at(logits: torch.Tensor, selected: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Add `values` float32 [N, W or 1, E] to `logits` [B, W, V] at tokens `ids` int64 [N, E] of requests `selected`, in place.

    At most one of the values for an entry differs from 0, so the order of the additions does not matter.
    """
    W, V = logits.shape[1:]
    windows = selected[:, None] * W + torch.arange(W, device=logits.device)
    at = windows[:, :, None] * V + ids[:, None]
    logits.view(-1).index_add_(0, at.flatten(), values.expand(at.shape).flatten())
