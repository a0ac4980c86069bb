"""The accepter: decides which drafts are committed, and commits them to the request rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.batch import PAD_ROW
from runtime.config.runtime_config import SpeculativeConfig
from runtime.errors import RequestError
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.kernels.argmax import argmax
from runtime.layers.logits_processors import LogitsContext, process_logits
from runtime.layers.random_streams import RandomStream
from runtime.layers.sampler import sample, target_probs
from runtime.model_executor.accept_rules import (
    LOSSLESS,
    AcceptThresholds,
    DraftProbs,
    accept_chain_greedy,
    accept_chain_sampled,
    accept_chain_synthetic,
    accept_tree,
    compaction,
    tree_targets_sampled,
)
from runtime.model_executor.draft_window import DraftWindow
from runtime.model_executor.drafter import DrafterSpec
from runtime.model_executor.iteration import AcceptResult, Iteration, VerifyResult
from runtime.model_executor.target_model import TargetModel

ROWS_ACCEPTED_TOGETHER = 256
"""Maximum window positions whose distributions are in memory at a time: 256 over a vocabulary of 128,256 take 0.13 GiB."""


class Accepter:
    """Accepts drafts of a verified window. Launches kernels without synchronising with the device.

    Args:
        spec: gives the windows, and the maps between the draft's vocabulary and the target's.
        config: gives the thresholds, lossless unless flags lower them, and synthetic acceptance; None for plain decoding.
    """

    def __init__(self, target: TargetModel, spec: DrafterSpec, config: SpeculativeConfig | None) -> None:
        self._target, self._spec, self._thresholds = target, spec, LOSSLESS
        self._synthetic: torch.Tensor | None = None  # float32 [K], by position
        if config is not None:
            self._thresholds = AcceptThresholds(config.accept_threshold_single, config.accept_threshold_acc)
            if config.synthetic_accept is not None:
                assert spec.shape.topk == 1, "synthetic acceptance needs a chain"
                self._synthetic = torch.tensor(config.synthetic_accept, dtype=torch.float32, device=target.device)

    def set_synthetic(self, acceptance: Sequence[float]) -> None:
        """Replace synthetic acceptance, in place because graphs hold its address.

        Raises:
            RequestError: the server was started without synthetic acceptance.
        """
        if self._synthetic is None:
            why = "needs a server that was started with --speculative-synthetic-accept-length."
            raise RequestError(f"speculative_synthetic_accept_length {why}", "speculative_synthetic_accept_length")
        self._synthetic.copy_(torch.tensor(acceptance, dtype=self._synthetic.dtype))

    def accept(
        self,
        iteration: Iteration,
        window: DraftWindow,
        verified: VerifyResult,
        batch: ForwardBatch,
        emitted: torch.Tensor | None = None,
    ) -> AcceptResult:
        """Decide, move accepted KV to the front of its window (trees), and commit to the rows.

        Args:
            batch: the inputs of the verify pass.
            emitted: `AcceptResult.emitted`, written if given.
        """
        if iteration.caps is not None:
            window = window.capped(iteration.caps.device)
        elif self.fusable(iteration, window):
            return self.accept_fused(iteration, window, verified, emitted)
        result = self.decide(iteration, window, verified)
        self._commit(iteration, result, batch)
        if emitted is not None:
            result.emitted(emitted)
        return result

    # ---- one kernel for all of it

    def fusable(self, iteration: Iteration, window: DraftWindow) -> bool:
        """Whether one kernel can decide and commit: a chain on a GPU, with synthetic acceptance or greedy with unchanged logits."""
        needs = iteration.needs
        synthetic = self._synthetic_rates(window) is not None and not needs.penalised
        greedy = needs.all_greedy and not needs.adjusts
        return iteration.rows.is_cuda and window.parents is None and not needs.constrained and (synthetic or greedy)

    def accept_fused(
        self, iteration: Iteration, window: DraftWindow, verified: VerifyResult, emitted: torch.Tensor | None = None
    ) -> AcceptResult:
        """Decide and commit in one kernel; `emitted` as for `accept`."""
        from runtime.model_executor.accept_kernel import accept_chain

        rates = self._synthetic_rates(window)
        return AcceptResult(*accept_chain(window.tokens, verified.tokens, iteration, self._target.rows, self._vocab, rates, emitted))

    # ---- the decision

    def decide(self, iteration: Iteration, window: DraftWindow, verified: VerifyResult) -> AcceptResult:
        """Decide which tokens are committed, at most `ROWS_ACCEPTED_TOGETHER` window positions at a time to limit memory."""
        needs, D = iteration.needs, window.width
        if D == 1:
            return self._choose(iteration, verified)
        most = max(ROWS_ACCEPTED_TOGETHER // D, 1)
        if iteration.size <= most or (needs.all_greedy and not needs.adjusts):
            return self._decide_part(iteration, window, verified)
        spans = [(start, min(start + most, iteration.size)) for start in range(0, iteration.size, most)]
        parts = [self._decide_part(iteration.part(*span), window.part(*span), verified.part(*span)) for span in spans]
        paths = [part.path for part in parts if part.path is not None]
        lens, tokens = torch.cat([part.accept_lens for part in parts]), torch.cat([part.tokens for part in parts])
        return AcceptResult(lens, tokens, torch.cat(paths) if paths else None)

    def _choose(self, iteration: Iteration, verified: VerifyResult) -> AcceptResult:
        """Sample the token after a window without drafts."""
        needs, live, tokens = iteration.needs, iteration.live, verified.tokens
        if not needs.all_greedy or needs.adjusts:
            positions = iteration.kv_lens[:live].to(torch.int64) + 1
            tokens = tokens.clone()
            tables, logits = self._target.rows.tables, verified.all_logits(live)
            tokens[:live, 0] = sample(logits, tables, iteration.rows[:live], positions, needs, iteration.mask)
        return AcceptResult(torch.ones_like(iteration.kv_lens), tokens)

    def _decide_part(self, iteration: Iteration, window: DraftWindow, verified: VerifyResult) -> AcceptResult:
        """`decide` for few enough requests."""
        needs, tables = iteration.needs, self._target.rows.tables
        target, probs = verified.tokens, None
        positions = window.positions(iteration.kv_lens)
        if needs.adjusts or not needs.all_greedy:
            path = window.drafts_before() if needs.penalised else None
            logits = verified.all_logits(iteration.size * window.width).view(iteration.size, window.width, -1)
            logits = process_logits(logits, LogitsContext(tables, iteration.rows, positions, path, iteration.mask), needs)
            if needs.adjusts:
                target = argmax(logits.flatten(0, 1)).view_as(target)
            if not needs.all_greedy:
                rows = iteration.rows.repeat_interleave(window.width)
                probs = target_probs(logits.flatten(0, 1), tables, rows, needs.filtered, needs.any_greedy).view_as(logits)
        if window.parents is not None:
            return self._decide_tree(iteration, window, target, probs, positions)
        return self._decide_chain(iteration, window, target, probs, positions)

    def _decide_chain(
        self, iteration: Iteration, window: DraftWindow, target: torch.Tensor, probs: torch.Tensor | None, positions: torch.Tensor
    ) -> AcceptResult:
        tokens, synthetic, capped = window.tokens, self._synthetic_rates(window), iteration.caps is not None
        if synthetic is not None:
            uniforms = self._uniforms(iteration, positions[:, :-1], RandomStream.SYNTHETIC)
            return AcceptResult(*accept_chain_synthetic(tokens, target, synthetic, uniforms, self._vocab, capped))
        if probs is None:
            return AcceptResult(*accept_chain_greedy(tokens, target))
        draw, final = self._target.rows.tables.ops.draw, self._uniforms(iteration, positions, RandomStream.TARGET)
        if window.probs is None and self._thresholds.lossless:
            # Deterministic drafts: draw the target's tokens as plain decoding does, so a seed gives the same text.
            chosen = draw(probs.flatten(0, 1), final.flatten()).view_as(target)
            return AcceptResult(*accept_chain_greedy(tokens, chosen))
        q = None if window.probs is None else DraftProbs(window.probs, self._spec.to_target, self._spec.to_draft)
        coins = self._uniforms(iteration, positions[:, :-1], RandomStream.ACCEPT)
        return AcceptResult(*accept_chain_sampled(tokens, probs, coins, final, q, self._thresholds, draw, capped))

    def _decide_tree(
        self, iteration: Iteration, window: DraftWindow, target: torch.Tensor, probs: torch.Tensor | None, positions: torch.Tensor
    ) -> AcceptResult:
        tokens, parents, D = window.tokens, window.parents, window.width
        assert parents is not None
        if probs is not None:
            coins = self._uniforms(iteration, positions, RandomStream.ACCEPT)
            final = self._uniforms(iteration, positions, RandomStream.TARGET)
            draw = self._target.rows.tables.ops.draw
            target = tree_targets_sampled(tokens, parents, probs, final, coins, self._thresholds, draw)
        path, lens, out = accept_tree(tokens, parents, target, iteration.depth + 1)
        return AcceptResult(lens, _widen(out, D), _widen(path, D))

    def agrees(self, iteration: Iteration, guesses: torch.Tensor) -> torch.Tensor:
        """bool [live]: whether `guesses`, int64 [live], would have been accepted in an iteration without drafts that is committed now."""
        live = iteration.live
        if self._synthetic is None:
            return guesses == self._target.rows.last_tokens[iteration.rows[:live]]
        positions = iteration.kv_lens[:, None].to(torch.int64) + 1
        return self._uniforms(iteration, positions, RandomStream.SYNTHETIC)[:live, 0] < self._synthetic[0]

    # ---- the commit

    def _commit(self, iteration: Iteration, result: AcceptResult, batch: ForwardBatch) -> None:
        state, live, D = self._target.rows, iteration.live, result.tokens.shape[1]
        rows, lens, tokens = iteration.rows[:live], result.accept_lens[:live], result.tokens[:live]
        if result.path is not None:
            slots = batch.out_cache_loc.view(-1, D)[:live]
            self._target.runner.kv_pool.move(*compaction(slots, result.path[:live], lens), group=D)
        state.kv_lens[rows] = iteration.kv_lens[:live] + lens
        state.last_tokens[rows] = tokens.gather(1, lens.to(torch.int64)[:, None] - 1)[:, 0]
        if PAD_ROW in iteration.host_rows:  # in an iteration graph, where all rows are live
            state.kv_lens[PAD_ROW].zero_()
        if iteration.needs.penalised:
            state.count(rows, tokens, torch.arange(D, device=rows.device) < lens[:, None])

    # ---- small parts

    @property
    def _vocab(self) -> int:
        return self._target.runner.config.vocab_size

    def _synthetic_rates(self, window: DraftWindow) -> torch.Tensor | None:
        """Synthetic acceptance of each draft, float32 [K]; None if acceptance is not synthetic."""
        return None if self._synthetic is None or window.width == 1 else self._synthetic[: window.width - 1]

    def _uniforms(self, iteration: Iteration, positions: torch.Tensor, stream: RandomStream) -> torch.Tensor:
        tables = self._target.rows.tables
        return tables.ops.uniforms(tables.seeds[iteration.rows][:, None], positions, stream)


def _widen(path: torch.Tensor, width: int) -> torch.Tensor:
    """[B, N] -> [B, width], truncated or padded with column 0: entries beyond the accepted ones only need to be valid."""
    if path.shape[1] >= width:
        return path[:, :width]
    return torch.cat([path, path[:, :1].expand(-1, width - path.shape[1])], dim=1)
