"""The target side of every worker: stage a batch, run prompts, choose tokens, keep the rows.

`TpWorker` and the speculative workers are made of one `Target` each and differ only in how they decode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from runtime.batch import PAD_ROW, BatchResult, ForwardMode, Logprobs, ScheduleBatch
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.sampler import sample, top_logprobs
from runtime.layers.sampling_tables import SamplingNeeds
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.device_queue import Finish
from runtime.model_executor.graph_runner import GraphRunner
from runtime.model_executor.model_runner import ModelRunner
from runtime.model_executor.request_rows import RequestRows
from runtime.model_executor.short_prompts import ShortPrompts
from runtime.model_executor.staging import HostCopy, StagingRing
from runtime.model_executor.window import prompts_and_windows

LOGPROB_CHUNK = 256
"""Prompt positions whose logits are held at once, where prompt log-probabilities are wanted."""


@dataclass(frozen=True, slots=True)
class ExtendPass:
    """A prompt pass after the target ran: what a draft needs to follow.

    Attributes:
        batch: the ragged inputs.
        rows: int64 [B].
        last: int64 [B]. Index among the T tokens of each request's last one.
        next_tokens: int64 [B]. The token after the chunk: from the prompt, or just sampled.
        hidden: [T, hidden], and `aux` [T, A * hidden] where asked.
        needs: what the sampler had to do.
    """

    batch: ForwardBatch
    rows: torch.Tensor
    last: torch.Tensor
    next_tokens: torch.Tensor
    hidden: torch.Tensor
    aux: torch.Tensor | None
    needs: SamplingNeeds


@dataclass(frozen=True, slots=True)
class Windows:
    """The decode rows of a ragged pass: their windows follow the prompts' tokens.

    Attributes:
        batch: the filled inputs of a fixed-width pass; its padding is left out.
        count: requests without the padding, the first ones.
        keep: called with their share of the pass: hidden [count * width, hidden], and aux where asked.
    """

    batch: ForwardBatch
    count: int
    keep: Callable[[torch.Tensor, torch.Tensor | None], object]


class Target:
    """Owner of the target's runner, the rows, the page table and the staging ring.

    Attributes:
        short_prompts: graphs that short prompts run through, set once, when there is memory to plan; None where all run eagerly.
    """

    def __init__(self, runner: ModelRunner, rows: RequestRows, page_table: PageTable, staging: StagingRing) -> None:
        self.runner, self.rows, self.page_table, self.staging = runner, rows, page_table, staging
        self.short_prompts: ShortPrompts | None = None
        self.device = runner.device

    # ---- outside any graph

    def reset(self) -> None:
        """Forget every request: lengths, last tokens and pages are as at the start. What KV holds is never read then."""
        self.rows.kv_lens.zero_()
        self.rows.last_tokens.zero_()
        self.page_table.pages.zero_()

    @property
    def prompt_runners(self) -> list[GraphRunner]:
        """That of short prompts, where they have graphs."""
        return [] if self.short_prompts is None else [self.short_prompts.runner]

    def stage_rows(self, batch: ScheduleBatch, size: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Write pages and new rows.

        Returns:
            int64 [E] rows of the prompt chunks, and int64 [size] those of the decode rows, padded with row 0.
        """
        self.rows.admit(batch.new_rows)
        decoding = np.full(size, PAD_ROW, dtype=np.int32)
        decoding[: batch.num_decodes] = batch.rows[batch.num_prompts :]
        chunks, decoding_d, page_rows, page_cols, page_ids = self.staging.upload(
            batch.rows[: batch.num_prompts], decoding, batch.page_rows, batch.page_cols, batch.page_ids
        )
        if len(batch.page_ids):
            self.page_table.write(page_rows.to(torch.int64), page_cols.to(torch.int64), page_ids)
        return chunks.to(torch.int64), decoding_d.to(torch.int64)

    def extend(
        self, batch: ScheduleBatch, rows: torch.Tensor, aux_layers: tuple[int, ...] = (), windows: Windows | None = None
    ) -> tuple[ExtendPass, ExtendResult]:
        """Run the prompt chunks of a batch, sample where a prompt ends, and set the rows' lengths and last tokens.

        Args:
            rows: int64 [E], from `stage_rows`.
            windows: of the decode rows, which run in the same pass.
        """
        forward, last, given = self._ragged(batch, rows)
        hidden, aux = self._pass(forward, aux_layers, windows)
        needs = self.rows.needs(batch.rows[: batch.num_prompts])
        logits = self.runner.model.logits(hidden[last])
        positions = forward.seq_lens.to(torch.int64)
        sampled = sample(logits, self.rows.tables, rows, positions, needs)
        ends = given < 0
        next_tokens = torch.where(ends, sampled, given)
        self.rows.kv_lens[rows] = forward.seq_lens
        self.rows.last_tokens[rows] = next_tokens
        if needs.penalised:
            self.rows.count(rows, next_tokens[:, None], ends[:, None])
        copies = _logprob_copy(logits, next_tokens, int(batch.top_logprobs.max(initial=-1)))
        prompt = self._prompt_logprobs(batch, forward, hidden, next_tokens)
        result = ExtendResult(batch, HostCopy(next_tokens), copies, prompt)
        return ExtendPass(forward, rows, last, next_tokens, hidden, aux, needs), result

    def _pass(
        self, prompts: ForwardBatch, aux_layers: tuple[int, ...], windows: Windows | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden and auxiliary states of the prompts."""
        if windows is None:
            return (self.short_prompts and self.short_prompts.run(prompts)) or self.runner.extend(prompts, aux_layers)
        hidden, aux = self.runner.extend(prompts_and_windows(prompts, windows.batch, windows.count), aux_layers)
        T = prompts.num_tokens
        windows.keep(hidden[T:], None if aux is None else aux[T:])
        return hidden[:T], None if aux is None else aux[:T]

    def _ragged(self, batch: ScheduleBatch, rows: torch.Tensor) -> tuple[ForwardBatch, torch.Tensor, torch.Tensor]:
        lens = batch.extend_lens
        ends = lens.cumsum(dtype=np.int32)
        indptr = np.concatenate([np.zeros(1, dtype=np.int32), ends])
        starts = np.repeat(batch.prefix_lens - indptr[:-1], lens)
        positions = (np.arange(ends[-1], dtype=np.int32) + starts).astype(np.int32)
        seq_lens = (batch.prefix_lens + lens).astype(np.int32)
        owner = np.repeat(np.arange(batch.num_prompts, dtype=np.int32), lens)
        ids_d, pos_d, owner_d, indptr_d, lens_d, last_d, next_d = self.staging.upload(
            batch.token_ids, positions, owner, indptr, seq_lens, ends - 1, batch.next_tokens
        )
        position = pos_d.to(torch.int64)
        forward = ForwardBatch(
            mode=ForwardMode.EXTEND,
            batch_size=batch.num_prompts,
            tokens_per_req=0,
            input_ids=ids_d.to(torch.int64),
            positions=position,
            out_cache_loc=self.page_table.slots(rows[owner_d.to(torch.int64)], position),
            req_pool_indices=rows,
            seq_lens=lens_d.clone(),
            qo_indptr=indptr_d.clone(),
            seq_len_bounds=seq_lens,
            extend_lens=lens,
        )
        return forward, last_d.to(torch.int64), next_d.to(torch.int64)

    def _prompt_logprobs(
        self, batch: ScheduleBatch, forward: ForwardBatch, hidden: torch.Tensor, next_tokens: torch.Tensor
    ) -> dict[int, HostCopy]:
        """Log-probabilities of each wanted chunk's following tokens, a bounded number of logits at a time."""
        found: dict[int, HostCopy] = {}
        start = 0
        for i, length in enumerate(batch.extend_lens.tolist()):
            if len(batch.prompt_logprobs) and batch.prompt_logprobs[i]:
                following = torch.cat([forward.input_ids[start + 1 : start + length], next_tokens[i : i + 1]])
                parts = [
                    top_logprobs(self.runner.model.logits(h), ids, max(int(batch.top_logprobs[i]), 0))
                    for h, ids in zip(hidden[start : start + length].split(LOGPROB_CHUNK), following.split(LOGPROB_CHUNK), strict=True)
                ]
                found[i] = HostCopy(*(torch.cat(column) for column in zip(*parts, strict=True)))
            start += length
        return found


@dataclass(frozen=True, slots=True)
class ExtendResult:
    """The tokens of a prompt pass on their way to the host."""

    batch: ScheduleBatch
    tokens: HostCopy
    logprobs: HostCopy | None
    prompt_logprobs: dict[int, HostCopy]

    def collect(self) -> BatchResult:
        """Wait for them."""
        (tokens,) = self.tokens.wait()
        ends = self.batch.next_tokens < 0
        return BatchResult(
            token_ids=tokens[ends].astype(np.int32),
            accept_lens=ends.astype(np.int32),
            logprobs=to_logprobs(self.logprobs, ends) if self.logprobs is not None else None,
            prompt_logprobs={i: to_logprobs(copy, None) for i, copy in self.prompt_logprobs.items()},
        )


def joined(prompts: Finish, decode: Finish) -> Finish:
    """One result of a step's prompt chunks and decode rows."""

    def finish() -> BatchResult:
        first, second = prompts(), decode()
        return BatchResult(
            token_ids=np.concatenate([first.token_ids, second.token_ids]),
            accept_lens=np.concatenate([first.accept_lens, second.accept_lens]),
            logprobs=_concatenated(first.logprobs, second.logprobs),
            prompt_logprobs=first.prompt_logprobs,
            stats=second.stats,
        )

    return finish


def _concatenated(first: Logprobs | None, second: Logprobs | None) -> Logprobs | None:
    if first is None or second is None:
        return None
    return Logprobs(*(np.concatenate([getattr(one, name) for one in (first, second)]) for name in ("chosen", "top_ids", "top")))


def _logprob_copy(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> HostCopy | None:
    return HostCopy(*top_logprobs(logits, tokens, k)) if k >= 0 else None


def to_logprobs(copy: HostCopy, keep: np.ndarray | None) -> Logprobs:
    """The host form of `top_logprobs`' result; `keep` bool [N] selects tokens."""
    chosen, ids, top = copy.wait()
    if keep is not None:
        chosen, ids, top = chosen[keep], ids[keep], top[keep]
    return Logprobs(chosen=chosen.astype(np.float32), top_ids=ids.astype(np.int32), top=top.astype(np.float32))
