"""Dry runs over padding rows with all request options: they compile kernels and measure memory."""

from __future__ import annotations

import numpy as np
import torch

from runtime.batch import PAD_ROW, RowInit, ScheduleBatch, no_ints
from runtime.layers.sampler import sample, top_logprobs
from runtime.layers.sampling_tables import SamplingNeeds
from runtime.model_executor.context import WorkerContext
from runtime.model_executor.decodes_pending import send_to_host
from runtime.model_executor.iteration import Iteration
from runtime.model_executor.request_rows import GREEDY
from runtime.model_executor.staging import HostCopy
from runtime.model_executor.target_model import ExtendPass, PromptsPending, TargetModel
from runtime.model_executor.window import load_rows
from runtime.model_executor.worker import WorkerParts
from runtime.sampling_params import MAX_TOP_LOGPROBS, SamplingParams

FILTERED = SamplingParams(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01)
"""Sampling parameters that need every filter."""


def measure_activations(context: WorkerContext, parts: WorkerParts) -> int:
    """Peak bytes of the largest prompt step and of acceptance in the largest batches, measured by dry runs over page 0.

    0 on the CPU, whose allocator returns unused memory.
    """
    if context.device.type != "cuda":
        return 0
    target = parts.target
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        # After a prefix, latent attention runs in its other form.
        if any(spec.kv.kind == "mla" for spec in target.runner.model.attention_specs):
            run_padding_prompt(context, parts, prefix=1)
        extend, prompts = run_padding_prompt(context, parts)
        if not context.config.scheduler.mixed_chunk:  # in a mixed chunk, the prompts' states are alive during acceptance
            del extend, prompts
        for depth, count in parts.depths.limits.items():
            accept_padding(parts, depth, count)
        target.rows.admit([RowInit(PAD_ROW, 0, GREEDY, 0, no_ints())])
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    target.reset()
    parts.drafter.reset()
    torch.cuda.empty_cache()
    return peak


def run_padding_prompt(context: WorkerContext, parts: WorkerParts, prefix: int = 0) -> tuple[ExtendPass, PromptsPending]:
    """Run the largest prompt step through target and drafter."""
    extend, prompts = parts.target.extend(padding_prompt(context, prefix))
    parts.drafter.follow_prompt(extend)
    if parts.target.reads_results:
        prompts.wait()
    return extend, prompts


def padding_prompt(context: WorkerContext, prefix: int = 0) -> ScheduleBatch:
    """The largest prompt step, in the padding row: as many prompts as can run, the first ones as long as possible, each after `prefix`
    cached tokens.
    """
    count = max(min(context.running, context.extend_tokens // 2), 1)
    most, left = context.config.model.context_length - 2 - prefix, context.extend_tokens - count
    lens = (1 + np.clip(left - most * np.arange(count), 0, most)).astype(np.int32)
    zeros = np.zeros(count, dtype=np.int32)
    return ScheduleBatch(
        step=0, rows=zeros + PAD_ROW, len_bounds=zeros + prefix, top_logprobs=zeros + MAX_TOP_LOGPROBS,
        new_rows=[RowInit(PAD_ROW, 1, FILTERED, 0, no_ints())], prefix_lens=zeros + prefix, extend_lens=lens,
        token_ids=np.zeros(int(lens.sum()), dtype=np.int32), next_tokens=zeros - 1, prompt_logprobs=zeros == np.arange(count),
    )  # fmt: skip


def accept_padding(parts: WorkerParts, depth: int, count: int) -> None:
    """Draft for `count` padding rows and accept with all request options. Commits nothing."""
    zeros, rows = np.zeros(count, dtype=np.int32), torch.zeros(count, dtype=torch.int64, device=parts.target.device)
    load_rows(parts.inputs, rows, parts.target.rows)
    lens, last = parts.inputs.kv_lens(count).zero_(), parts.inputs.last_tokens(count)
    iteration = Iteration(depth, zeros, rows, lens, last, zeros, SamplingNeeds.every(count), MAX_TOP_LOGPROBS)
    window, verified = parts.drafter.propose(iteration), parts.verifier.latest(iteration)
    result = parts.accepter.decide(iteration, window, verified)
    pending = send_to_host(parts.target, iteration, result.emitted(), verified)
    if parts.target.reads_results:
        pending.wait()
    greedy = Iteration(depth, zeros[:0], rows, lens, last, zeros, SamplingNeeds(True, True, False))
    if parts.accepter.fusable(greedy, window):  # compile its kernel now, not at the first batch
        parts.accepter.accept_fused(greedy, window, verified)


def sample_padding(target: TargetModel, logits: torch.Tensor) -> None:
    """Sample from float32 [B, V] logits with all request options."""
    rows = torch.full((len(logits),), PAD_ROW, dtype=torch.int64, device=logits.device)
    tokens = sample(logits, target.rows.tables, rows, rows, SamplingNeeds.every(len(logits)))
    HostCopy(*top_logprobs(logits, tokens, MAX_TOP_LOGPROBS)).wait()
