"""Draft-extend: the draft over the verify window as one graph.

It runs over the whole window, rejected positions included: the shape is fixed, so that no host value is needed between
verify and the next draft. Position `j` of the window carries the committed token that follows it and the target's
hidden state at it. Beyond the accepted tokens it carries anything valid; the next iteration overwrites the KV written
there before it is read. The LM head runs on each request's last accepted position only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from runtime.batch import ForwardMode
from runtime.layers.forward_batch import ForwardBatch
from runtime.model_executor.draft_window import TreeShape
from runtime.model_executor.graph_runner import Forward, Outputs, RunnerSpec
from runtime.model_executor.input_buffers import BufferSpec, InputBuffers
from runtime.model_executor.request_rows import RequestRows
from runtime.models.draft_head import DraftModel
from runtime.speculative.draft_decode_graph_runner import SAMPLED, variants
from runtime.speculative.draft_state import DraftState, first_guesses

KV_ONLY = "kv"
"""The variant after which no guess is read."""


def draft_extend_spec(full: TreeShape, shape: TreeShape, feature: int, dtype: torch.dtype, launches: int) -> RunnerSpec:
    """The runner over windows of `shape`; `full` is the shape at full depth.

    Inputs: `features` [B * D, feature], the target's hidden states, and `accept_lens` int32 [B]. No outputs: results go
    to `DraftState`.
    """
    return RunnerSpec(
        name="draft extend" if shape == full else f"draft extend K={shape.num_steps}",
        mode=ForwardMode.DRAFT_EXTEND,
        width=shape.num_draft_tokens,
        outputs=(),
        inputs=(BufferSpec("features", "token", dtype, 0, (feature,)), BufferSpec("accept_lens", "req", torch.int32, 1)),
        variants=variants(full),
        launches=launches,
    )


def draft_extend_forward(
    draft: DraftModel, rows: RequestRows, state: DraftState, inputs: InputBuffers, states: Callable[[ForwardBatch], torch.Tensor]
) -> Forward:
    """The function that the graph records; `states` gives the target's hidden states of a batch."""

    def forward(batch: ForwardBatch, outputs: Outputs, variant: str) -> None:
        index, D = batch.req_pool_indices, batch.tokens_per_req
        accepted = inputs.named("accept_lens", batch.batch_size).to(torch.int64)
        last = torch.arange(batch.batch_size, device=accepted.device) * D + accepted - 1
        hidden = draft.forward(replace(batch, hidden_states=states(batch)), last)
        if draft.lookahead and variant != KV_ONLY:
            positions = inputs.kv_lens(batch.batch_size).to(torch.int64) + accepted + 1 if variant == SAMPLED else None
            state.hidden[index] = hidden
            first_guesses(state, draft, hidden, rows.tables, index, positions)

    return forward
