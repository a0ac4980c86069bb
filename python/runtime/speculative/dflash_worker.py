"""DFlashWorker: the drafter whose model fills a block of masked tokens in one pass.

Per request row and iteration:

    draft block    a graph of one pass over [last token, mask, mask, ...] behind the context: K drafts at once
    (verify and accept: the target)
    draft extend   a graph that stores the draft's keys and values of the window, made of the target's states

Stored keys and values of rejected tokens lie where the next block is written. Drafts are the likeliest tokens at any temperature, so
that verification draws what plain decoding draws and a seed keeps its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from runtime.batch import ForwardMode, Int32, RowInit
from runtime.config.runtime_config import SpeculativeConfig
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.kernels.argmax import argmax
from runtime.layers.sampling_tables import SamplingNeeds
from runtime.model_executor.depth import DepthBatches
from runtime.model_executor.draft_window import DraftWindow, TreeShape
from runtime.model_executor.drafter import Drafter, DrafterSpec, DraftSetup, ModelPasses
from runtime.model_executor.grammar_rows import GrammarStep
from runtime.model_executor.graph_runner import GraphRunner, Outputs, RunnerSpec
from runtime.model_executor.input_buffers import BufferSpec, InputBuffers
from runtime.model_executor.iteration import Accepted, Iteration
from runtime.model_executor.model_runner import ModelRunner
from runtime.model_executor.target_model import ExtendPass, TargetModel
from runtime.model_executor.window import fill_window
from runtime.models.dflash import DFlashDraftModel
from runtime.speculative.catch_up import WIDTH, CatchUp, HeldStates, catch_up_spec
from runtime.speculative.draft_mask import DraftMask


@dataclass(frozen=True, slots=True)
class BlockRunners:
    """The graph runners at one depth."""

    block: GraphRunner
    extend: GraphRunner


class DFlashWorker(Drafter):
    """Owner of the draft model's runner and of its graph runners at every depth.

    Attributes:
        runner: weights, KV pool and attention backend of the draft.
        graphs: by depth, from 1 on.
        catch_up: follows steps without drafts; None where all have some.
    """

    def __init__(self, model: DFlashDraftModel, runner: ModelRunner, config: SpeculativeConfig) -> None:
        self.model, self.runner, self._config = model, runner, config
        shape = TreeShape(config.num_steps, 1, config.num_draft_tokens)
        aux, width = model.aux_layers, model.input_width
        self.spec = DrafterSpec(shape=shape, capturable=True, aux_layers=aux, feature_width=width, catch_up=WIDTH)
        self.graphs: dict[int, BlockRunners] = {}
        self.catch_up: CatchUp | None = None
        self._target: TargetModel
        self._inputs: InputBuffers

    # ---- build

    def attach(self, setup: DraftSetup) -> None:
        """Make a KV pool of one page and the graph runners."""
        self._target, self._inputs, self._depths = setup.target, setup.inputs, setup.depths
        self.runner.allocate(1, setup.target.page_table, setup.requests, self._width, 1)
        self.graphs = {depth: self._make_runners(setup, depth, batches) for depth, batches in setup.depths.items() if depth}
        if 0 in setup.depths:
            held = HeldStates(len(setup.target.rows.kv_lens), self.model.input_width, self.runner.dtype, setup.inputs)
            forward, spec = partial(self._write_context, states=held.states), catch_up_spec(("",), self._extend_launches, num_steps=0)
            runner = setup.make_runner(spec, forward, self.runner, setup.depths[0], self._config.draft_extend_graph)
            self.catch_up = CatchUp(setup.target, setup.inputs, held, runner)

    def _make_runners(self, setup: DraftSetup, depth: int, batches: DepthBatches) -> BlockRunners:
        width, config = depth + 1, self._config
        suffix = "" if depth == self.spec.shape.num_steps else f" K={depth}"
        spec = block_spec("draft block" + suffix, width, self.model.kernel_launches)
        block = setup.make_runner(spec, self._fill_block, self.runner, batches, config.draft_decode_graph)
        spec = extend_spec("draft extend" + suffix, width, self.model.input_width, self.runner.dtype, self._extend_launches)
        forward = partial(self._write_context, states=lambda batch: setup.inputs.named("features", batch.num_tokens))
        return BlockRunners(block, setup.make_runner(spec, forward, self.runner, batches, config.draft_extend_graph))

    @property
    def _extend_launches(self) -> int:
        return 2 * len(self.model.layers) + 4

    @property
    def _width(self) -> int:
        """Tokens per request of the draft's widest pass."""
        return max(self.spec.max_width, WIDTH if 0 in self._depths else 0)

    def models(self) -> list[ModelPasses]:
        """The draft model."""
        graphs = [runner for depth in self._depths for runner in self.runners(depth)]
        return [ModelPasses(self.runner, graphs, self._width)]

    def runners(self, depth: int) -> list[GraphRunner]:
        """The block's runner, where there are drafts, and draft-extend's."""
        if depth == 0:
            return [] if self.catch_up is None else [self.catch_up.runner]
        return [self.graphs[depth].block, self.graphs[depth].extend]

    def warmup_runs(self) -> list[Callable[[], object]]:
        """Attention of the blocks at every depth."""
        backend, depths = self.runner.backend, self._depths.items()
        return [run for depth, batches in depths if depth for run in backend.warmup_runs(batches.tuned, depth + 1, tree=False)]

    def gemms(self) -> Iterable[Gemm]:
        """Those of the draft model."""
        return self.model.gemms()

    # ---- steps; outside graphs

    def reset(self) -> None:
        """Forget every request."""
        if self.catch_up is not None:
            self.catch_up.reset()

    def admit(self, new_rows: Sequence[RowInit]) -> None:
        """Nothing waits for the draft in these rows."""
        if self.catch_up is not None:
            self.catch_up.admit(new_rows)

    def before(self, rows: Int32, bounds: Int32, depth: int, needs: SamplingNeeds, eager: bool) -> int:
        """Follow steps without drafts, if it is time."""
        return 0 if self.catch_up is None else self.catch_up.before(rows, bounds, depth, "", eager)

    def propose(self, iteration: Iteration) -> DraftWindow:
        """Fill the blocks."""
        if iteration.depth == 0:
            return self._target.last_tokens(iteration.rows)
        runner = self.graphs[iteration.depth].block
        batch, width = runner.batch(iteration.size), iteration.depth + 1
        batch.seq_len_bounds[:] = iteration.bounds + width
        torch.add(iteration.kv_lens, width, out=batch.seq_lens)
        grammar = iteration.grammar
        restricted = None if grammar is None or not grammar.restricts else partial(self._fill_block, grammar=grammar)
        outputs, _ = runner.run(batch, eager=iteration.sample.taken, forward=restricted)
        return DraftWindow(outputs["tokens"])

    def follow(self, iteration: Iteration, accepted: Accepted) -> None:
        """Store keys and values of the whole window, rejected positions included; of a step without drafts only the states."""
        if iteration.depth == 0:
            assert self.catch_up is not None, "depth 0 is in the table"
            self.catch_up.add(iteration, accepted.window[:, 0], accepted.features, "")
            return
        runner = self.graphs[iteration.depth].extend
        batch = runner.batch(iteration.size)
        batch.seq_len_bounds[:] = iteration.bounds + iteration.depth + 1
        fill_window(batch, self._target.page_table, iteration.kv_lens, accepted.window)
        runner.inputs(iteration.size)["features"].copy_(accepted.features)
        runner.run(batch, eager=iteration.sample.precedes)

    def follow_prompt(self, extend: ExtendPass) -> None:
        """Store keys and values of prompt chunks."""
        self.model.write_context(replace(extend.chunks.batch, hidden_states=extend.states.features))

    # ---- inside the graphs; with a grammar, eagerly, because each draft waits for its mask

    def _fill_block(self, batch: ForwardBatch, outputs: Outputs, variant: str, grammar: GrammarStep | None = None) -> None:
        tokens = outputs["tokens"]
        tokens.fill_(self.model.block.mask_id)
        tokens[:, 0].copy_(self._target.rows.last_tokens[batch.req_pool_indices])
        fill_window(batch, self._target.page_table, self._inputs.kv_lens(batch.batch_size), tokens)
        hidden = self.model.forward(batch).view(*tokens.shape, -1)[:, 1:]
        if grammar is None:
            tokens[:, 1:].copy_(self.model.greedy(hidden.flatten(0, 1)).view(len(tokens), -1))
            return
        for at in range(1, tokens.shape[1]):
            allowed, logits = grammar.behind(tokens[:, None, 1:at]), self.model.logits(hidden[:, at - 1])
            tokens[:, at].copy_(argmax(logits if allowed is None else DraftMask(allowed, self.model).logits(logits)))

    def _write_context(self, batch: ForwardBatch, outputs: Outputs, variant: str, states: Callable[[ForwardBatch], torch.Tensor]) -> None:
        self.model.write_context(replace(batch, hidden_states=states(batch)))


def block_spec(name: str, width: int, launches: int) -> RunnerSpec:
    """The runner over blocks. Output: `tokens` int64 [B, width], the last token and the drafts."""
    return RunnerSpec(
        name=name,
        mode=ForwardMode.DECODE,
        width=width,
        outputs=(BufferSpec("tokens", "req", torch.int64, 0, (width,)),),
        launches=launches,
    )


def extend_spec(name: str, width: int, feature: int, dtype: torch.dtype, launches: int) -> RunnerSpec:
    """The runner over windows. Input: `features` [B * width, feature], the target's states. Nothing attends; it writes KV only."""
    return RunnerSpec(
        name=name,
        mode=ForwardMode.DRAFT_EXTEND,
        width=width,
        outputs=(),
        inputs=(BufferSpec("features", "token", dtype, 0, (feature,)),),
        num_steps=0,
        launches=launches,
    )
