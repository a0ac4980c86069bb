"""DFlashDrafter: the drafter whose model fills a block of masked tokens in one pass.

Per request row and iteration:

    draft block    a graph of one pass over [last token, mask, mask, ...] after the context: K drafts at once
    (verify and accept: the target)
    draft extend   a graph that stores the draft's keys and values of the window, computed from the target's states

The next block overwrites the keys and values of rejected tokens. Drafts are the most likely tokens at any temperature, and the strict rule
accepts those that equal the target's draws, so a seed gives the same text as plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch

from runtime.batch import ForwardMode
from runtime.config.runtime_config import SpeculativeConfig
from runtime.config.speculative import check_depth
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.kernels.argmax import argmax
from runtime.model_executor.context import WorkerContext
from runtime.model_executor.draft_window import DraftWindow, TreeShape
from runtime.model_executor.drafter import DrafterSpec, DraftSetup
from runtime.model_executor.grammar_rows import GrammarStep
from runtime.model_executor.graph_runner import Forward, GraphRunner, Outputs, RunnerSpec
from runtime.model_executor.input_buffers import BufferSpec
from runtime.model_executor.iteration import Iteration
from runtime.model_executor.model_runner import ModelRunner
from runtime.model_executor.target_model import ExtendPass
from runtime.model_executor.window import fill_window
from runtime.models.decoder import DecoderModel
from runtime.models.dflash import DFlashDraftModel
from runtime.models.draft_config import read_draft
from runtime.speculative.catch_up import WIDTH, catch_up_spec
from runtime.speculative.draft_loader import loaded, read_token_map, sharing_ranks
from runtime.speculative.draft_mask import DraftMask
from runtime.speculative.draft_passes import extend_spec
from runtime.speculative.model_drafter import ModelDrafter, ReadStates, restricting_grammar


class DFlashDrafter(ModelDrafter):
    """The drafter of a `DFlashDraftModel`."""

    def __init__(self, model: DFlashDraftModel, runner: ModelRunner, config: SpeculativeConfig) -> None:
        self.model = model
        shape = TreeShape(config.num_steps, 1, config.num_draft_tokens)
        aux, width = model.aux_layers, model.feature_width
        spec = DrafterSpec(shape=shape, capturable=True, aux_layers=aux, feature_width=width, catch_up=WIDTH)
        super().__init__(spec, runner, config)

    @classmethod
    def make(cls, context: WorkerContext, target: DecoderModel) -> DFlashDrafter:
        """The drafter, with its draft loaded. Raises `ConfigError` if the draft does not fit, or if the depth exceeds its blocks."""
        config = read_draft(context.speculative, target.config)
        draft = DFlashDraftModel(config, target, read_token_map(context.speculative), sharing_ranks(context, config.model, target))
        check_depth(draft.draft_block.size, context.speculative.num_steps)
        return cls(*loaded(context, draft))

    # ---- build

    def _decode_runner(self, setup: DraftSetup, depth: int) -> GraphRunner:
        """The runner over blocks. Output: `tokens` int64 [B, K + 1], the last token and the drafts."""
        name = "draft block" if depth == self.spec.shape.num_steps else f"draft block K={depth}"
        tokens = BufferSpec("tokens", "req", torch.int64, (depth + 1,))
        spec = RunnerSpec(name, ForwardMode.DECODE, depth + 1, (tokens,), launches=self.model.kernel_launches)
        return setup.make_runner(spec, self._fill_block, self.runner, setup.depths[depth], self._config.draft_decode_graph)

    def _extend_spec(self, depth: int) -> RunnerSpec:
        launches = 2 * len(self.model.layers) + 4
        if depth == 0:
            return catch_up_spec(("",), launches, num_passes=0)
        full = self.spec.shape
        spec = extend_spec(full, full.at_depth(depth), self.model.feature_width, self.runner.dtype, launches)
        return replace(spec, inputs=spec.inputs[:1], num_passes=0, variants=("",))  # nothing attends: it writes KV only

    def _extend_forward(self, states: ReadStates, width: int) -> Forward:
        return partial(self._write_context, states=states)

    def warmup_runs(self) -> list[Callable[[], object]]:
        """Runs that compile the kernels of catch-up, and the attention kernels of blocks at every depth."""
        backend, depths = self.runner.backend, self._depths.items()
        return super().warmup_runs() + [
            run for depth, batches in depths if depth for run in backend.warmup_runs(batches.tuned, depth + 1, tree=False)
        ]

    def gemms(self) -> Iterable[Gemm]:
        """The GEMMs of the draft model."""
        return self.model.gemms()

    # ---- steps; outside graphs

    def propose(self, iteration: Iteration) -> DraftWindow:
        """Fill the blocks."""
        if iteration.depth == 0:
            return iteration.no_drafts
        runner, grammar = self.decode[iteration.depth], restricting_grammar(iteration)
        outputs = self._decode(iteration, runner, None if grammar is None else partial(self._fill_block, grammar=grammar))
        return DraftWindow(**outputs)

    def follow_prompt(self, extend: ExtendPass) -> None:
        """Store keys and values of prompt chunks."""
        self.model.write_context(replace(extend.chunks.batch, hidden_states=extend.states.features))

    # ---- inside the graphs; with a grammar, eagerly, because each draft waits for its mask

    def _fill_block(self, batch: ForwardBatch, outputs: Outputs, variant: str, grammar: GrammarStep | None = None) -> None:
        tokens = outputs["tokens"]
        tokens.fill_(self.model.draft_block.mask_id)
        tokens[:, 0].copy_(self._target.rows.last_tokens[batch.req_pool_indices])
        fill_window(batch, self._target.page_table, self._inputs.kv_lens(batch.batch_size), tokens)
        hidden = self.model.forward(batch).view(*tokens.shape, -1)[:, 1:]
        if grammar is None:
            tokens[:, 1:].copy_(self.model.map_to_target(self.model.greedy(hidden.flatten(0, 1))).view(len(tokens), -1))
            return
        for at in range(1, tokens.shape[1]):
            allowed, logits = grammar.after(tokens[:, None, 1:at]), self.model.logits(hidden[:, at - 1])
            mask = None if allowed is None else DraftMask(allowed, self.model)
            token = self.model.map_to_target(argmax(logits if mask is None else mask.logits(logits)))
            tokens[:, at].copy_(token if mask is None else mask.tokens(token))

    def _write_context(self, batch: ForwardBatch, outputs: Outputs, variant: str, states: ReadStates) -> None:
        self.model.write_context(replace(batch, hidden_states=states(batch)))
