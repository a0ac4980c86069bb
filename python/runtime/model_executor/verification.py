"""Verification: the target's pass over a window of drafts. Plain decoding is a window of one token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from runtime.batch import ForwardMode
from runtime.layers.bounded_head import BOUNDED_ROWS
from runtime.layers.forward_batch import ForwardBatch
from runtime.model_executor.depth import USUAL_STEPS, DepthBatches, thinned
from runtime.model_executor.draft_window import DraftWindow, TreeShape
from runtime.model_executor.graph_runner import GraphRunner, Outputs, RunnerSpec
from runtime.model_executor.input_buffers import BufferSpec, InputBuffers
from runtime.model_executor.iteration import Iteration, VerifyResult
from runtime.model_executor.ragged_windows import mean_widths
from runtime.model_executor.target_model import MakeRunner, TargetModel
from runtime.model_executor.window import fill_window
from runtime.models.decoder import States

EAGER_STEPS = 8
"""Eager ragged passes round their token count up to one of about this many values per window position."""
SHARED_FROM, SHARED_SAVES, SHARED_PADDING = 16, 160_000_000, 1.25
"""A pass attends once to a shared prefix from this many requests on, if it spares each layer reading at least `SHARED_SAVES` bytes again,
because more kernels run in it; and if there is a graph of at most `SHARED_PADDING` times as many requests."""
SHARED_LAUNCHES = 4
"""Additional kernels per layer: attention to the prefix, the sums of both parts' splits, and the merge."""
MIN_REQUESTS = 64
"""The smallest batch with graphs over ragged windows: with fewer requests, a pass is bound by reading the weights, and the saved rows take
less time than the additional kernels."""


def verify_spec(target: TargetModel, shape: TreeShape, name: str, feature_width: int) -> RunnerSpec:
    """Outputs: `logits` float32 [B * D, this rank's columns], argmax `tokens` int64 [B * D], `features` [B * D, feature_width]."""
    D, model = shape.num_draft_tokens, target.runner.model
    return RunnerSpec(
        name=name,
        mode=ForwardMode.TARGET_VERIFY if D > 1 else ForwardMode.DECODE,
        width=D,
        outputs=(
            BufferSpec("logits", "token", torch.float32, (model.lm_head.out_features,)),
            BufferSpec("tokens", "token", torch.int64),
            BufferSpec("features", "token", target.runner.dtype, (feature_width,)),
        ),
        tree_tail=0 if shape.topk == 1 else D,
        launches=model.kernel_launches,
    )


def greedy_spec(full: RunnerSpec) -> RunnerSpec:
    """The runner of the same passes that finds only the most likely tokens, without logits."""
    outputs = tuple(output for output in full.outputs if output.name != "logits")
    return replace(full, name=f"{full.name} greedy", outputs=outputs)


def ragged_spec(full: RunnerSpec, mean: int) -> RunnerSpec:
    """The runner over windows of up to D tokens, `mean` on average, with the outputs of full windows.

    Input: `ragged_index` int64 [B, D], from `RaggedWindows`.
    """
    D = full.width
    outputs = tuple(replace(output, rows="req", tail=(D, *output.tail)) for output in full.outputs)
    ragged_index = BufferSpec("ragged_index", "req", torch.int64, (D,))
    return replace(full, name=f"{full.name} W={mean}", width=mean, max_queries=D, outputs=outputs, inputs=(ragged_index,))


def shared_spec(spec: RunnerSpec, layers: int) -> RunnerSpec:
    """The runner of the same passes over a prefix that all requests share."""
    return replace(spec, name=f"{spec.name} shared", launches=spec.launches + SHARED_LAUNCHES * layers, shared_prefix=True)


class Verifier:
    """Owner of the verify runners: one for each depth, and some over ragged windows at the depth that most large batches run at.

    Args:
        shape: the windows at full depth.
        feature_width: width of the states that the drafter reads.
        make: makes a graph runner of the target's passes.
        shares_prefixes: whether requests may have KV pages in common.

    Attributes:
        runners: by depth.
        ragged: the runners over ragged windows, by mean width.
        ragged_depth: the depth of ragged windows.
        shared: the runners that attend once to a prefix that all requests share, for depths up to that of ragged windows.
        greedy: the runners of few rows that find only the most likely tokens, by depth, if the LM head has bounds.
    """

    def __init__(
        self,
        target: TargetModel,
        shape: TreeShape,
        feature_width: int,
        depths: Mapping[int, DepthBatches],
        inputs: InputBuffers,
        make: MakeRunner,
        shares_prefixes: bool = True,
    ) -> None:
        self._target, self._inputs = target, inputs
        self.runners, self.greedy = dict[int, GraphRunner](), dict[int, GraphRunner]()
        self.ragged, self.shared = dict[int, GraphRunner](), dict[int, GraphRunner]()
        self.ragged_depth = USUAL_STEPS if USUAL_STEPS in depths else max(depths)
        runner = target.runner
        self._key_bytes = runner.bytes_per_slot / runner.config.num_layers
        alone = shape.topk == 1 and runner.model.context.exchange is None
        shares = alone and shares_prefixes and runner.backend.caps.shared_prefix
        capable = alone and runner.backend.caps.ragged_windows and runner.states is None
        for depth, batches in depths.items():
            name = "target decode" if depth == 0 else "verify" if depth == shape.num_steps else f"verify K={depth}"
            spec = verify_spec(target, shape.at_depth(depth), name, feature_width)
            self.runners[depth] = make(spec, self._forward, runner, batches, True)
            if runner.model.bounded_head is not None:
                own = replace(batches, captured=thinned([size for size in batches.captured if size * spec.width <= BOUNDED_ROWS]))
                self.greedy[depth] = make(greedy_spec(spec), self._greedy_forward, runner, own, True)
            if capable and depth == self.ragged_depth:
                own = replace(batches, captured=thinned([size for size in batches.captured if size >= MIN_REQUESTS]))
                specs = {mean: ragged_spec(spec, mean) for mean in mean_widths(depth)}
                self.ragged = {mean: make(spec, self._ragged_forward, runner, own, True) for mean, spec in specs.items()}
            if shares and depth <= self.ragged_depth:
                own = replace(batches, captured=thinned([size for size in batches.captured if size >= SHARED_FROM]))
                self.shared[depth] = make(shared_spec(spec, runner.config.num_layers), self._forward, runner, own, True)

    def at_depth(self, depth: int) -> list[GraphRunner]:
        """The runners of one depth."""
        others = [runners[depth] for runners in (self.greedy, self.shared) if depth in runners]
        return [self.runners[depth], *others, *(self.ragged.values() if depth == self.ragged_depth else ())]

    @property
    def special(self) -> list[GraphRunner]:
        """The runners of passes that only some iterations need, in addition to `runners`."""
        return [runner for kind in (self.greedy, self.ragged, self.shared) for runner in kind.values()]

    def padded_size(self, depth: int, live: int) -> int:
        """The padded size at which an iteration of `live` requests runs."""
        return self.runners[depth].size_for(live)

    def has_graph(self, depth: int, size: int) -> bool:
        """Whether iterations of `size` requests replay a graph."""
        return self.runners[depth].has_graph(size)

    def shared_size(self, depth: int, live: int, shared_tokens: int) -> int:
        """The padded size at which `live` requests attend once to their common prefix of `shared_tokens`; 0 if they do not."""
        runner = self.shared.get(depth)
        if runner is None or live < SHARED_FROM or shared_tokens * (live - 1) * self._key_bytes < SHARED_SAVES:
            return 0
        size = runner.size_for(live)
        return size if runner.has_graph(size) and size <= SHARED_PADDING * live else 0

    def ragged_passes(self, live: int) -> list[tuple[int, int]]:
        """Requests and tokens, padding included, of the ragged passes that `live` requests can run as, fewest tokens first.

        If full windows replay a graph, these are the passes with graphs; otherwise any number of tokens, rounded as by `EAGER_STEPS`.
        """
        runners, full = self.ragged, self.runners[self.ragged_depth]
        if not runners or full.has_graph(full.size_for(live)):
            sizes = ((mean, runner.size_for(live)) for mean, runner in runners.items())
            return sorted((size, size * mean) for mean, size in sizes if runners[mean].has_graph(size))
        return [(live, tokens) for tokens in range(live, live * full.spec.width, max(live // EAGER_STEPS, 1))]

    # ---- outside any graph

    def fill(self, iteration: Iteration, window: DraftWindow) -> ForwardBatch:
        """Fill the inputs of the verify pass."""
        batch = (self.shared if iteration.shared_tokens else self.runners)[iteration.depth].batch(iteration.size)
        if batch.shared_lens is not None:
            batch.shared_lens.fill_(iteration.shared_tokens)
        batch.seq_len_bounds[:] = iteration.bounds + window.width
        fill_window(batch, self._target.page_table, iteration.kv_lens, window.tokens, window.depths)
        if batch.tree_mask is not None:
            assert window.mask is not None
            batch.tree_mask.copy_(window.mask.flatten())
        if (ragged := iteration.ragged) is not None:
            runner, full = self._runner(iteration), batch
            batch = runner.batch(iteration.size, ragged.tokens)
            ragged.fill(batch, full, iteration.kv_lens, iteration.bounds)
            runner.inputs(iteration.size)["ragged_index"].copy_(ragged.ragged_index)
        return batch

    def run(self, iteration: Iteration, batch: ForwardBatch) -> VerifyResult:
        """Run the target over filled inputs."""
        outputs, graph = self._runner(iteration).run(batch, eager=iteration.eager)
        return self._result(iteration, outputs, graph)

    def result_of(self, iteration: Iteration, states: States) -> VerifyResult:
        """The result of an eager pass over the live windows, from its states; padding rows are zeros."""
        outputs = self.runners[iteration.depth].outputs(iteration.size)
        tokens = len(states.hidden)
        self._write(states, {name: tensor[:tokens] for name, tensor in outputs.items()})
        for tensor in outputs.values():
            tensor[tokens:].zero_()
        return self._result(iteration, outputs, graph=False)

    def latest(self, iteration: Iteration) -> VerifyResult:
        """The result buffers with their current contents."""
        return self._result(iteration, self._runner(iteration).outputs(iteration.size), graph=False)

    def can_skip_logits(self, depth: int, size: int) -> bool:
        """Whether passes of `size` requests can find only the most likely tokens: with few rows, if the LM head has bounds."""
        return depth in self.greedy and size * self.greedy[depth].spec.width <= BOUNDED_ROWS

    def skips_logits(self, iteration: Iteration) -> bool:
        """Whether the pass finds only the most likely tokens: if nothing else is needed, and it has a graph or is part of one."""
        depth, size = iteration.depth, iteration.size
        if iteration.ragged is not None or iteration.shared_tokens or not iteration.greedy_only or not self.can_skip_logits(depth, size):
            return False
        return self.greedy[depth].is_recorded or self.greedy[depth].has_graph(size)

    def _result(self, iteration: Iteration, outputs: Outputs, graph: bool) -> VerifyResult:
        logits, features = outputs.get("logits"), outputs["features"]
        if iteration.ragged is not None and logits is not None:
            logits, features = logits.flatten(0, 1), features.flatten(0, 1)
        return VerifyResult(logits, outputs["tokens"].view(iteration.size, -1), features, graph, self._target.runner.model.lm_head)

    def _runner(self, iteration: Iteration) -> GraphRunner:
        """The runner of an iteration's verify pass; for an eager ragged pass, any ragged runner."""
        if self.skips_logits(iteration):
            return self.greedy[iteration.depth]
        if iteration.ragged is None:
            return (self.shared if iteration.shared_tokens else self.runners)[iteration.depth]
        return self.ragged.get(iteration.ragged.tokens // iteration.size, next(iter(self.ragged.values())))

    # ---- inside the graphs

    def _forward(self, batch: ForwardBatch, outputs: Outputs, variant: str) -> None:
        self._write(self._target.runner.model.forward(batch, self._target.aux_layers), outputs)

    def _ragged_forward(self, batch: ForwardBatch, outputs: Outputs, variant: str) -> None:
        states = self._target.runner.model.forward(batch, self._target.aux_layers)
        ragged_index = self._inputs.named("ragged_index", batch.batch_size).flatten()
        self._write(states.part(ragged_index), {name: tensor.flatten(0, 1) for name, tensor in outputs.items()})

    def _greedy_forward(self, batch: ForwardBatch, outputs: Outputs, variant: str) -> None:
        states = self._target.runner.model.forward(batch, self._target.aux_layers)
        self._target.runner.model.most_likely(states.hidden, outputs["tokens"], self._target.agreement)
        self._write_features(states, outputs)

    def _write(self, states: States, outputs: Outputs) -> None:
        self._target.runner.model.greedy(states.hidden, outputs["tokens"], outputs["logits"], self._target.agreement)
        self._write_features(states, outputs)

    def _write_features(self, states: States, outputs: Outputs) -> None:
        if outputs["features"].shape[1]:
            outputs["features"].copy_(states.features)
