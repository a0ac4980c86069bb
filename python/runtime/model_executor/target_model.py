"""The target: stages a batch, runs its prompt chunks and windows in one pass, and owns the request rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from runtime.batch import PAD_ROW, BatchResult, ForwardMode, Int32, ScheduleBatch
from runtime.distributed.agreement import Agreement
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.sampler import sample, top_logprobs
from runtime.layers.sampling_tables import SamplingNeeds
from runtime.layers.token_mask import TokenMask
from runtime.mem_cache.kv_pool import KVPool, PageTable, front_slots
from runtime.model_executor.depth import DepthBatches
from runtime.model_executor.graph_runner import Forward, GraphRunner, RunnerSpec
from runtime.model_executor.model_runner import ModelRunner
from runtime.model_executor.request_rows import RequestRows
from runtime.model_executor.results import LogprobCopy, copy_logprobs, pool_chunks
from runtime.model_executor.short_prompts import ShortPrompts
from runtime.model_executor.staging import HostCopy, StagingRing
from runtime.model_executor.window import prompts_and_windows
from runtime.models.decoder import States

PAGES_AT_ONCE = 1 << 14
"""Maximum page-table entries per upload: requests with long cached prefixes that begin in one step may have any number."""
MakeRunner = Callable[[RunnerSpec, Forward, ModelRunner, DepthBatches, bool], GraphRunner]
"""Makes a graph runner of a model's passes at one depth; the last argument says whether to capture graphs."""
LOGPROB_CHUNK = 256
"""Maximum prompt positions with logits in memory at a time, if prompt log-probabilities are requested."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The prompt chunks of one step, on the device.

    Attributes:
        batch: the ragged inputs.
        last: int64 [E]. Index among the T tokens of each chunk's last one.
        given: int64 [E]. The prompt token after the chunk, or -1 if one is sampled.
        wanted: the tokens whose hidden states are needed: `last`, or none of them if no chunk ends a prompt. None for all tokens.
    """

    batch: ForwardBatch
    last: torch.Tensor
    given: torch.Tensor
    wanted: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExtendPass:
    """Prompt chunks that the target has run, for the drafter to follow.

    Attributes:
        chunks: their inputs.
        next_tokens: int64 [E]. The token after each chunk: from the prompt, or just sampled.
        states: the target's states at the T tokens.
        needs: the sampling stages of the requests.
        ended: int32, on the host: the rows of the chunks that end a prompt.
        deferred: whether the first drafts after these prompts are computed only when they are needed.
    """

    chunks: Chunks
    next_tokens: torch.Tensor
    states: States
    needs: SamplingNeeds
    ended: Int32
    deferred: bool


class TargetModel:
    """Owner of the target's runner, the rows, the page table and the staging ring.

    Attributes:
        aux_layers: layers whose states passes return in addition to the last hidden states.
        short_prompts: graphs for short prompts, set once before memory is planned; None if all prompts run eagerly.
        agreement: the check that all ranks commit the same tokens.
        reads_results: whether this rank copies results to the host.

    Args:
        reads_hidden: whether a drafter reads the last hidden states of all tokens.
    """

    def __init__(
        self,
        runner: ModelRunner,
        rows: RequestRows,
        page_table: PageTable,
        staging: StagingRing,
        aux_layers: tuple[int, ...] = (),
        reads_results: bool = True,
        reads_hidden: bool = False,
    ) -> None:
        self.runner, self.rows, self.page_table, self.staging = runner, rows, page_table, staging
        self.agreement, self.reads_results = Agreement(runner.device, runner.model.context.group), reads_results
        self.aux_layers = aux_layers
        # Attention groups exchange the rows of equally many tokens in each layer.
        self._reads_hidden = reads_hidden or runner.config.num_layers in aux_layers or runner.model.context.exchange is not None
        self.short_prompts: ShortPrompts | None = None
        self.device = runner.device
        self._no_rows = torch.empty(0, dtype=torch.int64, device=self.device)
        # Size and rows of the last step without prompts, and its rows on the device.
        self._decode_rows: tuple[tuple[int, bytes], torch.Tensor] | None = None

    # ---- outside any graph

    def reset(self) -> None:
        """Forget every request: lengths, last tokens and pages. Their KV is never read after that."""
        self.rows.kv_lens.zero_()
        self.rows.last_tokens.zero_()
        self.page_table.pages.zero_()

    def forget(self, rows: Int32) -> None:
        """Clear rows of a failed step, which may have failed before it wrote their pages and lengths. The next step is submitted already
        and must not continue from the state of earlier requests in these rows; it writes to the padding page instead.
        """
        self.page_table.pages[rows.tolist()] = 0
        self.rows.kv_lens[rows.tolist()] = 0

    @property
    def prompt_runners(self) -> list[GraphRunner]:
        """The graph runners of short prompts, if there are any."""
        return [] if self.short_prompts is None else self.short_prompts.runners

    def copy_pages(self, batch: ScheduleBatch, pools: Iterable[KVPool]) -> None:
        """Copy partially matching cached pages, in the KV of all models."""
        columns = (batch.copy_sources, batch.copy_targets, batch.copy_counts)
        sources, targets, counts = self.staging.upload(*(column.astype(np.int64) for column in columns))
        slots = front_slots(sources, targets, counts, self.page_table.page_size)
        for pool in pools:
            pool.move(*slots, group=1)

    def stage_states(self, batch: ScheduleBatch, rows: torch.Tensor) -> None:
        """Restore and keep recurrent states as a step with prompt chunks asks for; rows int64 [E], from `stage_rows`. Nothing without
        cached states.
        """
        states = self.runner.states
        if states is None or not states.cached:
            return
        for row, slot, length in batch.restored:
            states.restore(row, slot, length)
        none = np.zeros(batch.num_prompts, dtype=np.int32)
        lens, slots = (given if len(given) else none for given in (batch.kept_lens, batch.kept_slots))
        states.keep(rows, *self.staging.upload(lens, slots.astype(np.int64)))

    def stage_rows(self, batch: ScheduleBatch, size: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Upload pages and new rows.

        Returns:
            int64 [E], rows of the prompt chunks, and int64 [size], decode rows, padded with row 0: the same tensor as in the previous step
            if the same rows decode.
        """
        self.rows.admit(batch.new_rows)
        key = size, batch.rows.tobytes()
        if not batch.num_prompts and self._decode_rows is not None and self._decode_rows[0] == key:
            self._write_pages(batch)
            return self._no_rows, self._decode_rows[1]
        rows, decoding = batch.rows.astype(np.int64), np.full(size, PAD_ROW, dtype=np.int64)
        decoding[: batch.num_decodes] = rows[batch.num_prompts :]
        chunks, decoding_d = self._write_pages(batch, rows[: batch.num_prompts], decoding)
        if not batch.num_prompts:
            decoding_d = decoding_d.clone()  # later uploads reuse the memory
            self._decode_rows = key, decoding_d
        return chunks, decoding_d

    def _write_pages(self, batch: ScheduleBatch, *more: npt.NDArray[np.int64]) -> list[torch.Tensor]:
        """Write the new pages of a step, at most `PAGES_AT_ONCE` per upload. `more` is part of the last upload and returned."""
        if not len(batch.page_ids):
            return self.staging.upload(*more) if more else []
        uploaded = list[torch.Tensor]()
        for start in range(0, len(batch.page_ids), PAGES_AT_ONCE):
            stop = start + PAGES_AT_ONCE
            rows, cols, ids = (column[start:stop] for column in (batch.page_rows, batch.page_cols, batch.page_ids))
            with_last = more if stop >= len(batch.page_ids) else ()
            page_rows, page_cols, page_ids, *uploaded = self.staging.upload(rows.astype(np.int64), cols.astype(np.int64), ids, *with_last)
            self.page_table.write(page_rows, page_cols, page_ids)
        return uploaded

    def stage_chunks(self, batch: ScheduleBatch, rows: torch.Tensor) -> Chunks:
        """The inputs of the prompt chunks. rows int64 [E], from `stage_rows`.

        The device is idle until they arrive, so each launch that is avoided here reduces TTFT.
        """
        lens, table = batch.extend_lens, self.page_table
        ends = lens.cumsum(dtype=np.int64)
        indptr = np.concatenate([np.zeros(1, dtype=np.int32), ends.astype(np.int32)])
        positions = np.arange(ends[-1]) + np.repeat(batch.prefix_lens - indptr[:-1], lens)
        entries = np.repeat(batch.prompt_rows.astype(np.int64) * table.max_pages, lens) + positions // table.page_size
        seq_lens = (batch.prefix_lens + lens).astype(np.int32)
        ids_d, position, entries_d, offsets_d, indptr_d, lens_d, page_rows, last_d, next_d = self.staging.upload(
            *(batch.token_ids.astype(np.int64), positions, entries, positions % table.page_size),
            *(indptr, seq_lens, batch.prompt_rows.astype(np.int32), ends - 1, batch.next_tokens.astype(np.int64)),
        )
        forward = ForwardBatch(
            mode=ForwardMode.EXTEND,
            batch_size=batch.num_prompts,
            tokens_per_req=0,
            input_ids=ids_d,
            positions=position,
            out_cache_loc=table.slots_of(entries_d, offsets_d),
            req_pool_indices=rows,
            seq_lens=lens_d.clone(),
            qo_indptr=indptr_d.clone(),
            seq_len_bounds=seq_lens,
            extend_lens=lens,
            page_rows=page_rows,
        )
        return Chunks(forward, last_d, next_d, self._wanted(batch, last_d))

    def _wanted(self, batch: ScheduleBatch, last: torch.Tensor) -> torch.Tensor | None:
        """The tokens whose hidden states the step needs, as in `Chunks`. With decode rows in the same pass, they are all tokens."""
        means = any(pooling.whole_prompt for pooling in batch.pooling.values())
        if self._reads_hidden or batch.num_decodes or means or batch.prompt_logprobs.any():
            return None
        return last if (batch.next_tokens < 0).any() else last[:0]

    def run(self, chunks: Chunks, windows: ForwardBatch | None = None, live: int = 0) -> tuple[States, States]:
        """One pass over prompt chunks and, after them, the first `live` requests of `windows`; returns the states of both."""
        prompts, T = chunks.batch, chunks.batch.num_tokens
        if windows is not None:
            states = self.runner.extend(prompts_and_windows(prompts, windows, live), self.aux_layers)
            return states.part(slice(T)), states.part(slice(T, None))
        states, wanted = None if self.short_prompts is None else self.short_prompts.run(prompts), chunks.wanted
        if states is None:
            states = self.runner.extend(prompts, self.aux_layers, wanted)
        elif wanted is not None:
            states = states._replace(hidden=states.hidden[wanted])
        return states, states.part(slice(0))

    def sample_next(
        self, batch: ScheduleBatch, chunks: Chunks, states: States, mask: TokenMask | None = None
    ) -> tuple[ExtendPass, PromptsPending]:
        """Sample for chunks that end a prompt, set the rows' lengths and last tokens, and send the tokens to the host.

        Args:
            mask: the tokens that grammars allow after the prompts.
        """
        rows, positions = chunks.batch.req_pool_indices, chunks.batch.seq_lens.to(torch.int64)
        needs = self.rows.needs(batch.prompt_rows)
        last, logits = states.hidden if chunks.wanted is not None else states.hidden[chunks.last], None
        ends, next_tokens = chunks.given < 0, chunks.given
        if len(last):
            logits = self.runner.model.logits(last)
            if mask is not None:
                needs = replace(needs, constrained=mask.selected)
            next_tokens = torch.where(ends, sample(logits, self.rows.tables, rows, positions, needs, mask), next_tokens)
        self.rows.kv_lens[rows] = chunks.batch.seq_lens
        self.rows.last_tokens[rows] = next_tokens
        if batch.rows[0] == PAD_ROW:  # a prompt of padding is not kept
            self.rows.kv_lens[PAD_ROW] = 0
        if needs.penalised:
            self.rows.count(rows, next_tokens[:, None], ends[:, None])
        self.agreement.commit(next_tokens[:, None], ends.to(torch.int32))
        prompt = self._prompt_logprobs(batch, chunks, states.hidden, next_tokens)
        logprobs, copy, pooled = None, HostCopy(), {}
        if self.reads_results:
            copy = HostCopy(next_tokens)
            if logits is not None:
                logprobs = copy_logprobs(logits, next_tokens, int(batch.top_logprobs.max(initial=-1)), mask=mask)
                pooled = pool_chunks(batch, states.hidden, last, logits)
        sampling = batch.next_tokens < 0
        followed = ExtendPass(chunks, next_tokens, states, needs, batch.prompt_rows[sampling], batch.defers_first_drafts)
        return followed, PromptsPending(sampling, copy, logprobs, prompt, pooled)

    def extend(self, batch: ScheduleBatch) -> tuple[ExtendPass, PromptsPending]:
        """Run a step that has only prompt chunks."""
        chunks = self.stage_chunks(batch, self.stage_rows(batch)[0])
        return self.sample_next(batch, chunks, self.run(chunks)[0])

    def _prompt_logprobs(
        self, batch: ScheduleBatch, chunks: Chunks, hidden: torch.Tensor, next_tokens: torch.Tensor
    ) -> dict[int, LogprobCopy]:
        """Log-probabilities of the token after each prompt token, for chunks that request them, at most `LOGPROB_CHUNK` positions at a
        time.
        """
        found: dict[int, LogprobCopy] = {}
        for i in np.flatnonzero(batch.prompt_logprobs).tolist():
            chunk = batch.chunk(i)
            following = torch.cat([chunks.batch.input_ids[chunk][1:], next_tokens[i : i + 1]])
            pieces = zip(hidden[chunk].split(LOGPROB_CHUNK), following.split(LOGPROB_CHUNK), strict=True)
            k = max(int(batch.top_logprobs[i]), 0)
            parts = [top_logprobs(self.runner.model.logits(piece), ids, k) for piece, ids in pieces]
            if self.reads_results:
                found[i] = LogprobCopy(*(torch.cat(column) for column in zip(*parts, strict=True)))
        return found


@dataclass(frozen=True, slots=True)
class PromptsPending:
    """Tokens of prompt chunks on their way to the host. `ends`: bool [E], on the host, whether a token was sampled."""

    ends: np.ndarray
    tokens: HostCopy
    logprobs: LogprobCopy | None
    prompt_logprobs: dict[int, LogprobCopy]
    pooled: dict[int, HostCopy]

    def wait(self) -> BatchResult:
        """Wait for the copies."""
        (tokens,) = self.tokens.wait()
        return BatchResult(
            token_ids=tokens[self.ends].astype(np.int32),
            accept_lens=self.ends.astype(np.int32),
            logprobs=None if self.logprobs is None else self.logprobs.wait(self.ends),
            prompt_logprobs={i: copy.wait() for i, copy in self.prompt_logprobs.items()},
            pooled={i: copy.wait()[0].astype(np.float32) for i, copy in self.pooled.items()},
        )
