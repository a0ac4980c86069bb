"""The draft's passes of one iteration, each kind as one graph: draft-decode before verify, and draft-extend after it.

Draft-decode is one-token passes. An EAGLE head runs K - 1 of them, since its first guess comes from draft-extend; a draft without
lookahead runs K. Row width is topk. Pass `i` writes draft KV at `kv_len + i * topk + j` for branch `j`, all at sequence position
`kv_len + i`. It attends to the committed KV and, through the tree mask, to its own ancestors. The draft's probabilities are outputs, not
tensors of the graphs' memory pool: they are read after the target's graph has run.

Draft-extend runs over the whole window, including rejected positions: the shape is fixed, so no host value is needed between
verify and the next draft. Its input at position `j` of the window is the committed token at `j + 1` and the target's hidden state at `j`.
Beyond the accepted tokens inputs are arbitrary valid values; the next iteration overwrites their KV before it is read. The LM head runs
only on each request's last accepted position.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from runtime.batch import ForwardMode
from runtime.layers.forward_batch import ForwardBatch
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.draft_window import TreeShape
from runtime.model_executor.grammar_rows import GrammarStep
from runtime.model_executor.graph_runner import Forward, Outputs, RunnerSpec
from runtime.model_executor.input_buffers import BufferSpec, InputBuffers
from runtime.model_executor.request_rows import RequestRows
from runtime.model_executor.window import fill_window
from runtime.models.draft_head import DraftModel
from runtime.speculative.draft_mask import DraftMask
from runtime.speculative.draft_state import DraftState, guess, start_chain
from runtime.speculative.draft_tree import cut_tree, grow_tree, start_tree, top_log_probs

GREEDY, SAMPLED = "greedy", "sampled"
KV_ONLY = "kv"
"""The variant that computes no guess."""


def variants(shape: TreeShape) -> tuple[str, ...]:
    """Variants of the draft's graphs. A tree has only the greedy one: its drafts do not depend on sampling."""
    return (GREEDY, SAMPLED) if shape.topk == 1 else (GREEDY,)


def decode_spec(shape: TreeShape, max_depth: int, draft_vocab: int, launches: int, passes: int) -> RunnerSpec:
    """The runner at one depth.

    Outputs, which are fields of `DraftWindow`: `tokens` int64 [B, D]; for trees `parents`, `depths`, `mask` [B, D]; for chains
    `probs` float32 [B, K, Vd], written if they are sampled.

    Args:
        max_depth: K at full depth.
        launches: kernel launches of one draft pass, including those for its inputs, the guess and the tree.
        passes: K - 1, or K for a draft without lookahead.
    """
    D, chain = shape.num_draft_tokens, shape.topk == 1
    outputs = [BufferSpec("tokens", "req", torch.int64, (D,))]
    if chain:
        outputs.append(BufferSpec("probs", "req", torch.float32, (shape.num_steps, draft_vocab)))
    else:
        outputs += [BufferSpec(name, "req", torch.int64, (D,)) for name in ("parents", "depths", "mask")]
    return RunnerSpec(
        name="draft decode" if shape.num_steps == max_depth else f"draft decode K={shape.num_steps}",
        mode=ForwardMode.DECODE,
        width=shape.topk,
        outputs=tuple(outputs),
        num_passes=passes,
        tree_tail=0 if chain else shape.topk,
        variants=variants(shape),
        launches=passes * launches,
    )


class DraftPasses:
    """The passes of draft-decode. Every method runs inside the graph; with a grammar, eagerly, because each pass waits for its mask.

    The passes load the rows' state themselves: their only inputs are request rows and lengths.
    """

    def __init__(
        self, draft: DraftModel, shape: TreeShape, request_rows: RequestRows, state: DraftState, page_table: PageTable, inputs: InputBuffers
    ) -> None:
        self.draft, self.shape, self.request_rows, self.state = draft, shape, request_rows, state
        self.page_table, self.inputs = page_table, inputs
        # A pass advances slots by topk but positions by 1; this difference maps a slot to its position.
        steps = torch.arange(shape.num_steps, device=inputs.device)[:, None]
        self._back = (steps * (1 - shape.topk)).expand(-1, shape.topk).contiguous()

    def function(self, grammar: GrammarStep | None = None) -> Forward:
        """The function that the graph records; with `grammar` only for eager runs, restricted to drafts that it allows."""
        return partial(self.chain if self.shape.topk == 1 else self.tree, grammar=grammar)

    def chain(self, batch: ForwardBatch, outputs: Outputs, variant: str, grammar: GrammarStep | None = None) -> None:
        """Draft a chain."""
        rows, K = batch.req_pool_indices, self.shape.num_steps
        tokens, sampled, known = outputs["tokens"], variant == SAMPLED, self.draft.lookahead
        kv_lens = self.inputs.kv_lens(batch.batch_size)
        hidden = start_chain(rows, self.request_rows.last_tokens, self.state, tokens)
        token = tokens[:, known]

        def write_guess(at: int) -> torch.Tensor:
            """The guess at window position `at`, from `hidden`."""
            positions = kv_lens.to(torch.int64) + at if sampled else None
            token, probs = self.guess(hidden, rows, positions, tokens[:, 1:at], grammar)
            tokens[:, at].copy_(token)
            if probs is not None:
                outputs["probs"][:, at - 1].copy_(probs)
            return token

        if known and grammar is not None:
            token = write_guess(1)
        elif known and sampled:
            outputs["probs"][:, 0].copy_(self.state.probs[rows])
        for step in range(K - known):
            hidden = self._forward(batch, step, token[:, None], hidden)
            token = write_guess(step + known + 1)

    def guess(
        self, hidden: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor | None, drafts: torch.Tensor, grammar: GrammarStep | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`guess` after `drafts`, int64 [B, n], restricted by `grammar`; the token as the target's id."""
        mask = self._mask(drafts[:, None], grammar)
        ids, probs = guess(self.draft, hidden, self.request_rows.tables, rows, positions, mask)
        token = self.draft.map_to_target(ids)
        return (token if mask is None else mask.tokens(token)), probs

    def _mask(self, paths: torch.Tensor, grammar: GrammarStep | None) -> DraftMask | None:
        """The tokens that the draft may propose after each of W paths of n drafts; `paths` int64 [B, W, n]."""
        allowed = None if grammar is None else grammar.after(paths)
        return None if allowed is None else DraftMask(allowed, self.draft)

    def first_branches(self, rows: torch.Tensor, grammar: GrammarStep | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The branches from the last committed token: int64 [B, topk] and their log-probabilities."""
        mask = self._mask(self.request_rows.last_tokens[rows][:, None, None][..., :0], grammar)
        if mask is None:
            return self.state.guesses[rows], self.state.scores[rows]
        return self._branches(self.state.hidden[rows], mask)

    def _branches(self, hidden: torch.Tensor, mask: DraftMask | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The `topk` most likely continuations, as the target's ids, and their log-probabilities."""
        logits = self.draft.logits(hidden)
        ids, scores = top_log_probs(logits if mask is None else mask.logits(logits), self.shape.topk)
        tokens = self.draft.map_to_target(ids)
        return (tokens, scores) if mask is None else mask.branches(tokens, scores)

    def tree(self, batch: ForwardBatch, outputs: Outputs, variant: str, grammar: GrammarStep | None = None) -> None:
        """Draft a tree."""
        rows, topk, size = batch.req_pool_indices, self.shape.topk, batch.batch_size
        beam = start_tree(*self.first_branches(rows, grammar))
        paths = beam.tokens[:, :, None]
        hidden = self.state.hidden[rows][:, None].expand(-1, topk, -1)
        for step in range(self.shape.num_steps - 1):
            flat = hidden.reshape(size * topk, -1).contiguous()
            hidden = self._forward(batch, step, beam.tokens, flat, beam.mask)
            children, scores = self._branches(hidden, self._mask(paths, grammar))
            beam = grow_tree(beam, children.view(size, topk, topk), scores.view(size, topk, topk))
            paths = torch.cat([paths.gather(1, beam.parents[:, :, None].expand_as(paths)), beam.tokens[:, :, None]], 2)
            hidden = hidden.view(size, topk, -1).gather(1, beam.parents[:, :, None].expand(-1, -1, hidden.shape[-1]))
        tree = cut_tree(beam, self.request_rows.last_tokens[rows], self.shape)
        for name, output in outputs.items():
            output.copy_(getattr(tree, name))

    def _forward(
        self, batch: ForwardBatch, step: int, tokens: torch.Tensor, hidden: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One pass. tokens int64 [B, topk], hidden [B * topk, hidden], mask int64 [B, topk] -> hidden [B * topk,
        hidden].

        Branch j writes slot `kv_len + step * topk + j`; all branches have sequence position `kv_len + step`.
        """
        topk = self.shape.topk
        tail = 0 if mask is None else (step + 1) * topk
        depths = None if topk == 1 else self._back[step].expand(batch.batch_size, -1)
        fill_window(batch, self.page_table, self.inputs.kv_lens(batch.batch_size), tokens, depths, ahead=step * topk)
        if mask is not None:
            assert batch.tree_mask is not None
            batch.tree_mask.copy_(mask.flatten())
        return self.draft.forward(replace(batch, pass_index=step, hidden_states=hidden, tree_tail=tail))


def extend_spec(full: TreeShape, shape: TreeShape, feature_width: int, dtype: torch.dtype, launches: int) -> RunnerSpec:
    """The runner over windows of `shape`; `full` is the shape at full depth.

    Inputs: `features` [B * D, feature_width], the target's hidden states, and `accept_lens` int32 [B]. No outputs: results go
    to `DraftState`.
    """
    return RunnerSpec(
        name="draft extend" if shape == full else f"draft extend K={shape.num_steps}",
        mode=ForwardMode.DRAFT_EXTEND,
        width=shape.num_draft_tokens,
        outputs=(),
        inputs=(BufferSpec("features", "token", dtype, (feature_width,)), BufferSpec("accept_lens", "req", torch.int32, pad=1)),
        variants=variants(full),
        launches=launches,
    )
