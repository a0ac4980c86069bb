"""Draft-decode: the draft's one-token passes of one iteration as one graph.

An EAGLE head runs K - 1 of them, since its first guess comes from draft-extend; a draft without lookahead runs K. Row
width is topk. Pass `i` writes draft KV at `kv_len + i * topk + j` for branch `j`, all at sequence position `kv_len +
i`. It sees the committed KV and, through the tree mask, its own ancestors. The draft's probabilities are outputs, not
tensors of the graphs' memory pool: they are read after the target's graph has run.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from runtime.batch import ForwardMode
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.draft_window import TreeShape
from runtime.model_executor.graph_runner import Forward, Outputs, RunnerSpec
from runtime.model_executor.input_buffers import BufferSpec, InputBuffers
from runtime.model_executor.request_rows import RequestRows
from runtime.model_executor.window import fill_window
from runtime.models.draft_head import DraftModel
from runtime.speculative.draft_state import DraftState, guess
from runtime.speculative.draft_tree import begin, expand, select, top_log_probs

GREEDY, SAMPLED = "greedy", "sampled"


def draft_decode_spec(shape: TreeShape, most_steps: int, draft_vocab: int, launches: int, passes: int) -> RunnerSpec:
    """The runner at one depth.

    Outputs: `tokens` int64 [B, D]; for trees `parents`, `depths`, `mask` [B, D]; for sampled chains `probs` float32 [B,
    K, Vd].

    Args:
        most_steps: K at full depth.
        launches: kernels of one draft pass: those of the model, and those for its inputs, the guess and the tree.
        passes: K - 1, or K for a draft without lookahead.
    """
    D, chain = shape.num_draft_tokens, shape.topk == 1
    outputs = [BufferSpec("tokens", "req", torch.int64, 0, (D,))]
    if chain:
        outputs.append(BufferSpec("probs", "req", torch.float32, 0, (shape.num_steps, draft_vocab)))
    else:
        outputs += [BufferSpec(name, "req", torch.int64, 0, (D,)) for name in ("parents", "depths", "mask")]
    return RunnerSpec(
        name="draft decode" if shape.num_steps == most_steps else f"draft decode K={shape.num_steps}",
        mode=ForwardMode.DECODE,
        width=shape.topk,
        outputs=tuple(outputs),
        num_steps=passes,
        tree_tail=0 if chain else shape.topk,
        variants=(GREEDY, SAMPLED) if chain else (GREEDY,),
        launches=passes * launches,
    )


def draft_decode_forward(
    draft: DraftModel, shape: TreeShape, rows: RequestRows, state: DraftState, page_table: PageTable, inputs: InputBuffers
) -> Forward:
    """The function that the graph records. It reads the rows' state itself: its only inputs are rows and lengths."""
    passes = _Passes(draft, shape, rows, state, page_table, inputs)
    return passes.chain if shape.topk == 1 else passes.tree


class _Passes:
    """The K - 1 passes. Every method runs inside the graph."""

    def __init__(
        self, draft: DraftModel, shape: TreeShape, rows: RequestRows, state: DraftState, page_table: PageTable, inputs: InputBuffers
    ) -> None:
        self.draft, self.shape, self.rows, self.state = draft, shape, rows, state
        self.page_table, self.inputs = page_table, inputs
        # A step advances slots by topk and positions by 1: the difference brings a slot back to its depth.
        steps = torch.arange(shape.num_steps, device=inputs.device)[:, None]
        self._back = (steps * (1 - shape.topk)).expand(-1, shape.topk).contiguous()

    def chain(self, batch: ForwardBatch, outputs: Outputs, variant: str) -> None:
        index, K = batch.req_pool_indices, self.shape.num_steps
        tokens, sampled, known = outputs["tokens"], variant == SAMPLED, self.draft.lookahead
        kv_lens = self.inputs.kv_lens(batch.batch_size)
        token, hidden = self.rows.last_tokens[index], self.state.hidden[index]
        tokens[:, 0].copy_(token)
        if known:
            token = self.state.tokens[index, 0]
            tokens[:, 1].copy_(token)
            if sampled:
                outputs["probs"][:, 0].copy_(self.state.probs[index])
        for step in range(K - known):
            hidden = self._forward(batch, step, token[:, None], hidden)
            at = step + known + 1  # window position of this pass's guess
            positions = kv_lens.to(torch.int64) + at if sampled else None
            ids, probs = guess(self.draft, hidden, self.rows.tables, index, positions)
            token = self.draft.map_to_target(ids)
            tokens[:, at].copy_(token)
            if probs is not None:
                outputs["probs"][:, at - 1].copy_(probs)

    def tree(self, batch: ForwardBatch, outputs: Outputs, variant: str) -> None:
        index, topk, size = batch.req_pool_indices, self.shape.topk, batch.batch_size
        beam = begin(self.state.tokens[index], self.state.scores[index])
        hidden = self.state.hidden[index][:, None].expand(-1, topk, -1)
        for step in range(self.shape.num_steps - 1):
            flat = hidden.reshape(size * topk, -1).contiguous()
            hidden = self._forward(batch, step, beam.tokens, flat, beam.mask)
            ids, scores = top_log_probs(self.draft.logits(hidden), topk)
            children = self.draft.map_to_target(ids).view(size, topk, topk)
            beam = expand(beam, children, scores.view(size, topk, topk))
            hidden = hidden.view(size, topk, -1).gather(1, beam.parents[:, :, None].expand(-1, -1, hidden.shape[-1]))
        tree = select(beam, self.rows.last_tokens[index], self.shape)
        for name, tensor in (("tokens", tree.tokens), ("parents", tree.parents), ("depths", tree.depths), ("mask", tree.mask)):
            assert tensor is not None, "a tree"
            outputs[name].copy_(tensor)

    def _forward(
        self,
        batch: ForwardBatch,
        step: int,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One pass. tokens int64 [B, topk], hidden [B * topk, hidden], mask int64 [B, topk] -> hidden [B * topk,
        hidden].

        Branch j writes slot `kv_len + step * topk + j`; all branches stand at sequence position `kv_len + step`.
        """
        topk = self.shape.topk
        kv_lens = self.inputs.kv_lens(batch.batch_size)
        depths = None if topk == 1 else self._back[step].expand(batch.batch_size, -1)
        fill_window(batch, self.page_table, kv_lens + step * topk if step else kv_lens, tokens, depths)
        if mask is not None:
            assert batch.tree_mask is not None
            batch.tree_mask.copy_(mask.flatten())
        return self.draft.forward(replace(batch, step=step, hidden_states=hidden, tree_tail=(step + 1) * topk if mask is not None else 0))
