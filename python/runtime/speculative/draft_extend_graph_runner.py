"""The draft forward over the verify window: its inputs, width, backend and memory reservation.

Always the whole window, of D tokens or, where drafting pauses, of one, rejected positions included: the shape is fixed, so no host value
is needed between verify and the next draft. Position `j` of the window carries the committed token that follows it and the target's
hidden state at it; beyond the accepted tokens it carries anything valid, and what it writes there is overwritten by the next iteration
before it is read. The LM head runs on each request's last accepted row only.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from runtime.batch import ForwardMode
from runtime.layers.forward_batch import ForwardBatch
from runtime.model_executor.graph_runner import Forward, Outputs, RunnerSpec
from runtime.model_executor.input_buffers import BufferSpec, InputBuffers
from runtime.model_executor.request_rows import RequestRows
from runtime.models.draft_head import DraftModel
from runtime.speculative.draft_decode_graph_runner import GREEDY, LAUNCHES_A_PASS, SAMPLED
from runtime.speculative.draft_rows import DraftRows, first_guesses
from runtime.speculative.draft_tree import TreeShape


def draft_extend_spec(shape: TreeShape, width: int, feature: int, dtype: torch.dtype, launches: int) -> RunnerSpec:
    """Over windows of `width` tokens: D, or 1.

    Inputs: `features` [B * width, feature], the target's hidden states, and `accept_lens` int32 [B]. No outputs: results go to
    `DraftRows`.
    """
    return RunnerSpec(
        name="draft extend" if width > 1 else "paused extend",
        mode=ForwardMode.DRAFT_EXTEND,
        width=width,
        outputs=(),
        inputs=(BufferSpec("features", "token", dtype, 0, (feature,)), BufferSpec("accept_lens", "req", torch.int32, 1)),
        variants=(GREEDY, SAMPLED) if shape.topk == 1 else (GREEDY,),
        launches=launches + LAUNCHES_A_PASS,
    )


def draft_extend_forward(draft: DraftModel, rows: RequestRows, state: DraftRows, inputs: InputBuffers) -> Forward:
    """The function that the graph records."""

    def forward(batch: ForwardBatch, outputs: Outputs, variant: str) -> None:
        index, D = batch.req_pool_indices, batch.tokens_per_req
        accepted = inputs.named("accept_lens", batch.batch_size).to(torch.int64)
        last = torch.arange(batch.batch_size, device=accepted.device) * D + accepted - 1
        hidden = draft.forward(replace(batch, hidden_states=inputs.named("features", batch.num_tokens)), last)
        if draft.lookahead:
            positions = inputs.kv_lens(batch.batch_size).to(torch.int64) + accepted + 1 if variant == SAMPLED else None
            state.hidden[index] = hidden
            first_guesses(state, draft, hidden, rows.tables, index, positions)

    return forward
