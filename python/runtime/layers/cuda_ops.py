"""The block operations on a CUDA GPU: Triton or streamed products for few tokens, cuBLAS and fused kernels for many."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from sgl_kernel import silu_and_mul
from torch.nn import functional as F
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from runtime.layers.gemm.autotune import (
    Choice,
    GemmOp,
    Key,
    candidate_configs,
    default_choice,
    describe,
    fastest,
    rotation,
    row_class,
    streamed_configs,
)
from runtime.layers.gemm.deferred_norm import NormAhead, RowScale
from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.gemm.triton_gemm import MAX_ROWS, GemmConfig, small_gemm, small_gemm_largest
from runtime.layers.gemm.wgmma_gemm import StreamedConfig, streamed_gemm, streamed_gemm_largest, takes
from runtime.layers.kernels.argmax_kernel import argmax_chunks, argmax_rows
from runtime.layers.kernels.rms_norm import rms_norm_rows
from runtime.layers.kernels.rope_and_cache import rope_into_cache
from runtime.layers.kernels.triton_launchers import one_at_a_time
from runtime.layers.linear import Linear
from runtime.layers.ops import HeadLayout, RMSNorm, Rope, Stream

log = logging.getLogger(__name__)
PROBE_TOLERANCE = 1e-2
_TIMED: dict[tuple[torch.dtype, Key], tuple[Choice, str]] = {}
"""What was fastest in this process, and the line that says so: two models with equal products compute them alike, to the last bit."""
Trials = dict[Choice, Callable[[int], object]]
"""Ways to compute one product; the argument counts calls and picks the layer."""


class Block(Protocol):
    """What `prepare` reads of a transformer block."""

    attn_norm: RMSNorm
    mlp_norm: RMSNorm
    qkv_proj: Linear
    o_proj: Linear
    gate_up_proj: Linear
    down_proj: Linear


@dataclass(frozen=True, slots=True)
class Product:
    """One kind of matrix product of a model: the operation around it, the layers that have it, and how many rows go in."""

    op: GemmOp
    linears: list[Linear]
    rows: int

    def __str__(self) -> str:
        return f"{self.op} {self.linears[0].out_features}x{self.linears[0].in_features} rows {self.rows}"

    @property
    def key(self) -> Key:
        """What choices are kept by."""
        return self.op, self.linears[0].out_features, self.linears[0].in_features, self.rows


class CudaOps:
    """`BlockOps` for 16-bit weights. A row's result depends on its own row and on how many rows the pass has, never on the other rows.

    Attributes:
        pdl: whether kernels start before the one ahead has ended (programmatic dependent launch; Hopper and newer).
        choices: what `prepare` found fastest; products that it did not time follow `default_choice`, or where it prepared other numbers of
            rows, cuBLAS: no pass waits for a compiler.
    """

    def __init__(self, pdl: bool | None = None) -> None:
        self.pdl = torch.cuda.get_device_capability()[0] >= 9 if pdl is None else pdl
        self.choices: dict[Key, Choice] = {}
        self._prepared: set[int] | None = None
        self._num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        self._float_products = _products_in_float32()

    def norm(self, h: torch.Tensor, norm: RMSNorm, dtype: torch.dtype) -> torch.Tensor:
        """RMS norm of float32 `h` [T, hidden], in `dtype`."""
        return rms_norm_rows(h, norm.weight, norm.eps, dtype, self.pdl)

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """`linear(x)`, [T, out]."""
        return self._linear(x, None, linear, self._choice("linear", linear, x.shape[0]))

    def norm_linear(self, stream: Stream, norm: RMSNorm, linear: Linear) -> torch.Tensor:
        """`linear(norm(h))`, [T, out] in the model's dtype."""
        choice = self._choice("linear", linear, stream.h.shape[0])
        return self._linear(*self._normed(stream, norm, choice), linear, choice)

    def linear_add(self, x: torch.Tensor, linear: Linear, stream: Stream, following: RMSNorm | None = None) -> Stream:
        """`h + linear(x)` in float32, in the storage of `h`."""
        return self._linear_add(x, linear, stream.h, following, self._choice("linear_add", linear, x.shape[0]))

    def norm_gate_up(self, stream: Stream, norm: RMSNorm, gate_up: Linear) -> torch.Tensor:
        """`silu(gate) * up` of the normed stream, [T, intermediate]."""
        choice = self._choice("gate_up", gate_up, stream.h.shape[0])
        return self._gate_up(*self._normed(stream, norm, choice), gate_up, choice)

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        rope: Rope,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        positions: torch.Tensor,
        out_cache_loc: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Norm and rotate q and k, write k and v to their slots, return q [T, H, head_dim]."""
        return rope_into_cache(qkv, layout, rope, q_norm, k_norm, positions, out_cache_loc, k_cache, v_cache, self.pdl)

    def logits(self, x: torch.Tensor, head: Linear, out: torch.Tensor | None = None) -> torch.Tensor:
        """`head(x)` in float32, [N, vocab], written to `out` where given; summed and kept in float32 throughout."""
        return self._logits(x, head, out, self._choice("logits", head, x.shape[0]))

    def greedy(self, x: torch.Tensor, head: Linear, tokens: torch.Tensor | None = None, logits: torch.Tensor | None = None) -> torch.Tensor:
        """The argmax of each row of `logits(x, head)`, bit for bit: int64 [N], written to `tokens` where given, as `logits` is.

        Where a kernel of ours computes the product, each tile is reduced with it; where cuBLAS does, without `logits` they are scratch.
        """
        return self._greedy(x, head, tokens, logits, self._choice("logits", head, x.shape[0]))

    def prepare(
        self,
        layers: Sequence[Block],
        head: Linear,
        rows: Iterable[int],
        timed: bool = False,
        others: Iterable[Callable[[], object]] = (),
    ) -> dict[str, str]:
        """Compile the kernels of a model's products at the row classes of `rows`, side by side; weights may be dummies.

        Call before any graph is captured. With `timed`, also time Triton's cuts, streamed ones and cuBLAS on the model's own weights and
        keep the fastest; otherwise `default_choice` decides. A norm beside a product is timed with it where it takes a kernel; the head is
        timed with the argmax of its logits, which every decode step takes, and the choice is for logits alone too.

        Args:
            others: runs of other kernels, to be compiled beside these.

        Returns:
            A line for each product, for the log and the server's info.
        """
        start = time.perf_counter()
        classes = sorted({row_class(count) for count in rows if count <= MAX_ROWS})
        self._prepared = {*(self._prepared or ()), *classes}
        norm = layers[0].attn_norm
        products: list[tuple[GemmOp, list[Linear]]] = [
            ("linear", [layer.qkv_proj for layer in layers]),
            ("linear_add", [layer.o_proj for layer in layers]),
            ("gate_up", [layer.gate_up_proj for layer in layers]),
            ("linear_add", [layer.down_proj for layer in layers]),
            ("logits", [head]),
        ]
        trials = [
            (Product(op, linears, size), self._trials(Product(op, linears, size), norm, timed))
            for op, linears in products
            for size in classes
        ]
        _compile([*(run for _, runs in trials for run in runs.values()), *(lambda _, other=other: other() for other in others)])
        log.info("compiled the matrix products of up to %d rows, and more, in %.1f s", MAX_ROWS, time.perf_counter() - start)
        report = {str(product): self._keep_fastest(product, runs) if timed else describe(next(iter(runs))) for product, runs in trials}
        _compile(self._blocks(layers[0], head, classes))
        if not timed:
            return report
        torch.cuda.empty_cache()
        for name, line in report.items():
            log.info("%s: %s", name, line)
        log.info("timed %d matrix products; %.1f s with compilation", len(report), time.perf_counter() - start)
        return report

    def _keep_fastest(self, product: Product, runs: Trials) -> str:
        dtype = product.linears[0].weight.dtype
        if (dtype, product.key) not in _TIMED:
            best, times = fastest(runs, max(rotation([linear.weight for linear in product.linears]), 2))
            line = f"{describe(best)} ({', '.join(f'{describe(choice)} {micros:.1f} µs' for choice, micros in times.items())})"
            _TIMED[dtype, product.key] = best, line
        self.choices[product.key], line = _TIMED[dtype, product.key]
        return line

    def _trials(self, product: Product, norm: RMSNorm, timed: bool) -> Trials:
        """One run of a product for each choice worth timing, or for the one that the rule makes."""
        op, linears, rows = product.op, product.linears, product.rows
        linear = linears[0]
        h = torch.randn((rows, norm.weight.shape[0]), device=linear.weight.device)
        x = torch.randn((rows, linear.in_features), device=linear.weight.device).to(linear.weight.dtype)
        ahead = NormAhead(norm.weight, h.to(norm.weight.dtype), torch.full((rows, 128), h.shape[1] / 128, device=h.device))
        stream = Stream(h, norm, ahead if norm.weight.dtype is torch.bfloat16 else None)
        scores = torch.empty((rows, linear.out_features if op == "logits" else 1), device=h.device)
        tokens = torch.empty(rows, dtype=torch.int64, device=h.device)

        def run(choice: Choice) -> Callable[[int], object]:
            def one(call: int) -> object:
                layer = linears[call % len(linears)]
                if op == "linear":
                    return self._linear(*self._normed(stream, norm, choice), layer, choice)
                if op == "gate_up":
                    return self._gate_up(*self._normed(stream, norm, choice), layer, choice)
                if op == "logits":
                    return self._greedy(x, layer, tokens, scores, choice)
                added = self._linear_add(x, layer, h, norm, choice)
                return added if added.ahead is not None else self.norm(h, norm, norm.weight.dtype)

            return one

        known = _TIMED.get((linear.weight.dtype, product.key)) if timed else (self._choice(op, linear, rows), "")
        if known is not None:
            return {known[0]: run(known[0])}
        others = candidate_configs(op, rows)
        if takes(linear.weight, silu=op == "gate_up"):
            streamed = streamed_configs(op, rows, linear.out_features, self._num_sms)
            others = streamed if streamed and rows > 64 else (*others, *streamed)  # Triton's are slower for more, on an H200
        return {choice: run(choice) for choice in (None, *others)}

    def _choice(self, op: GemmOp, linear: Linear, rows: int) -> Choice:
        if rows > MAX_ROWS or linear.in_features % 16 or type(linear) is not Linear:
            return None
        key = (op, linear.out_features, linear.in_features, row_class(rows))
        if key in self.choices:
            return self.choices[key]
        return default_choice(op, rows) if self._prepared is None or key[-1] in self._prepared else None

    def _normed(self, stream: Stream, norm: RMSNorm, choice: Choice) -> tuple[torch.Tensor, RowScale | None]:
        """What the product so computed reads of the normed stream: it, or its rows before their scale, and the scale."""
        if choice is None or stream.ahead is None:
            return self.norm(stream.h, norm, norm.weight.dtype), None
        assert stream.norm is norm, "what was left ahead is for another norm"
        return stream.ahead.scaled, RowScale(stream.ahead.squares, norm.eps)

    def _linear(self, x: torch.Tensor, scale: RowScale | None, linear: Linear, choice: Choice) -> torch.Tensor:
        if choice is None:
            return linear(x)
        out = torch.empty((x.shape[0], linear.out_features), dtype=x.dtype, device=x.device)
        return self._few_rows(x, linear.weight, out, choice, Epilogue(bias=linear.bias, scale=scale))

    def _gate_up(self, x: torch.Tensor, scale: RowScale | None, gate_up: Linear, choice: Choice) -> torch.Tensor:
        if choice is None:
            return silu_and_mul(gate_up(x))
        out = torch.empty((x.shape[0], gate_up.out_features // 2), dtype=x.dtype, device=x.device)
        return self._few_rows(x, gate_up.weight, out, choice, Epilogue(bias=gate_up.bias, silu=True, scale=scale))

    def _linear_add(self, x: torch.Tensor, linear: Linear, h: torch.Tensor, following: RMSNorm | None, choice: Choice) -> Stream:
        if choice is not None:
            ahead = self._ahead(h, following, linear, choice)
            self._few_rows(x, linear.weight, h, choice, Epilogue(bias=linear.bias, add=True, ahead=ahead))
            return Stream(h, following, ahead)
        if not self._float_products or type(linear) is not Linear:
            return Stream(h.add_(linear(x)))
        torch.ops.aten.addmm.dtype_out(h, x, linear.weight.t(), torch.float32, out=h)
        return Stream(h if linear.bias is None else h.add_(linear.bias))

    def _ahead(self, h: torch.Tensor, norm: RMSNorm | None, linear: Linear, choice: GemmConfig | StreamedConfig) -> NormAhead | None:
        """Room for what the norm needs. Float16 does not hold the stream of every model before it is normed."""
        if norm is None or norm.weight.dtype is not torch.bfloat16:
            return None
        squares = torch.empty((h.shape[0], choice.parts(linear.out_features)), device=h.device)
        return NormAhead(norm.weight, torch.empty(h.shape, dtype=norm.weight.dtype, device=h.device), squares)

    def _blocks(self, block: Block, head: Linear, classes: Sequence[int]) -> Iterator[Callable[[int], object]]:
        """What a model runs, by the choices made: blocks behind each other and alone, the head with logits and without."""
        norm, qkv, o, gate_up, down = block.mlp_norm, block.qkv_proj, block.o_proj, block.gate_up_proj, block.down_proj

        def one(rows: int, following: RMSNorm | None) -> object:
            weight = qkv.weight
            stream = Stream(torch.zeros((rows, norm.weight.shape[0]), device=weight.device))
            mixed = torch.zeros((rows, o.in_features), dtype=weight.dtype, device=weight.device)
            for _ in range(2):
                self.norm_linear(stream, norm, qkv)
                stream = self.linear_add(mixed, o, stream, following)
                stream = self.linear_add(self.norm_gate_up(stream, norm, gate_up), down, stream, following)
            return stream

        for rows in classes:
            x = torch.zeros((rows, head.in_features), dtype=head.weight.dtype, device=head.weight.device)
            yield lambda _, x=x: self.logits(x, head)
            yield lambda _, x=x: self.greedy(x, head)
            for following in (norm, None):
                yield lambda _, rows=rows, following=following: one(rows, following)

    def _greedy(
        self, x: torch.Tensor, head: Linear, tokens: torch.Tensor | None, logits: torch.Tensor | None, choice: Choice
    ) -> torch.Tensor:
        if tokens is None:
            tokens = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
        if choice is None or (logits is not None and not logits.is_contiguous()):
            return argmax_rows(self._logits(x, head, logits, choice), tokens, self.pdl)
        if isinstance(choice, GemmConfig):
            largest = small_gemm_largest(x.contiguous(), head.weight, choice, out=logits, bias=head.bias, pdl=self.pdl)
        else:
            largest = streamed_gemm_largest(x.contiguous(), head.weight, choice, out=logits, bias=head.bias, pdl=self.pdl)
        return argmax_chunks(largest, tokens, self.pdl)

    def _few_rows(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, choice: GemmConfig | StreamedConfig, epilogue: Epilogue
    ) -> torch.Tensor:
        if isinstance(choice, GemmConfig):
            return small_gemm(x.contiguous(), weight, out, choice, epilogue, pdl=self.pdl)
        return streamed_gemm(x.contiguous(), weight, out, choice, epilogue, pdl=self.pdl)

    def _logits(self, x: torch.Tensor, head: Linear, out: torch.Tensor | None, choice: Choice) -> torch.Tensor:
        if out is None:
            out = torch.empty((x.shape[0], head.out_features), dtype=torch.float32, device=x.device)
        if choice is not None and out.is_contiguous():
            return self._few_rows(x, head.weight, out, choice, Epilogue(bias=head.bias))
        if not self._float_products or type(head) is not Linear:
            return out.copy_(head(x))
        torch.ops.aten.mm.dtype_out(x, head.weight.t(), torch.float32, out=out)
        return out if head.bias is None else out.add_(head.bias)


def _compile(runs: Iterable[Callable[[int], object]]) -> None:
    """Compile what the runs need side by side: Triton's passes and ptxas leave the interpreter free."""

    def one(run: Callable[[int], object]) -> None:
        torch.cuda.synchronize()  # gives a new thread the device's context, which descriptors need before any launch would
        # What does not fit the machine is left out when it is timed.
        with torch.inference_mode(), suppress(OutOfResources):
            run(0)

    first, *others = runs
    one(first)  # alone, because it makes Triton's tables of this device
    with one_at_a_time(driver.active), ThreadPoolExecutor() as pool:
        list(pool.map(one, others))
    torch.cuda.synchronize()


def _products_in_float32() -> bool:
    """Whether this torch multiplies bfloat16 into, and onto, float32; else products are rounded before they are added."""
    x = torch.randn((16, 64), device="cuda").to(torch.bfloat16)
    h = torch.randn((16, 16), device="cuda")
    want = h + F.linear(x.float(), x.float())
    try:
        torch.ops.aten.addmm.dtype_out(h, x, x.t(), torch.float32, out=h)
        alone = torch.ops.aten.mm.dtype_out(x, x.t(), torch.float32, out=torch.empty_like(h))
    except (AttributeError, RuntimeError) as error:
        log.warning("this torch has no float32 product of 16-bit matrices (%s): residual updates and logits are rounded once more", error)
        return False
    close = torch.allclose(h, want, rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE)
    return close and torch.allclose(alone, F.linear(x.float(), x.float()), rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE)
