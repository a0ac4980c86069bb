"""EagleWorker: draft, verify, draft-extend; one Worker made of two ModelRunners and their graph runners.

One iteration, for B requests with K steps and a window of D tokens:

    draft decode   the draft's one-token passes from the first guess  -> drafts [B, D]          (graph)
    verify         one target pass over the window                    -> logits, features       (graph)
    accept         1..K + 1 tokens per request, on the device         -> accept_lens, tokens
    draft extend   one draft pass over the same window                -> first guesses          (graph)

Nothing here waits for the device: lengths, accepted tokens and guesses stay in rows, and the host reads tokens one iteration later. Draft
KV length equals target KV length after every iteration: both are `RequestRows.kv_lens`, both pools share slots, and draft-extend writes
whatever verify wrote.

An iteration of more requests than drafting pays for is paused (`Verifier.pause`): no draft decode, and windows of the last token alone. It
is a plain decode step, after which draft-extend keeps the draft's KV as long as the target's and the first guesses up to date, so that
the next iteration of fewer requests drafts as if there had been no pause.

A draft that is a model of its own (STANDALONE) runs the same four phases; it reads the token at a position where an EAGLE head reads the
one after it (`DraftModel.lookahead`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from runtime.batch import ScheduleBatch, WorkerLimits
from runtime.layers.attention.base import plan_pass
from runtime.layers.sampling_tables import SamplingTables
from runtime.model_executor.device_queue import Finish
from runtime.model_executor.device_worker import DeviceWorker
from runtime.model_executor.graph_runner import GraphRunner, Outputs
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.model_runner import ModelRunner
from runtime.model_executor.profiler import span
from runtime.model_executor.request_rows import RequestRows
from runtime.model_executor.target import ExtendPass, Target, joined
from runtime.model_executor.window import fill_window
from runtime.models.draft_head import DraftModel
from runtime.speculative.draft_decode_graph_runner import GREEDY, SAMPLED
from runtime.speculative.draft_rows import DraftRows, first_guesses
from runtime.speculative.draft_tree import TreeShape, begin, select
from runtime.speculative.verifier import Accepted, Iteration, Verifier


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft side.

    Attributes:
        decode: None where there is nothing to do between the first guess and verify (an EAGLE head with K = 1).
        extend, paused_extend: over windows of D tokens, and of one; None where drafting never pauses.
    """

    runner: ModelRunner
    model: DraftModel
    rows: DraftRows
    shape: TreeShape
    decode: GraphRunner | None
    extend: GraphRunner
    paused_extend: GraphRunner | None = None


def draft_prompt(draft: Draft, tables: SamplingTables, done: ExtendPass) -> None:
    """The draft follows over a prompt that the target ran.

    With lookahead each position carries the token after it, the last one the sampled or next one.
    """
    batch = done.batch
    if draft.model.lookahead:
        tokens = torch.cat([batch.input_ids[1:], batch.input_ids[:1]])
        tokens[done.last] = done.next_tokens
        batch = replace(batch, input_ids=tokens, hidden_states=done.hidden if done.aux is None else done.aux)
    plan_pass(draft.runner.backend, batch)
    hidden = draft.model.forward(batch, done.last)
    if draft.model.lookahead:
        draft.rows.hidden[done.rows] = hidden
        # A greedy request may meet sampled ones later and be verified with them: not with what the row's last owner left.
        draft.rows.probs.index_fill_(0, done.rows, 0.0)
        positions = None if done.needs.all_greedy else batch.seq_lens.to(torch.int64) + 1
        first_guesses(draft.rows, draft.model, hidden, tables, done.rows, positions)


def first_window(draft: Draft, target: RequestRows, rows: torch.Tensor) -> Outputs:
    """A window of the last token and what draft-extend guessed after it, for request rows int64 [B]: all there is where K = 1."""
    state, last = draft.rows, target.last_tokens[rows]
    if draft.shape.topk == 1:
        return {"tokens": torch.stack([last, state.tokens[rows, 0]], dim=1), "probs": state.probs[rows][:, None]}
    tree = select(begin(state.tokens[rows], state.scores[rows]), last, draft.shape)
    return {"tokens": tree.tokens, "parents": tree.parents, "depths": tree.depths, "mask": tree.mask}


class EagleWorker(DeviceWorker):
    """A `Worker` that commits 1 to K + 1 tokens per request and step.

    Attributes:
        verifier: decides what stands, and counts it.
    """

    def __init__(
        self, target: Target, draft: Draft, verifier: Verifier, inputs: InputBuffers, limits: WorkerLimits, facts: dict[str, object]
    ) -> None:
        paused = None if verifier.pause is None else verifier.pause.runner
        runners = (draft.decode, verifier.runner, draft.extend, paused, draft.paused_extend)
        super().__init__(target, tuple(r for r in runners if r is not None), limits, facts)
        self._draft, self.verifier, self._inputs = draft, verifier, inputs

    def info(self) -> dict[str, object]:
        """What was chosen and measured at start, and acceptance since."""
        return {**super().info(), "acceptance": self.verifier.info()}

    def _forget(self) -> None:
        self._target.reset()
        self._draft.rows.reset()
        self.verifier.forget()

    # ---- steps; all of it outside graphs but for the runners' functions

    def _step(self, batch: ScheduleBatch) -> Finish:
        live = batch.num_decodes
        chunks, rows = self._target.stage_rows(batch, self.verifier.padded_size(live) if live else 0)
        if batch.num_prompts == 0:
            return self._iterate(batch, rows)
        if live:
            return self._mix(batch, chunks, rows)
        done, result = self._target.extend(batch, chunks, self._draft.model.aux_layers)
        self._draft_prompt(done)
        return result.collect

    def _draft_prompt(self, done: ExtendPass) -> None:
        draft_prompt(self._draft, self._target.rows.tables, done)

    def _iterate(self, batch: ScheduleBatch, rows: torch.Tensor) -> Finish:
        turn = self.verifier.begin(batch, rows)
        variant = self._variant(turn)
        with span("draft_decode"):
            drafted = self._run_decode(turn, variant)
        with span("verify"):
            accepted, flight = self.verifier.judge(turn, drafted)
        with span("draft_extend"):
            self._run_extend(turn, accepted, variant)
        return lambda: self.verifier.collect(flight)

    def _mix(self, batch: ScheduleBatch, chunks: torch.Tensor, rows: torch.Tensor) -> Finish:
        """Prompt chunks, and an iteration of the decode rows, whose windows are verified in the same pass."""
        turn = self.verifier.begin(batch, rows)
        variant = self._variant(turn)
        with span("draft_decode"):
            drafted = self._run_decode(turn, variant)
        windows = self.verifier.windows(turn, drafted)
        with span("extend_and_verify"):
            done, result = self._target.extend(batch, chunks, self._draft.model.aux_layers, windows)
            accepted, flight = self.verifier.accept(turn, drafted, windows)
        with span("draft_prompt"):
            self._draft_prompt(done)
        with span("draft_extend"):
            self._run_extend(turn, accepted, variant)
        return joined(result.collect, lambda: self.verifier.collect(flight))

    def _variant(self, turn: Iteration) -> str:
        return GREEDY if turn.needs.all_greedy or self._draft.shape.topk > 1 else SAMPLED

    def _run_decode(self, turn: Iteration, variant: str) -> Outputs:
        draft, rows = self._draft, turn.rows
        if turn.paused:
            return self.verifier.bare_window(rows)
        if draft.decode is None:
            return first_window(draft, self._target.rows, rows)
        batch = draft.decode.batch(turn.size)
        batch.seq_len_bounds[:] = turn.bounds + draft.shape.topk
        torch.add(self._inputs.kv_lens(turn.size), draft.shape.topk, out=batch.seq_lens)
        return draft.decode.run(batch, variant, turn.oracle)[0]

    def _run_extend(self, turn: Iteration, accepted: Accepted, variant: str) -> None:
        draft, D = self._draft, turn.width
        runner = draft.paused_extend if turn.paused else draft.extend
        assert runner is not None, "iterations that may pause have a runner for it"
        batch, held = runner.batch(turn.size), runner.inputs(turn.size)
        batch.seq_len_bounds[:] = turn.bounds + D
        tokens = accepted.tokens if draft.model.lookahead else accepted.window
        fill_window(batch, self._target.page_table, self._inputs.kv_lens(turn.size), tokens)
        held["accept_lens"].copy_(accepted.accept_lens)
        features = accepted.features
        if accepted.path is not None:
            first = torch.arange(turn.size, device=features.device)[:, None] * D
            features = features[(first + accepted.path).flatten()]
        held["features"].copy_(features)
        runner.run(batch, variant, turn.feeds_oracle)
