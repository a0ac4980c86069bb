"""Verification: the target's pass over a window of drafts. Plain decoding is a window of one token."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from runtime.batch import ForwardMode
from runtime.layers.forward_batch import ForwardBatch
from runtime.model_executor.draft_window import DraftWindow, TreeShape
from runtime.model_executor.graph_runner import Forward, GraphRunner, Outputs, RunnerSpec
from runtime.model_executor.input_buffers import BufferSpec
from runtime.model_executor.iteration import Iteration, VerifyResult
from runtime.model_executor.target_model import States, TargetModel
from runtime.model_executor.window import fill_window


def verify_spec(shape: TreeShape, name: str, vocab: int, feature: int, dtype: torch.dtype, launches: int) -> RunnerSpec:
    """Outputs: `logits` float32 [B * D, vocab], argmax `tokens` int64 [B * D], `features` [B * D, feature].

    `vocab`: columns of the logits on this rank.
    """
    D = shape.num_draft_tokens
    return RunnerSpec(
        name=name,
        mode=ForwardMode.TARGET_VERIFY if D > 1 else ForwardMode.DECODE,
        width=D,
        outputs=(
            BufferSpec("logits", "token", torch.float32, 0, (vocab,)),
            BufferSpec("tokens", "token", torch.int64, 0),
            BufferSpec("features", "token", dtype, 0, (feature,)),
        ),
        tree_tail=0 if shape.topk == 1 else D,
        launches=launches,
    )


def verify_forward(target: TargetModel) -> Forward:
    """The function that the verify graph records."""
    model = target.runner.model

    def forward(batch: ForwardBatch, outputs: Outputs, variant: str) -> None:
        _write_outputs(target, States(*model.forward(batch, target.aux_layers)), outputs)

    return forward


def _write_outputs(target: TargetModel, states: States, outputs: Outputs) -> None:
    target.runner.model.greedy(states.hidden, outputs["tokens"], outputs["logits"], target.agreement)
    if outputs["features"].shape[1]:
        outputs["features"].copy_(states.features)


class Verifier:
    """Owner of the verify runners.

    Attributes:
        runners: by depth.
    """

    def __init__(self, target: TargetModel, runners: Mapping[int, GraphRunner]) -> None:
        self._target, self.runners = target, dict(runners)

    def padded_size(self, depth: int, live: int) -> int:
        """Requests that an iteration of `live` requests runs with."""
        return self.runners[depth].size_for(live)

    def has_graph(self, depth: int, size: int) -> bool:
        """Whether iterations of `size` requests replay a graph."""
        return size in self.runners[depth].sizes

    # ---- outside any graph

    def fill(self, iteration: Iteration, draft: DraftWindow) -> ForwardBatch:
        """The inputs of the verify pass, filled."""
        batch = self.runners[iteration.depth].batch(iteration.size)
        batch.seq_len_bounds[:] = iteration.bounds + draft.width
        fill_window(batch, self._target.page_table, iteration.kv_lens, draft.tokens, draft.depths)
        if batch.tree_mask is not None:
            assert draft.mask is not None
            batch.tree_mask.copy_(draft.mask.flatten())
        return batch

    def run(self, iteration: Iteration, batch: ForwardBatch) -> VerifyResult:
        """Run the target over filled inputs."""
        eager = iteration.eager_sample or iteration.precedes_eager_sample
        outputs, graph = self.runners[iteration.depth].run(batch, eager=eager)
        return self._result(iteration, outputs, graph)

    def result_of(self, iteration: Iteration, states: States) -> VerifyResult:
        """The result of an eager pass over the live windows, whose states are given; padding rows hold zeros."""
        outputs = self.runners[iteration.depth].outputs(iteration.size)
        tokens = len(states.hidden)
        _write_outputs(self._target, states, {name: tensor[:tokens] for name, tensor in outputs.items()})
        for tensor in outputs.values():
            tensor[tokens:].zero_()
        return self._result(iteration, outputs, graph=False)

    def latest(self, iteration: Iteration) -> VerifyResult:
        """The buffers as they are, for a dry run."""
        return self._result(iteration, self.runners[iteration.depth].outputs(iteration.size), graph=False)

    def _result(self, iteration: Iteration, outputs: Outputs, graph: bool) -> VerifyResult:
        tokens, head = outputs["tokens"].view(iteration.size, -1), self._target.runner.model.lm_head
        return VerifyResult(outputs["logits"], tokens, outputs["features"], graph, head)
