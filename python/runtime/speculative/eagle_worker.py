"""EagleWorker: the drafter with a draft model: an EAGLE or MTP head, or a standalone model.

Per request row and iteration:

    draft-decode   a graph of the draft's one-token passes from the last committed token on: the window of drafts
    (verify and accept: the target)
    draft-extend   a graph of the draft over the whole window with the target's states: draft KV of the committed
                   tokens, and the first guesses of the next iteration

Both graph runners are the drafter's own and have their own memory reservations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from runtime.batch import Int32
from runtime.config.runtime_config import SpeculativeConfig
from runtime.layers.attention.base import plan_pass
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.sampling_tables import SamplingNeeds
from runtime.model_executor.draft_window import DraftWindow, TreeShape
from runtime.model_executor.drafter import DrafterSpec, DraftSetup
from runtime.model_executor.grammar_rows import GrammarStep
from runtime.model_executor.graph_runner import Forward, GraphRunner, Outputs, RunnerSpec
from runtime.model_executor.iteration import CommittedWindow, Iteration
from runtime.model_executor.model_runner import ModelRunner
from runtime.model_executor.target_model import ExtendPass
from runtime.models.draft_head import DraftModel
from runtime.speculative.catch_up import WIDTH, catch_up_spec
from runtime.speculative.draft_passes import GREEDY, KV_ONLY, SAMPLED, DraftPasses, decode_spec, extend_spec, variants
from runtime.speculative.draft_state import DraftState, start_chain, store_guesses
from runtime.speculative.draft_tree import cut_tree, start_tree
from runtime.speculative.model_drafter import ModelDrafter, ReadStates, restricting_grammar


class EagleWorker(ModelDrafter):
    """The drafter of a `DraftModel`.

    Attributes:
        state: hidden states and first guesses, by request row.
    """

    def __init__(self, model: DraftModel, runner: ModelRunner, config: SpeculativeConfig) -> None:
        self.model = model
        spec = DrafterSpec(
            shape=TreeShape(config.num_steps, config.topk, config.num_draft_tokens),
            prefix_lookahead=model.lookahead,
            capturable=config.topk == 1,
            aux_layers=model.aux_layers,
            feature_width=model.feature_width,
            catch_up=WIDTH,
            to_target=model.to_target,
            to_draft=model.to_draft,
        )
        super().__init__(spec, runner, config)
        self.state: DraftState
        self._passes: dict[int, DraftPasses] = {}

    # ---- build

    def attach(self, setup: DraftSetup) -> None:
        """Allocate the draft's state and a KV pool of one page, and make the graph runners."""
        target, model, topk = setup.target, self.model, self.spec.shape.topk
        rows = len(target.rows.kv_lens)
        self.state = DraftState(rows, topk, model.hidden_width, model.vocab_size, model.hidden_dtype, target.device)
        super().attach(setup)

    def _decode_runner(self, setup: DraftSetup, depth: int) -> GraphRunner | None:
        shape, model, target = self.spec.shape.at_depth(depth), self.model, setup.target
        passes = DraftPasses(model, shape, target.rows, self.state, target.page_table, setup.inputs)
        self._passes[depth] = passes
        count = depth - model.lookahead
        if count == 0:
            return None
        spec = decode_spec(shape, self.spec.shape.num_steps, model.vocab_size, model.kernel_launches, count)
        return setup.make_runner(spec, passes.function(), self.runner, setup.depths[depth], self._config.draft_decode_graph)

    def _extend_spec(self, depth: int) -> RunnerSpec:
        full, model = self.spec.shape, self.model
        if depth == 0:
            return catch_up_spec((*variants(full), KV_ONLY), model.kernel_launches)
        return extend_spec(full, full.at_depth(depth), model.feature_width, self.runner.dtype, model.kernel_launches)

    def _extend_forward(self, states: ReadStates, width: int) -> Forward:
        draft, state, inputs, tables = self.model, self.state, self._inputs, self._target.rows.tables
        offsets = torch.arange(inputs.max_requests, device=inputs.device) * width - 1

        def forward(batch: ForwardBatch, outputs: Outputs, variant: str) -> None:
            rows, accept_lens = batch.req_pool_indices, inputs.named("accept_lens", batch.batch_size)
            last = offsets[: batch.batch_size] + accept_lens
            guesses = bool(draft.lookahead) and variant != KV_ONLY
            hidden = draft.forward(replace(batch, hidden_states=states(batch)), last if guesses else last[:0])
            if guesses:
                positions = (inputs.kv_lens(batch.batch_size) + accept_lens).to(torch.int64) + 1 if variant == SAMPLED else None
                state.hidden[rows] = hidden
                store_guesses(state, draft, hidden, tables, rows, positions)

        return forward

    def warmup_runs(self) -> list[Callable[[], object]]:
        """Runs that compile the kernels of catch-up, and the attention kernels of the draft's passes at every depth."""
        runs = super().warmup_runs()
        for depth, batches in self._depths.items():
            shape, backend = self.spec.shape.at_depth(depth), self.runner.backend
            if depth:
                runs += backend.warmup_runs(batches.tuned, shape.topk, shape.topk > 1)
            if batches.tuned:
                runs += backend.warmup_runs(batches.tuned, shape.num_draft_tokens if depth else WIDTH, tree=False)
        return runs

    # ---- steps; outside graphs, except the runners' functions

    def reset(self) -> None:
        """Forget every request."""
        self.state.reset()
        super().reset()

    def before_iteration(self, rows: Int32, bounds: Int32, depth: int, needs: SamplingNeeds) -> int:
        """Run the catch-up window if one is due, with guesses if drafts follow or if the depth controller needs some of greedy requests."""
        if self.catch_up is None:
            return 0
        guesses = depth > 0 or (bool(self._config.depths) and needs.any_greedy and self.catch_up.guesses_next)
        return self.catch_up.before_iteration(rows, bounds, depth, self._variant(needs) if guesses else KV_ONLY)

    def guesses(self, rows: torch.Tensor) -> torch.Tensor | None:
        """The first guesses of `rows`, int64 [B], if the latest catch-up window computed some to compare; else None."""
        known = self.model.lookahead and bool(self._config.depths) and self.catch_up is not None and self.catch_up.guessed
        return self.state.guesses[rows, 0] if known else None

    def row_state(self, needs: SamplingNeeds) -> list[torch.Tensor]:
        """The state that draft-extend writes."""
        state = self.state
        return [state.hidden, state.guesses, state.scores, *([state.probs] if self._variant(needs) == SAMPLED else [])]

    def propose(self, iteration: Iteration) -> DraftWindow:
        """Run draft-decode."""
        if iteration.depth == 0:
            return iteration.no_drafts
        runner, passes, grammar = self.decode.get(iteration.depth), self._passes[iteration.depth], restricting_grammar(iteration)
        if runner is None:
            return self._first_window(iteration, passes, grammar)
        outputs = self._decode(iteration, runner, None if grammar is None else passes.function(grammar))
        return DraftWindow(**outputs)

    def _first_window(self, iteration: Iteration, passes: DraftPasses, grammar: GrammarStep | None) -> DraftWindow:
        """The window of the last token and the first guess or branches: the whole window if K = 1."""
        state, rows, sampled = self.state, iteration.rows, self._variant(iteration.needs) == SAMPLED
        if self.spec.shape.topk > 1:
            return cut_tree(start_tree(*passes.first_branches(rows, grammar)), iteration.last_tokens, self.spec.shape)
        tokens = torch.empty((iteration.size, 2), dtype=torch.int64, device=rows.device)
        hidden = start_chain(rows, self._target.rows.last_tokens, state, tokens)
        probs = state.probs[rows] if sampled else None
        if grammar is not None:
            positions = iteration.kv_lens.to(torch.int64) + 1 if sampled else None
            token, guessed = passes.guess(hidden, rows, positions, tokens[:, 1:1], grammar)
            tokens[:, 1].copy_(token)
            probs = probs if guessed is None else guessed
        return DraftWindow(tokens, probs=None if probs is None else probs[:, None])

    def _followed(self, committed: CommittedWindow) -> torch.Tensor:
        """The committed tokens; with lookahead shifted by one, so that each position has the token after it."""
        return committed.result.tokens if self.model.lookahead else committed.window.tokens

    def follow_prompt(self, extend: ExtendPass) -> None:
        """Run the draft over prompt chunks.

        With lookahead each position has the token after it; the last one has the sampled token, or the first of the next chunk. If no
        chunk ends a prompt, or if the first drafts are deferred, only KV is written.
        """
        batch, rows, last, state = extend.chunks.batch, extend.chunks.batch.req_pool_indices, extend.chunks.last, self.state
        if not self.model.lookahead:
            plan_pass(self.runner.backend, batch)
            self.model.forward(batch, last[:0])
            return
        tokens = torch.cat([batch.input_ids[1:], batch.input_ids[:1]])
        tokens[last] = extend.next_tokens
        in_groups = self._target.runner.model.context.exchange is not None  # all groups run the same layers
        later = self.catch_up if extend.deferred and not in_groups else None
        drafting = in_groups or len(extend.ended) > 0  # a chunk in the middle of a prompt needs no first draft, now or later
        batch = replace(batch, input_ids=tokens, hidden_states=extend.states.features)
        plan_pass(self.runner.backend, batch)
        hidden = self.model.forward(batch, last if drafting and later is None else last[:0])
        if not drafting:
            return
        # A greedy request may later be verified together with sampled ones, but not with the probabilities of the
        # row's previous owner.
        state.probs.index_fill_(0, rows, 0.0)
        if later is not None:
            later.add_prompts(extend.ended, rows, batch.positions[last], extend.next_tokens, extend.states.features[last])
            return
        state.hidden[rows] = hidden
        positions = None if extend.needs.all_greedy else batch.seq_lens.to(torch.int64) + 1
        store_guesses(state, self.model, hidden, self._target.rows.tables, rows, positions)

    def _variant(self, needs: SamplingNeeds) -> str:
        return GREEDY if needs.all_greedy or self.spec.shape.topk > 1 else SAMPLED
