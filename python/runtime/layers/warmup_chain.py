"""Runs the GEMMs of a model in their order, so that every kernel which their combinations need is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from runtime.layers.gemm.gemm import Gemm, GemmKey, input_dtype
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.layers.ops import BlockOps, LatentRows, Stream


def run_chain(
    ops: BlockOps,
    gemms: Sequence[Gemm],
    rows: int,
    after_experts: Callable[[torch.Tensor, RMSNorm], Stream],
    add: Callable[[torch.Tensor, Linear, Stream, RMSNorm], Stream],
) -> None:
    """Run each kind of GEMM once after each kind that may have written the stream.

    Args:
        after_experts: the stream, float32 [rows, hidden], as if a sparse MLP had written it for the norm.
        add: `linear_add` without the exchange between ranks.
    """
    streams, done, writer = dict[GemmKey, Stream](), set[tuple[GemmKey | None, GemmKey]](), None
    latent: LatentRows | None = None
    for gemm in gemms:
        key, linear, norm = gemm.key(rows), gemm.linear, gemm.norm
        if gemm.op != "logits" and (writer, key) not in done:
            done.add((writer, key))
            x = torch.zeros((rows, linear.in_features), dtype=input_dtype(linear, norm), device=linear.weight.device)
            if norm is None:
                ops.linear(x, linear)
                if gemm.q_norm is not None and latent is not None:
                    ops.project_queries(latent, linear, gemm.q_norm)
                continue
            if writer is None:
                stream = Stream(torch.zeros((rows, norm.weight.shape[0]), device=linear.weight.device))
            else:
                stream = streams[writer]
            if gemm.op != "linear_add" and stream.norm is not None and stream.norm is not norm:
                stream = after_experts(stream.h, norm)
            if gemm.q_norm is not None:
                latent = ops.project_latent(stream, norm, linear, gemm.q_norm)
            elif gemm.op == "linear":
                ops.norm_linear(stream, norm, linear)
            elif gemm.op == "gate_up":
                ops.norm_gate_up(stream, norm, linear, gemm.activation)
            else:
                streams[key] = add(x, linear, stream, norm)
        if gemm.op == "linear_add":
            writer = key
