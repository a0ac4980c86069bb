"""EagleWorker: the drafter with a draft model, an EAGLE head or a small model of its own.

Per request row and iteration:

    draft-decode   a graph of the draft's one-token passes from the last committed token on: the window of drafts
    (verify and accept: the target)
    draft-extend   a graph of the draft over the whole window with the target's states: draft KV of the committed
    tokens,
                   and the first guesses of the next iteration

Both graph runners are the drafter's own and have their own memory reservations. The draft has a KV pool over the
target's page table, so its KV length is always the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from runtime.batch import Int32, RowInit
from runtime.config.runtime_config import SpeculativeConfig
from runtime.layers.attention.base import plan_pass
from runtime.layers.sampling_tables import SamplingNeeds
from runtime.model_executor.depth import DepthBatches
from runtime.model_executor.draft_window import DraftWindow, TreeShape
from runtime.model_executor.drafter import Drafter, DrafterSpec, DraftSetup, ModelPasses
from runtime.model_executor.grammar_rows import GrammarStep
from runtime.model_executor.graph_runner import GraphRunner
from runtime.model_executor.iteration import Accepted, Iteration
from runtime.model_executor.model_runner import ModelRunner
from runtime.model_executor.target_model import ExtendPass, TargetModel
from runtime.model_executor.window import fill_window
from runtime.models.draft_head import DraftModel
from runtime.speculative.catch_up import WIDTH, CatchUp, HeldStates, catch_up_spec
from runtime.speculative.draft_decode_graph_runner import GREEDY, SAMPLED, DraftPasses, draft_decode_spec
from runtime.speculative.draft_extend_graph_runner import KV_ONLY, draft_extend_forward, draft_extend_spec
from runtime.speculative.draft_state import DraftState, first_guesses
from runtime.speculative.draft_tree import begin, select


@dataclass(frozen=True, slots=True)
class DraftRunners:
    """The draft's graph runners at one depth. `decode` is None where the first guess is all there is to draft."""

    passes: DraftPasses
    decode: GraphRunner | None
    extend: GraphRunner


class EagleWorker(Drafter):
    """Owner of the draft model's runner, its state by request row, and its graph runners at every depth.

    Attributes:
        runner: weights, KV pool and attention backend of the draft.
        state: hidden states and first guesses, by request row.
        graphs: by depth, from 1 on.
        catch_up: follows steps without drafts; None where all have some.
    """

    def __init__(self, model: DraftModel, runner: ModelRunner, config: SpeculativeConfig) -> None:
        self.model, self.runner, self._config = model, runner, config
        self.spec = DrafterSpec(
            shape=TreeShape(config.num_steps, config.topk, config.num_draft_tokens),
            prefix_lookahead=model.lookahead,
            capturable=config.topk == 1,
            aux_layers=model.aux_layers,
            feature_width=model.input_width,
            catch_up=WIDTH,
            to_target=model.to_target,
            to_draft=model.to_draft,
        )
        self.state: DraftState
        self.graphs: dict[int, DraftRunners] = {}
        self.catch_up: CatchUp | None = None
        self._target: TargetModel

    # ---- build

    def attach(self, setup: DraftSetup) -> None:
        """Allocate the draft's state and a KV pool of one page, and make the graph runners."""
        target, model, topk = setup.target, self.model, self.spec.shape.topk
        self._target, self._depths = target, setup.depths
        rows = len(target.rows.kv_lens)
        self.state = DraftState(rows, topk, model.hidden_width, model.vocab_size, model.hidden_dtype, target.device)
        self.runner.allocate(1, target.page_table, setup.requests, self._width, self._plans)
        self.graphs = {depth: self._make_runners(setup, depth, batches) for depth, batches in setup.depths.items() if depth}
        if 0 in setup.depths:
            self.catch_up = self._make_catch_up(setup)

    def _make_catch_up(self, setup: DraftSetup) -> CatchUp:
        target, inputs, model = setup.target, setup.inputs, self.model
        held = HeldStates(len(target.rows.kv_lens), model.input_width, self.runner.dtype, inputs)
        forward = draft_extend_forward(model, target.rows, self.state, inputs, held.states)
        variants = (GREEDY, SAMPLED) if self.spec.shape.topk == 1 else (GREEDY,)
        spec = catch_up_spec((*variants, KV_ONLY), model.kernel_launches)
        runner = setup.make_runner(spec, forward, self.runner, setup.depths[0], self._config.draft_extend_graph)
        return CatchUp(target, inputs, held, runner)

    def _make_runners(self, setup: DraftSetup, depth: int, batches: DepthBatches) -> DraftRunners:
        full, shape, model, config = self.spec.shape, self.spec.shape.at_depth(depth), self.model, self._config
        rows, launches, passes, decode = setup.target.rows, model.kernel_launches, depth - model.lookahead, None
        drafting = DraftPasses(model, shape, rows, self.state, setup.target.page_table, setup.inputs)
        if passes > 0:
            spec = draft_decode_spec(shape, full.num_steps, model.vocab_size, launches, passes)
            decode = setup.make_runner(spec, drafting.forward, self.runner, batches, config.draft_decode_graph)
        spec = draft_extend_spec(full, shape, model.input_width, self.runner.dtype, launches)
        inputs = setup.inputs
        forward = draft_extend_forward(model, rows, self.state, inputs, lambda batch: inputs.named("features", batch.num_tokens))
        return DraftRunners(drafting, decode, setup.make_runner(spec, forward, self.runner, batches, config.draft_extend_graph))

    @property
    def _width(self) -> int:
        """Tokens per request of the draft's widest pass."""
        return max(self.spec.max_width, WIDTH if 0 in self._depths else 0)

    @property
    def _plans(self) -> int:
        """Passes per plan of the draft's backend."""
        return max(self.spec.shape.num_steps - self.model.lookahead, 1)

    def models(self) -> list[ModelPasses]:
        """The draft model."""
        graphs = [runner for depth in self._depths for runner in self.runners(depth)]
        return [ModelPasses(self.runner, graphs, self._width, self._plans)]

    def runners(self, depth: int) -> list[GraphRunner]:
        """Draft-decode, where there is one, and draft-extend."""
        if depth == 0:
            return [] if self.catch_up is None else [self.catch_up.runner]
        found = self.graphs[depth]
        return [found.extend] if found.decode is None else [found.decode, found.extend]

    def warmup_runs(self) -> list[Callable[[], object]]:
        """Attention of the draft's passes at every depth."""
        runs: list[Callable[[], object]] = []
        for depth, batches in self._depths.items():
            shape, backend = self.spec.shape.at_depth(depth), self.runner.backend
            if depth:
                runs += backend.warmup_runs(batches.tuned, shape.topk, shape.topk > 1)
            if batches.tuned:
                runs += backend.warmup_runs(batches.tuned, shape.num_draft_tokens if depth else WIDTH, tree=False)
        return runs

    def reset(self) -> None:
        """Forget every request."""
        self.state.reset()
        if self.catch_up is not None:
            self.catch_up.reset()

    # ---- steps; outside graphs but for the runners' functions

    def admit(self, new_rows: Sequence[RowInit]) -> None:
        """Nothing waits for the draft in these rows."""
        if self.catch_up is not None:
            self.catch_up.admit(new_rows)

    def before(self, rows: Int32, bounds: Int32, depth: int, needs: SamplingNeeds, eager: bool) -> int:
        """Follow steps without drafts, if it is time. Guesses are made only before drafts: they are a large part of a pass."""
        variant = self._variant(needs) if depth else KV_ONLY
        return 0 if self.catch_up is None else self.catch_up.before(rows, bounds, depth, variant, eager)

    def propose(self, iteration: Iteration) -> DraftWindow:
        """Run draft-decode."""
        if iteration.depth == 0:
            return self._target.last_tokens(iteration.rows)
        runners, topk = self.graphs[iteration.depth], self.spec.shape.topk
        runner, grammar = runners.decode, restricting(iteration)
        if runner is None:
            return self._first_window(iteration, runners.passes, grammar)
        batch = runner.batch(iteration.size)
        batch.seq_len_bounds[:] = iteration.bounds + topk
        torch.add(iteration.kv_lens, topk, out=batch.seq_lens)
        forward = None if grammar is None else runners.passes.constrained(grammar)
        outputs, _ = runner.run(batch, self._variant(iteration.needs), iteration.sample.taken, forward)
        if topk == 1:
            return DraftWindow(outputs["tokens"], probs=outputs["probs"])
        return DraftWindow(outputs["tokens"], outputs["parents"], outputs["depths"], outputs["mask"])

    def _first_window(self, iteration: Iteration, passes: DraftPasses, grammar: GrammarStep | None) -> DraftWindow:
        """The last token and the guesses of draft-extend, which are all drafts where K = 1."""
        state, rows = self.state, iteration.rows
        last = self._target.rows.last_tokens[rows]
        if self.spec.shape.topk > 1:
            return select(begin(*passes.first_guesses(rows, grammar)), last, self.spec.shape)
        token, probs = state.tokens[rows, 0], state.probs[rows]
        if grammar is not None:
            positions = None if self._variant(iteration.needs) == GREEDY else iteration.kv_lens.to(torch.int64) + 1
            token, guessed = passes.guess(state.hidden[rows], rows, positions, last[:, None][:, :0], grammar)
            probs = probs if guessed is None else guessed
        return DraftWindow(torch.stack([last, token], dim=1), probs=probs[:, None])

    def follow(self, iteration: Iteration, accepted: Accepted) -> None:
        """Run draft-extend over the whole window, rejected positions included; of a step without drafts only store what it reads."""
        result = accepted.result
        if iteration.depth == 0:
            assert self.catch_up is not None, "depth 0 is in the table"
            tokens = (result.tokens if self.model.lookahead else accepted.window)[:, 0]
            self.catch_up.add(iteration, tokens, accepted.features, self._variant(iteration.needs))
            return
        runner = self.graphs[iteration.depth].extend
        batch, inputs, D = runner.batch(iteration.size), runner.inputs(iteration.size), result.tokens.shape[1]
        batch.seq_len_bounds[:] = iteration.bounds + D
        tokens = result.tokens if self.model.lookahead else accepted.window
        fill_window(batch, self._target.page_table, iteration.kv_lens, tokens)
        inputs["accept_lens"].copy_(result.accept_lens)
        features = accepted.features
        if result.path is not None:
            first = torch.arange(iteration.size, device=features.device)[:, None] * D
            features = features[(first + result.path).flatten()]
        inputs["features"].copy_(features)
        runner.run(batch, self._variant(iteration.needs), iteration.sample.precedes)

    def follow_prompt(self, extend: ExtendPass) -> None:
        """Run the draft over prompt chunks.

        With lookahead each position carries the token after it, the last one the sampled or next one.
        """
        batch, rows, state = extend.chunks.batch, extend.chunks.rows, self.state
        if self.model.lookahead:
            tokens = torch.cat([batch.input_ids[1:], batch.input_ids[:1]])
            tokens[extend.chunks.last] = extend.next_tokens
            batch = replace(batch, input_ids=tokens, hidden_states=extend.states.features)
        plan_pass(self.runner.backend, batch)
        hidden = self.model.forward(batch, extend.chunks.last)
        if self.model.lookahead:
            state.hidden[rows] = hidden
            # A greedy request may later be verified beside sampled ones: not with the probabilities of the row's last
            # owner.
            state.probs.index_fill_(0, rows, 0.0)
            positions = None if extend.needs.all_greedy else batch.seq_lens.to(torch.int64) + 1
            first_guesses(state, self.model, hidden, self._target.rows.tables, rows, positions)

    def _variant(self, needs: SamplingNeeds) -> str:
        return GREEDY if needs.all_greedy or self.spec.shape.topk > 1 else SAMPLED


def restricting(iteration: Iteration) -> GrammarStep | None:
    """The grammars that the drafts must follow; None where none restricts the next token."""
    return iteration.grammar if iteration.grammar is not None and iteration.grammar.restricts else None
