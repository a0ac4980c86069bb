"""ModelDrafter: the common part of drafters with a draft model, in particular draft extend.

After each iteration the draft runs over the whole window with the target's states (draft-extend), including rejected positions, whose
KV the next window overwrites. For steps without drafts `CatchUp` does so later. The draft's KV pool is indexed by the target's page table,
so its KV length is always the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from runtime.batch import Int32, RowInit
from runtime.config.runtime_config import SpeculativeConfig
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.sampling_tables import SamplingNeeds
from runtime.model_executor.drafter import Drafter, DrafterSpec, DraftSetup, ModelPasses
from runtime.model_executor.grammar_rows import GrammarStep
from runtime.model_executor.graph_runner import Forward, GraphRunner, Outputs, RunnerSpec
from runtime.model_executor.input_buffers import InputBuffers
from runtime.model_executor.iteration import CommittedWindow, Iteration
from runtime.model_executor.model_runner import ModelRunner
from runtime.model_executor.target_model import TargetModel
from runtime.model_executor.window import fill_window
from runtime.speculative.catch_up import WIDTH, CatchUp, StoredInputs

ReadStates = Callable[[ForwardBatch], torch.Tensor]
"""The target's states at the tokens of a batch, [num_tokens, feature_width]."""


class ModelDrafter(Drafter):
    """Owner of the draft model's runner and of its graph runners at every depth.

    Attributes:
        runner: weights, KV pool and attention backend of the draft.
        decode: the runners that draft, by depth; none where the first guess is the only draft.
        extend: the runners of draft-extend, by depth; at depth 0 that of `catch_up`.
        catch_up: processes steps without drafts; None if depth 0 is not in the table.
    """

    def __init__(self, spec: DrafterSpec, runner: ModelRunner, config: SpeculativeConfig) -> None:
        self.spec, self.runner, self._config = spec, runner, config
        self.decode, self.extend = dict[int, GraphRunner](), dict[int, GraphRunner]()
        self.catch_up: CatchUp | None = None
        self._target: TargetModel
        self._inputs: InputBuffers

    # ---- defined by subclasses, besides `propose` and `follow_prompt`

    def _decode_runner(self, setup: DraftSetup, depth: int) -> GraphRunner | None:
        """The runner that drafts."""
        raise NotImplementedError

    def _extend_spec(self, depth: int) -> RunnerSpec:
        """The runner of draft-extend; at depth 0 that of `CatchUp`."""
        raise NotImplementedError

    def _extend_forward(self, states: ReadStates, width: int) -> Forward:
        """The function of draft-extend over windows of `width`."""
        raise NotImplementedError

    def _followed(self, committed: CommittedWindow) -> torch.Tensor:
        """int64 [B, width]: the tokens that draft-extend reads."""
        return committed.window.tokens

    def _variant(self, needs: SamplingNeeds) -> str:
        """The variant of the graphs."""
        return ""

    # ---- build

    def attach(self, setup: DraftSetup) -> None:
        """Make a KV pool of one page and the graph runners."""
        target, inputs = setup.target, setup.inputs
        self._target, self._inputs, self._depths = target, inputs, setup.depths
        width = max(self.spec.max_width, WIDTH if 0 in setup.depths else 0)  # tokens per request of the widest pass
        self.runner.allocate(1, target.page_table, inputs.max_requests, width)
        for depth in setup.depths:
            if depth:
                if (decode := self._decode_runner(setup, depth)) is not None:
                    self.decode[depth] = decode
                self._add_extend_runner(setup, depth, lambda batch: inputs.named("features", batch.num_tokens))
            else:
                stored = StoredInputs(len(target.rows.kv_lens), self.spec.feature_width, self.runner.dtype, inputs)
                self._add_extend_runner(setup, 0, stored.states)
                self.catch_up = CatchUp(target, inputs, stored, self.extend[0])

    def _add_extend_runner(self, setup: DraftSetup, depth: int, states: ReadStates) -> None:
        spec, wanted = self._extend_spec(depth), self._config.draft_extend_graph
        self.extend[depth] = setup.make_runner(spec, self._extend_forward(states, spec.width), self.runner, setup.depths[depth], wanted)

    def warmup_runs(self) -> list[Callable[[], object]]:
        """Runs that compile the kernels of catch-up."""
        return [] if self.catch_up is None else self.catch_up.warmup_runs()

    def models(self) -> list[ModelPasses]:
        """The draft model."""
        graphs = [runner for depth in self._depths for runner in self.runners(depth)]
        return [ModelPasses(self.runner, graphs)]

    def runners(self, depth: int) -> list[GraphRunner]:
        """The drafting runner, if there is one, and that of draft-extend."""
        return [runners[depth] for runners in (self.decode, self.extend) if depth in runners]

    # ---- steps; outside graphs

    def reset(self) -> None:
        """Forget every request."""
        if self.catch_up is not None:
            self.catch_up.reset()

    def admit(self, new_rows: Sequence[RowInit]) -> None:
        """Reset the catch-up counts of newly assigned rows."""
        if self.catch_up is not None:
            self.catch_up.admit(new_rows)

    def before_iteration(self, rows: Int32, bounds: Int32, depth: int, needs: SamplingNeeds) -> int:
        """Run the catch-up window if one is due."""
        return 0 if self.catch_up is None else self.catch_up.before_iteration(rows, bounds, depth, self._variant(needs))

    def catch_up_eagerly(self) -> Callable[[], None] | None:
        """A call that runs the latest catch-up window again without graphs; None if there was none."""
        return None if self.catch_up is None else self.catch_up.again

    def follow(self, iteration: Iteration, committed: CommittedWindow) -> None:
        """Run draft-extend over the whole window, including rejected positions; after a step without drafts only store its inputs."""
        tokens, features, variant = self._followed(committed), committed.features, self._variant(iteration.needs)
        if iteration.depth == 0:
            assert self.catch_up is not None, "depth 0 is in the table"
            self.catch_up.add(iteration, tokens[:, 0], features, variant)
            return
        runner, width = self.extend[iteration.depth], tokens.shape[1]
        batch, inputs = runner.batch(iteration.size), runner.inputs(iteration.size)
        batch.seq_len_bounds[:] = iteration.bounds + width
        fill_window(batch, self._target.page_table, iteration.kv_lens, tokens)
        if "accept_lens" in inputs:
            inputs["accept_lens"].copy_(committed.result.accept_lens)
        if committed.result.path is not None:
            first = torch.arange(iteration.size, device=features.device)[:, None] * width
            features = features[(first + committed.result.path).flatten()]
        inputs["features"].copy_(features)
        runner.run(batch, variant, iteration.eager)

    def _decode(self, iteration: Iteration, runner: GraphRunner, restricted: Forward | None) -> Outputs:
        """Run the runner that drafts; if `restricted` is given, run it eagerly instead."""
        batch, width = runner.batch(iteration.size), runner.spec.width
        batch.seq_len_bounds[:] = iteration.bounds + width
        torch.add(iteration.kv_lens, width, out=batch.seq_lens)
        return runner.run(batch, self._variant(iteration.needs), iteration.eager, restricted)[0]


def restricting_grammar(iteration: Iteration) -> GrammarStep | None:
    """The grammars that the drafts must follow; None if none restricts the next token."""
    return iteration.grammar if iteration.grammar is not None and iteration.grammar.restricts else None
