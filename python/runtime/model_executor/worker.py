"""TpWorker: the plain worker, one target that decodes a token a step."""

from __future__ import annotations

import numpy as np
import torch

from runtime.batch import BatchResult, ForwardMode, ScheduleBatch, StepStats, WorkerLimits
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.sampler import sample, top_logprobs
from runtime.model_executor.device_queue import Finish
from runtime.model_executor.device_worker import DeviceWorker
from runtime.model_executor.graph_runner import GraphRunner, Outputs, RunnerSpec
from runtime.model_executor.input_buffers import BufferSpec, InputBuffers
from runtime.model_executor.staging import HostCopy
from runtime.model_executor.target import Target, Windows, joined, to_logprobs
from runtime.model_executor.window import fill_window


def decode_spec(vocab_size: int, launches: int) -> RunnerSpec:
    """What the target's decode graph computes: logits, and the likeliest token of each."""
    return RunnerSpec(
        name="target decode",
        mode=ForwardMode.DECODE,
        width=1,
        outputs=(
            BufferSpec("logits", "token", torch.float32, 0, (vocab_size,)),
            BufferSpec("tokens", "token", torch.int64, 0),
        ),
        launches=launches,
    )


class TpWorker(DeviceWorker):
    """A `Worker` that decodes one token per request and step."""

    def __init__(self, target: Target, decode: GraphRunner, inputs: InputBuffers, limits: WorkerLimits, facts: dict[str, object]) -> None:
        super().__init__(target, (decode,), limits, facts)
        self._decode, self._inputs = decode, inputs

    def _forget(self) -> None:
        self._target.reset()

    def _step(self, batch: ScheduleBatch) -> Finish:
        live = batch.num_decodes
        size = live if batch.num_prompts else self._decode.size_for(live)
        chunks, rows = self._target.stage_rows(batch, size)
        if live == 0:
            return self._target.extend(batch, chunks)[1].collect
        forward = self._inputs_of(batch, rows)
        if batch.num_prompts == 0:
            outputs, replayed = self._decode.run(forward)
            return self._choose(batch, forward, outputs, StepStats(graph=replayed, padded_size=size))
        outputs, model = self._decode.outputs(size), self._target.runner.model
        windows = Windows(forward, live, lambda hidden, _: model.greedy(hidden, outputs["tokens"], outputs["logits"]))
        _, prompts = self._target.extend(batch, chunks, windows=windows)
        return joined(prompts.collect, self._choose(batch, forward, outputs, StepStats(padded_size=size)))

    def _inputs_of(self, batch: ScheduleBatch, rows: torch.Tensor) -> ForwardBatch:
        """The persistent inputs of the decode rows int64 [size], filled."""
        target, state, live = self._target, self._target.rows, batch.num_decodes
        forward = self._decode.batch(len(rows))
        forward.req_pool_indices.copy_(rows)
        forward.seq_len_bounds[:] = 1
        forward.seq_len_bounds[:live] = batch.len_bounds[batch.num_prompts :] + 1
        fill_window(forward, target.page_table, state.kv_lens[rows], state.last_tokens[rows][:, None])
        return forward

    def _choose(self, batch: ScheduleBatch, forward: ForwardBatch, outputs: Outputs, stats: StepStats) -> Finish:
        """Choose each request's token after its pass, set the rows, and send the tokens to the host."""
        state, live = self._target.rows, batch.num_decodes
        needs = state.needs(batch.rows[batch.num_prompts :])
        rows, after = forward.req_pool_indices[:live], forward.seq_lens[:live]
        if needs.all_greedy and not needs.adjusts:
            tokens = outputs["tokens"][:live].clone()
        else:
            tokens = sample(outputs["logits"][:live], state.tables, rows, after.to(torch.int64), needs)
        state.kv_lens[rows] = after
        state.last_tokens[rows] = tokens
        if needs.penalised:
            state.count(rows, tokens[:, None], torch.ones_like(tokens, dtype=torch.bool)[:, None])
        k = int(batch.top_logprobs.max(initial=-1))
        logprobs = HostCopy(*top_logprobs(outputs["logits"][:live], tokens, k)) if k >= 0 else None
        copied = HostCopy(tokens)
        return lambda: _collect(copied, logprobs, stats)


def decode_forward(target: Target):
    """The function that the decode graph records. Inside the graph."""
    model = target.runner.model

    def forward(batch: ForwardBatch, outputs: Outputs, variant: str) -> None:
        hidden, _ = model.forward(batch)
        model.greedy(hidden, outputs["tokens"], outputs["logits"])

    return forward


def _collect(copied: HostCopy, logprobs: HostCopy | None, stats: StepStats) -> BatchResult:
    (tokens,) = copied.wait()
    return BatchResult(
        token_ids=tokens.astype(np.int32),
        accept_lens=np.ones(len(tokens), dtype=np.int32),
        logprobs=to_logprobs(logprobs, None) if logprobs is not None else None,
        stats=stats,
    )
