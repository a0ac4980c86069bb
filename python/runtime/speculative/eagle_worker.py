"""EagleWorker: draft, verify, draft-extend; one Worker made of two ModelRunners and their graph runners.

One iteration, for B requests with K steps and a window of D tokens:

    draft decode   K - 1 draft passes from the first guess           -> drafts [B, D]          (graph)
    verify         one target pass over the window                   -> logits, features       (graph)
    accept         1..K + 1 tokens per request, on the device        -> accept_lens, tokens
    draft extend   one draft pass over the same window               -> first guesses          (graph)

Nothing here waits for the device: lengths, accepted tokens and guesses stay in rows, and the host reads tokens one iteration later. Draft KV length equals
target KV length after every iteration: both are `RequestRows.kv_lens`, both pools share slots, and draft-extend writes whatever verify wrote.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import torch

from runtime.batch import BatchResult, ForwardMode, Pending, ScheduleBatch, StepStats, WorkerLimits
from runtime.forward_batch import ForwardBatch
from runtime.layers.sampler import SamplingNeeds, Stream, adjust, target_probs, top_logprobs, uniforms
from runtime.model_executor.device_queue import DeviceQueue, Finish
from runtime.model_executor.graph_runner import Forward, GraphRunner, Outputs, RunnerSpec
from runtime.model_executor.input_buffers import BufferSpec, InputBuffers
from runtime.model_executor.model_runner import ModelRunner
from runtime.model_executor.profiler import Profiler, span
from runtime.model_executor.staging import HostCopy
from runtime.model_executor.target import ExtendPass, Target, to_logprobs
from runtime.model_executor.window import fill_window
from runtime.models.draft import DraftModel
from runtime.speculative.acceptance import AcceptanceCounters, DriftAlarm
from runtime.speculative.draft_decode_graph_runner import GREEDY, SAMPLED
from runtime.speculative.draft_rows import DraftRows, first_guesses
from runtime.speculative.draft_tree import TreeShape
from runtime.speculative.verify import (
    AcceptThresholds,
    DraftProbs,
    compaction,
    tree_targets_sampled,
    verify_chain_greedy,
    verify_chain_sampled,
    verify_chain_synthetic,
    verify_tree,
    verify_tree_synthetic,
)

log = logging.getLogger(__name__)
ORACLE_EVERY = 256
"""One iteration in so many runs eagerly, as the sample that the drift alarm compares graphs with."""


def verify_spec(shape: TreeShape, vocab: int, feature: int, dtype: torch.dtype, pool_bytes_per_token: int) -> RunnerSpec:
    """Outputs over the window: `logits` float32 [B * D, V], their argmax `tokens` int64 [B * D], `features` [B * D, feature] for the draft."""
    D = shape.num_draft_tokens
    return RunnerSpec(
        name="verify",
        mode=ForwardMode.TARGET_VERIFY,
        width=D,
        outputs=(
            BufferSpec("logits", "token", torch.float32, 0, (vocab,)),
            BufferSpec("tokens", "token", torch.int64, 0),
            BufferSpec("features", "token", dtype, 0, (feature,)),
        ),
        tree_tail=0 if shape.topk == 1 else D,
        pool_bytes_per_token=pool_bytes_per_token,
    )


def verify_forward(target: Target, aux_layers: tuple[int, ...]) -> Forward:
    """The function that the verify graph records."""
    model = target.runner.model

    def forward(batch: ForwardBatch, outputs: Outputs, variant: str) -> None:
        hidden, aux = model.forward(batch, aux_layers)
        logits = model.logits(hidden, out=outputs["logits"])
        torch.argmax(logits, dim=-1, out=outputs["tokens"])
        outputs["features"].copy_(hidden if aux is None else aux)

    return forward


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft side: its runner, model and rows, and how it drafts.

    Attributes:
        aux_layers: target layers whose states the draft reads (EAGLE-3); empty: the target's last hidden state.
        synthetic: float32 [K], acceptance forced by position, or None.
    """

    runner: ModelRunner
    model: DraftModel
    rows: DraftRows
    shape: TreeShape
    aux_layers: tuple[int, ...]
    thresholds: AcceptThresholds
    synthetic: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one verification committed. Device tensors, padding included.

    Attributes:
        accept_lens: int32 [B].
        tokens: int64 [B, D]: the committed tokens, then anything valid.
        path: int64 [B, D]: window index of each committed position (trees), or None for 0, 1, 2, …
    """

    accept_lens: torch.Tensor
    tokens: torch.Tensor
    path: torch.Tensor | None


class EagleWorker:
    """A `Worker` that commits 1 to K + 1 tokens per request and step."""

    def __init__(
        self,
        target: Target,
        draft: Draft,
        verify: GraphRunner,
        draft_decode: GraphRunner | None,
        draft_extend: GraphRunner,
        inputs: InputBuffers,
        limits: WorkerLimits,
        facts: dict[str, object],
    ) -> None:
        """`draft_decode` is None when K = 1."""
        self._target, self._draft, self._inputs = target, draft, inputs
        self._verify, self._draft_decode, self._draft_extend = verify, draft_decode, draft_extend
        self._limits, self._facts = limits, facts
        self._queue = DeviceQueue(self._step, target.device)
        self._profiler = Profiler("scheduler", target.device)
        K = draft.shape.num_steps
        self._counters = {False: AcceptanceCounters(K), True: AcceptanceCounters(K)}
        self._alarm = DriftAlarm(K)
        self._iterations = 0

    # ---- Worker

    @property
    def limits(self) -> WorkerLimits:
        """What the device side can hold."""
        return self._limits

    def submit(self, batch: ScheduleBatch) -> Pending:
        """Queue one step and return at once."""
        return self._queue.submit(batch)

    def info(self) -> dict[str, object]:
        """What was chosen and measured at start, and acceptance since."""
        drift = [{"position": d.position, "graph": d.graph, "eager": d.eager, "z": d.z} for d in self._alarm.check()]
        return {
            **self._facts,
            "acceptance": {"graph": self._counters[False].to_json(), "eager_sample": self._counters[True].to_json(), "drift": drift},
        }

    def start_profile(self, folder: str) -> None:
        """Begin a torch trace."""
        self._queue.run(lambda: self._profiler.start(folder))

    def stop_profile(self) -> str:
        """End the trace; returns its file."""
        return str(self._queue.run(self._profiler.stop))

    def close(self) -> None:
        """Finish what is under way."""
        self._queue.close()

    # ---- steps; all of it outside graphs but for the runners' functions

    def _step(self, batch: ScheduleBatch) -> Finish:
        if batch.mode is ForwardMode.EXTEND:
            done, result = self._target.extend(batch, self._draft.aux_layers)
            self._draft_prompt(done)
            return result.collect
        return self._iterate(batch)

    def _draft_prompt(self, done: ExtendPass) -> None:
        """The draft follows over the prompt: each position carries the token after it, the last one the sampled or next prompt token."""
        draft = self._draft
        tokens = torch.cat([done.batch.input_ids[1:], done.batch.input_ids[:1]])
        tokens[done.last] = done.next_tokens
        features = draft.model.project(done.hidden if done.aux is None else done.aux)
        batch = replace(done.batch, input_ids=tokens, hidden_states=features)
        draft.runner.backend.plan(batch)
        hidden = draft.model.forward(batch)[done.last]
        draft.rows.hidden[done.rows] = hidden
        positions = batch.seq_lens.to(torch.int64) + 1
        sampled = not done.needs.all_greedy
        first_guesses(
            draft.rows, draft.model.logits(hidden), draft.model.to_target, self._target.rows.tables, done.rows, positions, sampled
        )

    def _iterate(self, batch: ScheduleBatch) -> Finish:
        target, state = self._target, self._target.rows
        needs = state.needs(batch.rows)
        variant = GREEDY if needs.all_greedy or self._draft.shape.topk > 1 else SAMPLED
        size = self._verify.size_for(batch.size)
        self._iterations += 1
        oracle = self._iterations % ORACLE_EVERY == 0
        rows = target.stage_rows(batch, size)
        kv_lens = self._inputs.kv_lens(size)
        kv_lens.copy_(state.kv_lens[rows])
        bounds = np.zeros(size, dtype=np.int32)
        bounds[: batch.size] = batch.len_bounds
        with span("draft_decode"):
            drafted = self._run_draft_decode(rows, bounds, variant, oracle)
        with span("verify"):
            window, verified, replayed = self._run_verify(rows, bounds, drafted, oracle)
        with span("accept"):
            accepted = self._accept(rows, drafted, verified, needs, batch.size)
            finish = self._commit(batch, rows, accepted, window, verified, needs)
        with span("draft_extend"):
            self._run_draft_extend(rows, bounds, accepted, verified, variant, oracle)
        D = self._draft.shape.num_draft_tokens
        stats = StepStats(graph=replayed, padded_size=size, draft_tokens=D - 1, oracle=oracle)
        return lambda: self._collect(finish, stats)

    def _run_draft_decode(self, rows: torch.Tensor, bounds: np.ndarray, variant: str, oracle: bool) -> Outputs:
        size, draft = len(rows), self._draft
        if self._draft_decode is None:
            tokens = torch.stack([self._target.rows.last_tokens[rows], draft.rows.tokens[rows, 0]], dim=1)
            return {"tokens": tokens, "probs": draft.rows.probs[rows][:, None]}
        batch = self._draft_decode.batch(size)
        batch.req_pool_indices.copy_(rows)
        batch.seq_len_bounds[:] = bounds + draft.shape.topk
        torch.add(self._inputs.kv_lens(size), draft.shape.topk, out=batch.seq_lens)
        return self._draft_decode.run(batch, variant, oracle)[0]

    def _run_verify(self, rows: torch.Tensor, bounds: np.ndarray, drafted: Outputs, oracle: bool) -> tuple[ForwardBatch, Outputs, bool]:
        size, D = len(rows), self._draft.shape.num_draft_tokens
        batch = self._verify.batch(size)
        batch.req_pool_indices.copy_(rows)
        batch.seq_len_bounds[:] = bounds + D
        fill_window(batch, self._target.page_table, self._inputs.kv_lens(size), drafted["tokens"], drafted.get("depths"))
        if batch.tree_mask is not None:
            batch.tree_mask.copy_(drafted["mask"].flatten())
        outputs, replayed = self._verify.run(batch, oracle=oracle)
        return batch, outputs, replayed

    def _run_draft_extend(
        self, rows: torch.Tensor, bounds: np.ndarray, accepted: Accepted, verified: Outputs, variant: str, oracle: bool
    ) -> None:
        size, D = len(rows), self._draft.shape.num_draft_tokens
        batch = self._draft_extend.batch(size)
        held = self._draft_extend.outputs(size)
        batch.req_pool_indices.copy_(rows)
        batch.seq_len_bounds[:] = bounds + D
        fill_window(batch, self._target.page_table, self._inputs.kv_lens(size), accepted.tokens)
        held["accept_lens"].copy_(accepted.accept_lens)
        features = verified["features"]
        if accepted.path is not None:
            first = torch.arange(size, device=rows.device)[:, None] * D
            features = features[(first + accepted.path).flatten()]
        held["features"].copy_(features)
        self._draft_extend.run(batch, variant, oracle)

    # ---- acceptance

    def _accept(self, rows: torch.Tensor, drafted: Outputs, verified: Outputs, needs: SamplingNeeds, live: int) -> Accepted:
        """Which drafts stand. Padding rows come out as valid as any."""
        draft, D = self._draft, self._draft.shape.num_draft_tokens
        tokens, target = drafted["tokens"], verified["tokens"].view(-1, D)
        positions = self._positions(drafted)
        plain = needs.all_greedy and not needs.adjusts
        probs = None
        if not plain:
            logits = self._adjusted(rows, drafted, verified, needs, live, positions)
            target = logits.argmax(-1)
            if not needs.all_greedy:
                flat = logits.flatten(0, 1)
                probs = target_probs(flat, self._target.rows.tables, rows.repeat_interleave(D), needs.filtered).view_as(logits)
        if draft.shape.topk > 1:
            return self._accept_tree(rows, drafted, target, probs, positions)
        if draft.synthetic is not None:
            u = self._uniforms(rows, positions[:, :-1], Stream.SYNTHETIC)
            return Accepted(*verify_chain_synthetic(tokens, target, draft.synthetic, u, self._limits.vocab_size), None)
        if probs is None:
            return Accepted(*verify_chain_greedy(tokens, target), None)
        to_target, to_draft = draft.model.to_target, draft.model.to_draft
        q = DraftProbs(drafted["probs"], to_target, to_draft)
        accept = self._uniforms(rows, positions[:, :-1], Stream.ACCEPT)
        final = self._uniforms(rows, positions, Stream.TARGET)
        return Accepted(*verify_chain_sampled(tokens, probs, accept, final, q, draft.thresholds), None)

    def _accept_tree(
        self, rows: torch.Tensor, drafted: Outputs, target: torch.Tensor, probs: torch.Tensor | None, positions: torch.Tensor
    ) -> Accepted:
        draft, K, D = self._draft, self._draft.shape.num_steps, self._draft.shape.num_draft_tokens
        tokens, parents = drafted["tokens"], drafted["parents"]
        if probs is not None:
            accept = self._uniforms(rows, positions, Stream.ACCEPT)
            final = self._uniforms(rows, positions, Stream.TARGET)
            target = tree_targets_sampled(tokens, parents, probs, final, accept, draft.thresholds)
        if draft.synthetic is not None:
            first = self._inputs.kv_lens(len(rows)).to(torch.int64)[:, None] + 1
            u = self._uniforms(rows, first + torch.arange(K, device=rows.device), Stream.SYNTHETIC)
            path, lens, out = verify_tree_synthetic(tokens, parents, target, draft.synthetic, u, self._limits.vocab_size)
        else:
            path, lens, out = verify_tree(tokens, parents, target, K + 1)
        return Accepted(lens, _widen(out, D), _widen(path, D))

    def _positions(self, drafted: Outputs) -> torch.Tensor:
        """int64 [B, D]: where the token chosen at each window position will stand."""
        tokens = drafted["tokens"]
        depths = drafted.get("depths")
        if depths is None:
            depths = torch.arange(tokens.shape[1], device=tokens.device)
        return self._inputs.kv_lens(len(tokens)).to(torch.int64)[:, None] + depths + 1

    def _uniforms(self, rows: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
        return uniforms(self._target.rows.tables.seeds[rows][:, None], positions, stream)

    def _adjusted(
        self, rows: torch.Tensor, drafted: Outputs, verified: Outputs, needs: SamplingNeeds, live: int, positions: torch.Tensor
    ) -> torch.Tensor:
        """float32 [B, D, V]: logits after penalties that count the drafts before each position as if they stood."""
        D = self._draft.shape.num_draft_tokens
        logits = verified["logits"].view(len(rows), D, -1)
        path = _ancestor_tokens(drafted["tokens"], drafted.get("mask")) if needs.penalised else None
        return adjust(logits, self._target.rows.tables, rows, positions, needs, path)

    def _commit(
        self, batch: ScheduleBatch, rows: torch.Tensor, accepted: Accepted, window: ForwardBatch, verified: Outputs, needs: SamplingNeeds
    ) -> tuple[HostCopy, HostCopy | None]:
        """Move accepted KV to the front (trees), set the rows, and send tokens to the host."""
        state, live, D = self._target.rows, batch.size, self._draft.shape.num_draft_tokens
        lens = accepted.accept_lens[:live]
        tokens = accepted.tokens[:live]
        if accepted.path is not None:
            slots = window.out_cache_loc.view(-1, D)[:live]
            self._target.runner.kv_pool.move(*compaction(slots, accepted.path[:live], lens))
        rows = rows[:live]
        state.kv_lens[rows] = self._inputs.kv_lens(live) + lens
        state.last_tokens[rows] = tokens.gather(1, lens.to(torch.int64)[:, None] - 1)[:, 0]
        if needs.penalised:
            state.count(rows, tokens, torch.arange(D, device=rows.device) < lens[:, None])
        k = int(batch.top_logprobs.max(initial=-1))
        logprobs = None
        if k >= 0:
            index = torch.arange(live, device=rows.device)[:, None] * D
            index = index + (torch.arange(D, device=rows.device) if accepted.path is None else accepted.path[:live])
            logprobs = HostCopy(*top_logprobs(verified["logits"][index.flatten()], tokens.flatten(), k))
        return HostCopy(tokens, lens), logprobs

    def _collect(self, finish: tuple[HostCopy, HostCopy | None], stats: StepStats) -> BatchResult:
        """On the host, one iteration later."""
        tokens, lens = finish[0].wait()
        keep = np.arange(tokens.shape[1])[None] < lens[:, None]
        self._counters[stats.oracle].add(lens)
        self._alarm.add(lens, stats.oracle)
        if stats.oracle:
            for drift in self._alarm.check():
                log.warning(
                    "acceptance of draft %d is %.3f through graphs and %.3f eager (z = %.1f): a graph reads stale inputs; "
                    "restart with --disable-cuda-graph and report it",
                    drift.position + 1, drift.graph, drift.eager, drift.z,
                )  # fmt: skip
        return BatchResult(
            token_ids=tokens[keep].astype(np.int32),
            accept_lens=lens.astype(np.int32),
            logprobs=to_logprobs(finish[1], keep.flatten()) if finish[1] is not None else None,
            stats=stats,
        )


def _widen(path: torch.Tensor, width: int) -> torch.Tensor:
    """[B, N] -> [B, width], cut or padded with column 0: rows past the accepted ones only have to be valid."""
    if path.shape[1] >= width:
        return path[:, :width]
    return torch.cat([path, path[:, :1].expand(-1, width - path.shape[1])], dim=1)


def _ancestor_tokens(tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """int64 [B, D, D]: for each window position the drafts at and before it on its path, -1 elsewhere. The root is committed already."""
    D = tokens.shape[1]
    index = torch.arange(D, device=tokens.device)
    on_path = (index[None] <= index[:, None])[None] if mask is None else ((mask[:, :, None] >> index) & 1).bool()
    return torch.where(on_path & (index > 0), tokens[:, None], -1)
