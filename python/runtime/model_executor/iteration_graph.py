"""Iteration graphs: propose, verify, process logits, accept, commit and follow of one iteration as one captured graph.

The captured function calls the same drafter, verifier and accepter as an iteration of three graphs. It also includes the load of the rows'
state and the attention schedules, which are computed on the device. The only host work is to upload request rows before it, if they have
changed, and to copy the result after it. Other iterations run as three graphs: see `serves`.

With tensor parallelism the graph includes the exchanges of all passes, the gathering of logits to sample from, and the hash of the
committed tokens. All ranks must replay the same graph, because its exchanges wait for those of the other ranks. They do: `serves` and the
variant depend only on the scheduled batch, on the run modes that rank 0 sends with it, and on the sizes that all ranks captured. Attention
groups have no iteration graphs: each would choose by the requests of its own section of the batch, but its experts exchange with those of
the other groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from runtime.batch import PAD_ROW
from runtime.config.runtime_config import RuntimeConfig
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.sampling_tables import SamplingNeeds
from runtime.model_executor.accepter import Accepter
from runtime.model_executor.depth import USUAL_STEPS, thinned
from runtime.model_executor.drafter import Drafter
from runtime.model_executor.graph_runner import GraphOptions, GraphRunner, Outputs, RunMode, RunnerSpec, recorded
from runtime.model_executor.input_buffers import BufferSpec, InputBuffers
from runtime.model_executor.iteration import CommittedWindow, Iteration, VerifyResult
from runtime.model_executor.target_model import TargetModel
from runtime.model_executor.verification import Verifier
from runtime.model_executor.window import load_rows

VARIANTS = {
    "greedy": SamplingNeeds(True, True, False),
    "sampled": SamplingNeeds(False, False, False),
    "filtered": SamplingNeeds(False, False, True),
    "mixed": SamplingNeeds(False, True, True),
}
"""The sampling stages of each captured variant. Batches of greedy and sampled requests run the variant with filters, which does not change
the bits of requests without filters.
"""
MAX_REQUESTS = 32
"""The largest batch with iteration graphs: above, the gaps between separate graphs are less than 1 % of an iteration of an 8B model."""
ROWS = BufferSpec("iteration_rows", "req", torch.int64)
"""The graphs' own input of request rows, which keeps its values until other rows run. Passes outside these graphs overwrite other
inputs."""
SMALL_MODEL, TINY_MODEL = 4_000_000_000, 1_000_000_000
"""Parameters per token of one rank. Between separate graphs the GPU waits for the host, which matters for small models because their
iterations are short. With tiny models the host's work takes longer than all draft passes, so every depth has iteration graphs."""
OTHER_LAUNCHES = 100
"""Approximate number of kernels in addition to the models': inputs, schedules, acceptance and sampling."""


@dataclass(frozen=True, slots=True)
class IterationStages:
    """The parts that run an iteration.

    Attributes:
        inputs: persistent inputs that the fixed-width passes of target and drafter share.
    """

    target: TargetModel
    inputs: InputBuffers
    drafter: Drafter
    verifier: Verifier
    accepter: Accepter

    def runners(self, depth: int) -> list[GraphRunner]:
        """The graph runners of an iteration that runs as separate graphs."""
        return [self.verifier.runners[depth], *self.drafter.runners(depth)]

    def all_runners(self, depth: int) -> list[GraphRunner]:
        """The same, with those of other kinds of verify passes."""
        return [*self.verifier.at_depth(depth), *self.drafter.runners(depth)]

    def sizes(self, depth: int) -> list[int]:
        """Batch sizes that get an iteration graph: common sizes for which all its passes have graphs."""
        sizes = set.intersection(*(set(runner.sizes) for runner in self.runners(depth)))
        return thinned([size for size in sizes if size <= MAX_REQUESTS])


def iteration_graph_depths(depths: Iterable[int], config: RuntimeConfig, active_parameters: int) -> list[int]:
    """The depths with iteration graphs: 0, `USUAL_STEPS` and a fixed depth, which have graphs for all batch sizes; all depths of a tiny
    model. Large models, and models on several ranks, have none unless --enable-iteration-graph is set, because they gain little; attention
    groups have none.

    Args:
        active_parameters: weights of one rank that each token is multiplied with; the same number on all ranks.
    """
    wanted = config.graphs.iteration_graph
    if wanted is None:
        wanted = active_parameters <= SMALL_MODEL and config.parallel.tp_size == 1
    if config.parallel.dp_size > 1 or not wanted:
        return []
    if active_parameters <= TINY_MODEL:
        return sorted(depths, reverse=True)
    drafts = config.speculative
    graph_depths = {0, USUAL_STEPS} | ({drafts.num_steps} if drafts is not None and not drafts.depths else set())
    return sorted(graph_depths & set(depths), reverse=True)


class IterationGraphs:
    """Owner of one graph runner per depth.

    Attributes:
        runners: the graph runners by depth; empty if iterations always run as three graphs.
    """

    def __init__(self, stages: IterationStages, depths: Sequence[int], options: GraphOptions) -> None:
        """Make runners at `depths`, if the drafter and all attention backends can be captured.

        Args:
            options: `nccl_bytes` counts the exchanges of logits; those of the passes are added.
        """
        self._stages = stages
        self._rows: torch.Tensor | None = None  # the current values of the input `ROWS`
        models = [stages.target.runner, *(model.runner for model in stages.drafter.models())]
        plans_on_device = all(model.backend.caps.plan_on_device for model in models)
        capturable = stages.drafter.spec.capturable and (plans_on_device or not options.cuda)
        sizes = {depth: stages.sizes(depth) for depth in depths} if capturable else {}
        self.runners = {depth: self._make_runner(depth, own, options) for depth, own in sizes.items() if own}
        for depth in self.runners.keys() & stages.verifier.greedy.keys():
            stages.verifier.greedy[depth].leave_out()  # the iteration graphs contain its passes

    # ---- outside the graph

    def serves(self, iteration: Iteration) -> bool:
        """Whether there is a graph for this iteration: only decode rows, without a shared prefix, grammars, penalties, biases, minimum
        lengths or draft limits.
        """
        runner, depth = self.runners.get(iteration.depth), iteration.depth
        if runner is None or not runner.has_graph(iteration.size) or self._variant(iteration) is None:
            return False
        replays = all(part.mode is RunMode.REPLAY for part in (runner, *self._stages.all_runners(depth)))
        return replays and not iteration.shared_tokens and iteration.grammar is None and iteration.caps is None

    def run(self, iteration: Iteration) -> tuple[torch.Tensor, VerifyResult]:
        """Replay an iteration; its inputs need not be filled.

        Returns:
            `AcceptResult.emitted`, and the target's outputs. Valid until the next iteration.
        """
        runner, variant = self.runners[iteration.depth], self._variant(iteration)
        assert variant is not None, "call serves first"
        batch = runner.batch(iteration.size)
        batch.seq_len_bounds[:] = iteration.bounds + batch.tokens_per_req
        if iteration.rows is not self._rows:
            runner.inputs(iteration.size)[ROWS.name].copy_(iteration.rows)
            self._rows = iteration.rows
        outputs, _ = runner.run(batch, variant)
        return outputs["emitted"], replace(self._stages.verifier.latest(iteration), graph=True)

    def _variant(self, iteration: Iteration) -> str | None:
        """The captured variant that covers an iteration; None if there is none. The greedy one may have no logits."""
        variant, verifier = variant_of(iteration.needs), self._stages.verifier
        without_logits = variant == "greedy" and verifier.can_skip_logits(iteration.depth, iteration.size)
        return "mixed" if without_logits and iteration.top_logprobs >= 0 else variant

    def _make_runner(self, depth: int, sizes: list[int], options: GraphOptions) -> GraphRunner:
        runners = self._stages.runners(depth)
        D = runners[0].spec.width
        spec = RunnerSpec(
            name=f"iteration K={depth}",
            mode=runners[0].spec.mode,
            width=D,
            outputs=(BufferSpec("emitted", "req", torch.int64, (D + 1 if D > 1 else 1,)),),
            inputs=(ROWS,),
            num_passes=0,
            variants=tuple(VARIANTS),
            launches=OTHER_LAUNCHES + sum(runner.spec.launches for runner in runners),
            fallback="as several graphs",
        )
        own = replace(
            options,
            sizes=sizes,
            max_size=sizes[-1],
            arena=None,  # its outputs are in use together with those of its passes
            nccl_bytes=lambda tokens: options.nccl_bytes(tokens) + sum(runner.nccl_bytes(tokens // D) for runner in runners),
        )
        return GraphRunner(spec, partial(self._forward, depth), self._stages.inputs, [], own)

    # ---- inside the graph

    def _forward(self, depth: int, batch: ForwardBatch, outputs: Outputs, variant: str) -> None:
        stages, size = self._stages, batch.batch_size
        inputs, bounds = stages.inputs, batch.seq_len_bounds - batch.tokens_per_req
        load_rows(inputs, inputs.named(ROWS.name, size), stages.target.rows)
        state = inputs.rows(size), inputs.kv_lens(size), inputs.last_tokens(size)
        iteration = Iteration(depth, np.full(size, PAD_ROW, dtype=np.int32), *state, bounds, VARIANTS[variant])
        with recorded(stages.all_runners(depth)):
            window = stages.drafter.propose(iteration)
            verify_batch = stages.verifier.fill(iteration, window)
            verified = stages.verifier.run(iteration, verify_batch)
            result = stages.accepter.accept(iteration, window, verified, verify_batch, outputs["emitted"])
            if stages.target.agreement.active:
                # Padding may differ between ranks: all of it writes the state of one row, in no fixed order.
                stages.target.agreement.commit(result.tokens, result.accept_lens.masked_fill(iteration.rows == PAD_ROW, 0))
            stages.drafter.follow(iteration, CommittedWindow(window, result, verified.features))


def variant_of(needs: SamplingNeeds) -> str | None:
    """The captured variant that covers these sampling stages; None if there is none."""
    if needs.adjusts:
        return None
    if needs.any_greedy:
        return "greedy" if needs.all_greedy else "mixed"
    return "filtered" if needs.filtered else "sampled"
