"""The block operations on a CUDA GPU: GEMM kernels with fused epilogues, or cuBLAS with separate kernels if that is faster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy

import torch
from sgl_kernel import silu_and_mul

from runtime.distributed.parallel_group import FusedExchange, ParallelGroup
from runtime.layers.activation import Activation, gated
from runtime.layers.bounded_head import BoundedHead, HeadWithCopy
from runtime.layers.candidate_head import CandidateHead
from runtime.layers.cuda_delta_ops import CudaDeltaOps
from runtime.layers.cuda_latent_ops import CudaLatentOps, prepared_queries
from runtime.layers.draft_input import DraftInput
from runtime.layers.gemm.autotune import GemmGroup, Run, autotune_gemms, compile_all, group_gemms
from runtime.layers.gemm.deferred_norm import DeferredNorm, RowScale
from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.gemm.float32_gemms import has_float32_gemms
from runtime.layers.gemm.fused_gemm import fused_gemm
from runtime.layers.gemm.gemm import Gemm, GemmKey, GemmOp, PassTimer, input_dtype, takes_kernels
from runtime.layers.gemm.head_trial import HeadCopies, best_token
from runtime.layers.gemm.pass_trial import choose_within_passes, rivals
from runtime.layers.gemm.quantized_rows import quantized_gemm
from runtime.layers.gemm.quantized_trial import WeightKind, choose_quantized, kind_of
from runtime.layers.gemm.tilings import default_choice, m_bucket
from runtime.layers.gemm.timings import GemmChoice, GemmTimings
from runtime.layers.gemm.triton_gemm import MAX_ROWS
from runtime.layers.gemm.widen import widened_linear
from runtime.layers.kernels.add_normed import add_normed_rows
from runtime.layers.kernels.argmax_kernel import argmax_chunks, argmax_rows
from runtime.layers.kernels.embed_rows import embed_rows
from runtime.layers.kernels.join_rows import join_rows
from runtime.layers.kernels.pause import pause
from runtime.layers.kernels.pdl import starts_early
from runtime.layers.kernels.rms_norm import rms_norm_rows
from runtime.layers.kernels.rope_and_cache import rope_and_cache
from runtime.layers.kernels.row_norms import norm_rows
from runtime.layers.linear import Linear
from runtime.layers.moe.experts import Experts
from runtime.layers.moe.kernel_weights import expert_pass
from runtime.layers.moe.kernels.many_rows import Added
from runtime.layers.moe.kernels.route import FEW_ROWS, new_tickets, route
from runtime.layers.moe.kernels.run_experts import experts_few_rows, run_experts
from runtime.layers.moe.router import Router, Routing
from runtime.layers.moe.token_exchange import TokenExchange
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import LatentRows, Runs, Stream
from runtime.layers.pass_context import PassContext
from runtime.layers.rope import RotaryHeads
from runtime.layers.row_norms import RowNorms
from runtime.layers.warmup_chain import run_chain

log = logging.getLogger(__name__)
TRIAL_PARTS = 128
"""Partial sums of squares per row in the timing of a GEMM after a deferred norm."""
MAX_DEFERRED = 512
"""Maximum rows of a norm that an all-reduce kernel prepares. cuBLAS, which needs a kernel for the norm, runs most GEMMs of more rows."""


class CudaOps(CudaLatentOps, CudaDeltaOps):
    """`BlockOps` for 16-bit weights. A row's result depends on its own row and on the number of rows, but not on the other rows.

    Attributes:
        pdl: whether kernels start before the previous one has ended (programmatic dependent launch; Hopper and newer).
        choices: the fastest kernels by `autotune`. Other GEMMs use `default_choice`, or cuBLAS if `autotune` has run without their m
            bucket, so that no pass waits for a compiler.
    """

    def __init__(self, timings: GemmTimings, pdl: bool | None = None) -> None:
        self.pdl = starts_early(torch.device("cuda", torch.cuda.current_device())) if pdl is None else pdl
        self.choices: dict[GemmKey, GemmChoice] = {}
        self._quantized: dict[WeightKind, tuple[bool, str]] = {}
        self._timings = timings
        self._copies = HeadCopies(timings, self.pdl)
        self._tuned_buckets: set[int] | None = None
        self._num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._float32_gemms, self._tickets = has_float32_gemms(), new_tickets(torch.device("cuda", torch.cuda.current_device()))

    def embed(
        self, ids: torch.Tensor, table: torch.Tensor, next_norm: RMSNorm | None = None, scale: float = 1.0, in_prompt: bool = False
    ) -> Stream:
        """`table[ids] * scale` in float32, and `next_norm` of it."""
        h, normed = embed_rows(ids, table, scale, next_norm, self.pdl)
        return Stream(h, next_norm, normed=normed, in_prompt=in_prompt)

    def join(
        self, ids: torch.Tensor, table: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, layout: DraftInput
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Embeddings concatenated with hidden states [T, 2 * hidden], and the start of the stream float32 [T, hidden] or None."""
        return join_rows(ids, table, states, positions, layout, self.pdl)

    def norm(self, h: torch.Tensor, norm: RMSNorm, dtype: torch.dtype) -> torch.Tensor:
        """RMS norm of float32 `h` [T, hidden], in `dtype`."""
        return rms_norm_rows(h, norm, dtype, self.pdl)

    def linear(self, x: torch.Tensor, linear: Linear, in_prompt: bool = False) -> torch.Tensor:
        """`linear(x)`, [T, out]."""
        return self._linear(x, None, linear, self.choice("linear", linear, x.shape[0], in_prompt), in_prompt)

    def norm_linear(self, stream: Stream, norm: RMSNorm, linear: Linear) -> torch.Tensor:
        """`linear(norm(h))`, [T, out] in the model's dtype."""
        choice = self.choice("linear", linear, stream.h.shape[0], stream.in_prompt)
        return self._linear(*self._normed(stream, norm, choice), linear, choice, stream.in_prompt)

    def linear_add(self, x: torch.Tensor, linear: Linear, stream: Stream, next_norm: RMSNorm | None = None) -> Stream:
        """`h + linear.reduce(linear(x))` in float32, in the storage of `h`."""
        choice = self.choice("linear_add", linear, x.shape[0], stream.in_prompt)
        return self._linear_add(x, linear, stream.h, next_norm, choice, stream.in_prompt)

    def add_normed(
        self, x: torch.Tensor, norm: RMSNorm, stream: Stream, next_norm: RMSNorm | None = None, factor: torch.Tensor | None = None
    ) -> Stream:
        """`(h + norm(x)) * factor` in float32, in the storage of `h`, with `next_norm` in the same kernel."""
        normed = add_normed_rows(x, norm, stream.h, next_norm, factor, self.pdl)
        return Stream(stream.h, next_norm, normed=normed, in_prompt=stream.in_prompt)

    def norm_gate_up(self, stream: Stream, norm: RMSNorm, gate_up: Linear, activation: Activation = Activation.SILU) -> torch.Tensor:
        """`activation(gate) * up` of the normed stream, [T, intermediate]."""
        choice = self.choice("gate_up", gate_up, stream.h.shape[0], stream.in_prompt)
        return self._gate_up(*self._normed(stream, norm, choice), gate_up, choice, activation, stream.in_prompt)

    def route(self, x: torch.Tensor, router: Router) -> Routing:
        """The experts of each row of `x`."""
        return route(x, router, self._tickets, pdl=self.pdl)

    def norm_route(self, stream: Stream, norm: RMSNorm, router: Router) -> tuple[torch.Tensor, Routing]:
        """`norm(h)` [T, hidden] in the model's dtype and its experts; for few rows the router's kernel applies a deferred norm."""
        deferred, rows = stream.deferred, len(stream.h)
        if deferred is None or rows > FEW_ROWS:
            x, _ = self._normed(stream, norm, None)
            return x, self.route(x, router)
        assert stream.norm is norm, "another norm was deferred"
        x, scale = torch.empty_like(deferred.scaled), RowScale(deferred.squares, norm.eps)
        return x, route(deferred.scaled, router, self._tickets, norm=scale, normed=x, pdl=self.pdl)

    def experts(self, x: torch.Tensor, experts: Experts, routing: Routing, in_prompt: bool = False) -> torch.Tensor:
        """The weighted sum of the outputs of each row's experts, [T, hidden] in the dtype of `x`."""
        return run_experts(expert_pass(x, experts, routing, torch.empty_like(x), self.pdl), self._timings.tuning.experts)

    def experts_add(
        self, x: torch.Tensor, experts: Experts, routing: Routing, stream: Stream, next_norm: RMSNorm | None, addend: torch.Tensor | None
    ) -> Stream:
        """`h` plus the sum over the ranks of `experts(x)` and `addend`, in the storage of `h`; on one rank the last kernel adds it."""
        h = stream.h
        if experts.group.size > 1:
            part = self.experts(x, experts, routing)
            total = part if addend is None else part.add_(addend)
            return self._add_of_ranks(total, experts.group, h, next_norm, stream.in_prompt)
        tuning, own = self._timings.tuning.experts, expert_pass(x, experts, routing, h, self.pdl)
        few = tuning.few_rows(own.gate_up.format, len(x))
        if few is None:
            added = Added(addend, next_norm)
            run_experts(own, tuning, added)
            return Stream(h, next_norm, normed=added.normed, in_prompt=stream.in_prompt)
        if addend is not None:
            h.add_(addend)
        deferred = self._deferred(h, next_norm, few[1].parts(h.shape[1]))
        experts_few_rows(own, few, add=True, deferred=deferred)
        return Stream(h, next_norm, deferred, in_prompt=stream.in_prompt)

    def add_scattered(self, part: torch.Tensor, exchange: TokenExchange, stream: Stream, next_norm: RMSNorm | None) -> Stream:
        """`h` plus this group's rows of the sum of `part`, in the storage of `h`."""
        return self._add_of_ranks(part, exchange.group, stream.h, next_norm, stream.in_prompt, exchange)

    def norm_rows(self, qkv: torch.Tensor, norms: RowNorms) -> torch.Tensor:
        """`norms(qkv)` in two kernels."""
        return norm_rows(qkv, norms, pdl=self.pdl)

    def rope_and_cache(self, qkv: torch.Tensor, heads: RotaryHeads, layer_id: int, context: PassContext) -> torch.Tensor:
        """Norm and rotate q and k, write k and v to their slots, return q [T, H, head_dim]."""
        batch = context.batch
        return rope_and_cache(qkv, heads, batch.positions, batch.out_cache_loc, context.kv_pool.flat(layer_id), self.pdl)

    def project_latent(self, stream: Stream, norm: RMSNorm, linear: Linear, q_norm: RMSNorm | None) -> LatentRows:
        """`linear(norm(h))`; some kernels for few rows prepare `q_norm`."""
        choice = self.choice("linear", linear, stream.h.shape[0], stream.in_prompt)
        prepared = None if q_norm is None else prepared_queries(choice, linear, len(stream.h), q_norm)
        return LatentRows(self._linear(*self._normed(stream, norm, choice), linear, choice, stream.in_prompt, prepared), prepared)

    def project_queries(self, latent: LatentRows, q_proj: Linear, q_norm: RMSNorm) -> torch.Tensor | None:
        """`q_proj(q_norm(latent))`, if the norm is prepared and this GEMM has a kernel that completes it."""
        prepared, choice = latent.deferred, self.choice("linear", q_proj, len(latent.rows))
        if prepared is None or choice is None:
            return None
        return self._linear(prepared.scaled, RowScale(prepared.squares, q_norm.eps), q_proj, choice)

    def logits(self, x: torch.Tensor, head: Linear, out: torch.Tensor | None = None) -> torch.Tensor:
        """`head(x)` in float32, [N, vocab], written to `out` if given; summed and kept in float32 throughout."""
        return self._logits(x, head, out, self.choice("logits", head, x.shape[0]))

    def greedy(self, x: torch.Tensor, head: Linear, tokens: torch.Tensor | None = None, logits: torch.Tensor | None = None) -> torch.Tensor:
        """The argmax of each row of exactly `logits(x, head)`: int64 [N], written to `tokens` if given; the logits to `logits` if given.

        Our GEMM kernels reduce each tile in the epilogue; cuBLAS stores the logits, in scratch memory if `logits` is None.
        """
        return self._greedy(x, head, tokens, logits, self.choice("logits", head, x.shape[0]))

    def candidate_head(self, head: Linear) -> CandidateHead | None:
        """A draft's LM head with a copy in e4m3, on Hopper."""
        return self._copies.candidate_head(head)

    def bounded_head(self, head: Linear) -> BoundedHead | None:
        """An LM head with a copy in int8, on Hopper; None for weights of which one is not finite."""
        return self._copies.bounded_head(head)

    def greedy_by_copy(
        self, x: torch.Tensor, head: HeadWithCopy, tokens: torch.Tensor | None = None, logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """int64 [N]: by the copy in 8 bits for numbers of rows where that is faster, otherwise `greedy`."""
        config = head.choices.get(m_bucket(len(x)))
        if config is None:
            return self.greedy(x, head.own, tokens, logits)
        return best_token(x.contiguous(), head, config, self.pdl, tokens, logits)

    def autotune(
        self, gemms: Iterable[Gemm], rows: Iterable[int], others: Runs = (), prompt_rows: Iterable[int] = (), timer: PassTimer | None = None
    ) -> dict[str, str]:
        """Compile the kernels of a model's GEMMs at the m buckets of `rows` in parallel, time them and keep the fastest.

        A norm next to a GEMM is timed with it if it needs a kernel. The head is timed with the argmax, which every decode step computes;
        the choice also applies to logits without argmax. Prompts of up to `MAX_ROWS` rows use the kernels of decode passes.
        """
        start, gemms = time.perf_counter(), list(gemms)
        decoding = {m_bucket(count) for count in rows}
        prompts = {m_bucket(count) for count in prompt_rows if count > MAX_ROWS} - decoding
        self._tuned_buckets = {*(self._tuned_buckets or ()), *decoding, *prompts}
        groups = group_gemms(gemms, sorted(decoding | prompts), prompts)
        few = [bucket for bucket in sorted(decoding) if bucket <= MAX_ROWS]
        new = [(group.dtype, group.key) for group in groups if self._timings.known(group.dtype, group.key) is None]
        found = autotune_gemms(groups, self._trial, self._timings, self._num_sms, others)
        self.choices.update({key: timed.choice for key, timed in found.items()})
        compile_all([*self._warmup_runs(gemms, groups), *self._copies.runs(few)])
        if timer is not None and (near := rivals(new, self._timings, timer)):
            compile_all(run for (_, key), kernels in near.items() for choice in kernels[1:] for run in self._runs_with(key, choice, timer))
            found |= choose_within_passes(near, self._timings, self.choices, timer)
            compile_all(self._warmup_runs(gemms, [group for group in groups if (group.dtype, group.key) in near]))
        report = {str(group): str(found[group.key]) for group in groups} | self._copies.choose(few, self.greedy)
        torch.cuda.empty_cache()
        self._quantized |= choose_quantized((gemm.linear for gemm in gemms), self._timings)
        report |= {"prompts {} {}x{}".format(*kind): line for kind, (_, line) in self._quantized.items()}
        for name, line in report.items():
            log.info("%s: %s", name, line)
        log.info("autotuned %d GEMMs; %.1f s with compilation", len(report), time.perf_counter() - start)
        return report

    def _runs_with(self, key: GemmKey, choice: GemmChoice, timer: PassTimer) -> Iterator[Run]:
        """`_warmup_runs` of the passes of `timer` with another kernel for one GEMM."""
        other = copy(self)
        other.choices = {**self.choices, key: choice}
        return other._warmup_runs(timer.gemms, group_gemms(timer.gemms, [key[-1]]))

    def choice(self, op: GemmOp, linear: Linear, rows: int, in_prompt: bool = False) -> GemmChoice:
        """The kernel for a GEMM of `rows` rows."""
        if not takes_kernels(linear) or (in_prompt and self._quantizes(linear, rows)):
            return None
        key = (op, linear.scheme.name, linear.out_features, linear.in_features, m_bucket(rows))
        if key in self.choices:
            return self.choices[key]
        tuned = self._tuned_buckets is None or key[-1] in self._tuned_buckets
        return default_choice(op, rows, self._timings.tuning, linear) if tuned else None

    def _trial(self, group: GemmGroup) -> Callable[[GemmChoice], Run]:
        """A function from choices to runs of a group's GEMM and the kernels around it."""
        run = self._trial_alone(group)
        return (lambda choice: lambda call: (pause(self.pdl), run(choice)(call))) if group.behind_pause else run

    def _trial_alone(self, group: GemmGroup) -> Callable[[GemmChoice], Run]:
        gemm, linear, rows, norm = group.gemm, group.gemm.linear, group.rows, group.gemm.norm
        device = linear.weight.device
        x = torch.randn((rows, linear.in_features), device=device).to(input_dtype(linear, norm))
        if norm is None:
            return lambda choice: lambda call: self._linear(x, None, group.linears[call % len(group.linears)], choice)
        dtype = norm.weight.dtype
        h = torch.randn((rows, norm.weight.shape[0]), device=device)
        deferred = DeferredNorm(norm.weight, h.to(dtype), torch.full((rows, TRIAL_PARTS), h.shape[1] / TRIAL_PARTS, device=device))
        stream = Stream(h, norm, deferred if dtype is torch.bfloat16 else None)
        scores = torch.empty((rows, linear.out_features if gemm.op == "logits" else 1), device=device)
        tokens = torch.empty(rows, dtype=torch.int64, device=device)

        def run(choice: GemmChoice, layer: Linear) -> object:
            if gemm.op == "linear":
                return self._linear(*self._normed(stream, norm, choice), layer, choice)
            if gemm.op == "gate_up":
                return self._gate_up(*self._normed(stream, norm, choice), layer, choice, gemm.activation)
            if gemm.op == "logits":
                return self._greedy(x, layer, tokens, scores, choice)
            if layer.is_partial:  # without the all-reduce, because ranks do not time together
                return self._linear(x, None, layer, choice)
            added = self._linear_add(x, layer, h, norm, choice)
            return added if added.deferred is not None or added.normed is not None else self.norm(h, norm, dtype)

        return lambda choice: lambda call: run(choice, group.linears[call % len(group.linears)])

    def _warmup_runs(self, gemms: Sequence[Gemm], groups: Sequence[GemmGroup]) -> Iterator[Run]:
        """Runs of all kernels that a model uses with these choices: its GEMMs with and without deferred norms, the head with and without
        logits.
        """
        for rows, head in ((group.rows, head) for group in groups if group.gemm.op == "logits" for head in group.linears):
            x = torch.zeros((rows, head.in_features), dtype=input_dtype(head), device=head.weight.device)
            yield lambda _, x=x, head=head: self.logits(x, head)
            yield lambda _, x=x, head=head: self.greedy(x, head)
        for rows in sorted({group.rows for group in groups}):
            for deferred in (True, False):
                yield lambda _, rows=rows, deferred=deferred: run_chain(
                    self, gemms, rows, lambda h, norm: self._after_experts(h, norm, deferred),
                    lambda x, linear, stream, norm: self._compile_add(x, linear, stream, norm if deferred else None),
                )  # fmt: skip

    def _after_experts(self, h: torch.Tensor, norm: RMSNorm, deferred: bool) -> Stream:
        """A stream as if the experts of a sparse MLP had written it for `norm`; their kernels are not among these GEMMs."""
        few = self._timings.tuning.experts.few_rows("dense", h.shape[0])
        return Stream(h, norm, self._deferred(h, norm, few[1].parts(h.shape[1])) if deferred and few is not None else None)

    def _compile_add(self, x: torch.Tensor, linear: Linear, stream: Stream, norm: RMSNorm | None) -> Stream:
        """`linear_add` without the all-reduce, because other ranks compile in another order."""
        if not linear.is_partial:
            return self.linear_add(x, linear, stream, norm)
        part = self._linear(x, None, linear, self.choice("linear_add", linear, x.shape[0]))
        return Stream(stream.h, norm, self._deferred_of_ranks(part, stream.h, norm, linear.group.fused))

    def _normed(self, stream: Stream, norm: RMSNorm, choice: GemmChoice) -> tuple[torch.Tensor, RowScale | None]:
        """The inputs of a GEMM with this choice: the normed rows and None, or the rows before row scaling and their scales."""

        if stream.normed is not None:
            assert stream.norm is norm, "another norm was computed"
            return stream.normed, None
        if choice is None or stream.deferred is None:
            return self.norm(stream.h, norm, norm.weight.dtype), None
        assert stream.norm is norm, "another norm was deferred"
        return stream.deferred.scaled, RowScale(stream.deferred.squares, norm.eps)

    def _linear(
        self,
        x: torch.Tensor,
        scale: RowScale | None,
        linear: Linear,
        choice: GemmChoice,
        in_prompt: bool = False,
        deferred: DeferredNorm | None = None,
    ) -> torch.Tensor:
        if choice is None:
            return self._many_rows(x, linear, in_prompt)
        out = torch.empty((x.shape[0], linear.out_features), dtype=x.dtype, device=x.device)
        fused_gemm(x, linear, out, choice, Epilogue(bias=linear.bias, scale=scale, deferred=deferred), self.pdl)
        return out

    def _gate_up(
        self,
        x: torch.Tensor,
        scale: RowScale | None,
        gate_up: Linear,
        choice: GemmChoice,
        activation: Activation = Activation.SILU,
        in_prompt: bool = False,
    ) -> torch.Tensor:
        silu, gelu = activation is Activation.SILU, activation is Activation.GELU_TANH
        if choice is None or not (silu or gelu):
            rows = self._linear(x, scale, gate_up, choice, in_prompt)
            return silu_and_mul(rows) if silu else gated(activation, rows)
        out = torch.empty((x.shape[0], gate_up.out_features // 2), dtype=x.dtype, device=x.device)
        fused_gemm(x, gate_up, out, choice, Epilogue(bias=gate_up.bias, silu=silu, gelu=gelu, scale=scale), self.pdl)
        return out

    def _linear_add(
        self, x: torch.Tensor, linear: Linear, h: torch.Tensor, next_norm: RMSNorm | None, choice: GemmChoice, in_prompt: bool = False
    ) -> Stream:
        if linear.is_partial:  # the all-reduce must precede the add and the norm
            return self._add_of_ranks(self._linear(x, None, linear, choice, in_prompt), linear.group, h, next_norm, in_prompt)
        if choice is not None:
            deferred = self._deferred(h, next_norm, choice.parts(linear.out_features))
            fused_gemm(x, linear, h, choice, Epilogue(bias=linear.bias, add=True, deferred=deferred), self.pdl)
            return Stream(h, next_norm, deferred, in_prompt=in_prompt)
        if not self._float32_gemms or not linear.is_dense:
            normed = add_normed_rows(self._many_rows(x, linear, in_prompt), None, h, next_norm, None, self.pdl)
            return Stream(h, next_norm, normed=normed, in_prompt=in_prompt)
        torch.ops.aten.addmm.dtype_out(h, x, linear.weight.t(), torch.float32, out=h)
        return Stream(h if linear.bias is None else h.add_(linear.bias), in_prompt=in_prompt)

    def _many_rows(self, x: torch.Tensor, linear: Linear, in_prompt: bool) -> torch.Tensor:
        """`linear(x)` by cuBLAS; prompts quantize their rows if the trial found that faster."""
        scale = linear.storage.scale
        if not (in_prompt and self._quantizes(linear, len(x)) and x.dtype is torch.bfloat16) or scale is None:
            return widened_linear(x, linear)
        out = quantized_gemm(x.contiguous(), linear.weight, scale, pdl=self.pdl)
        return out if linear.bias is None else out.add_(linear.bias)

    def _quantizes(self, linear: Linear, rows: int) -> bool:
        """Whether prompts of `rows` rows are quantized for this weight, by the trial at start-up."""
        return rows > MAX_ROWS and self._quantized.get(kind_of(linear), (False, ""))[0]

    def _add_of_ranks(
        self,
        part: torch.Tensor,
        group: ParallelGroup,
        h: torch.Tensor,
        next_norm: RMSNorm | None,
        in_prompt: bool,
        exchange: TokenExchange | None = None,
    ) -> Stream:
        """Sum over the ranks and add to the stream, in one kernel if `fused` supports the array; with `exchange` only this group's rows."""
        fused = group.fused
        if fused is None or not fused.fits(part):
            total = group.all_reduce(part) if exchange is None else exchange.scatter_sum(part, len(h))
            return Stream(h.add_(total), in_prompt=in_prompt)
        deferred = self._deferred_of_ranks(part, h, next_norm, fused)
        outputs = () if deferred is None else (deferred.gain, deferred.scaled, deferred.squares)
        fused.add(part, h, *outputs, scattered=exchange is not None)
        return Stream(h, next_norm, deferred, in_prompt=in_prompt)

    def _deferred_of_ranks(
        self, part: torch.Tensor, h: torch.Tensor, norm: RMSNorm | None, fused: FusedExchange | None
    ) -> DeferredNorm | None:
        """Buffers for a norm that the all-reduce kernel prepares; None if it does not, or if there are too many rows."""
        if fused is None or not fused.fits(part) or len(h) > MAX_DEFERRED:
            return None
        return self._deferred(h, norm, fused.parts(h.shape[1]))

    def _deferred(self, h: torch.Tensor, norm: RMSNorm | None, parts: int) -> DeferredNorm | None:
        """Buffers for a deferred norm, with `parts` sums of squares per row; None for float16, whose range is too small for some."""
        if norm is None or norm.weight.dtype is not torch.bfloat16:
            return None
        squares = torch.empty((h.shape[0], parts), device=h.device)
        return DeferredNorm(norm.weight, torch.empty(h.shape, dtype=norm.weight.dtype, device=h.device), squares)

    def _greedy(
        self, x: torch.Tensor, head: Linear, tokens: torch.Tensor | None, logits: torch.Tensor | None, choice: GemmChoice
    ) -> torch.Tensor:
        if tokens is None:
            tokens = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
        if choice is None or (logits is not None and not logits.is_contiguous()):
            return argmax_rows(self._logits(x, head, logits, choice), tokens, self.pdl)
        partial = torch.empty((2, x.shape[0], choice.parts(head.out_features)), dtype=torch.int32, device=x.device)
        fused_gemm(x, head, logits, choice, Epilogue(bias=head.bias, argmax=partial), self.pdl)
        return argmax_chunks(partial, tokens, self.pdl)

    def _logits(self, x: torch.Tensor, head: Linear, out: torch.Tensor | None, choice: GemmChoice) -> torch.Tensor:
        if out is None:
            out = torch.empty((x.shape[0], head.out_features), dtype=torch.float32, device=x.device)
        if choice is not None and out.is_contiguous():
            fused_gemm(x, head, out, choice, Epilogue(bias=head.bias), self.pdl)
            return out
        if not self._float32_gemms or not head.is_dense:
            return out.copy_(widened_linear(x, head))
        torch.ops.aten.mm.dtype_out(x, head.weight.t(), torch.float32, out=out)
        return out if head.bias is None else out.add_(head.bias)
