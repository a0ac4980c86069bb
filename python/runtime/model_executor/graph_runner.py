"""Captures and replays one forward function at fixed shapes: the only graph code.

The owner passes a function `forward(batch, outputs, variant)` that reads persistent inputs and writes its results into
`outputs`. One run:

    batch = runner.batch(size)             # outside the graph: views of the inputs, padded to a captured size
    ...fill the batch and runner.inputs(size) in place...
    outputs, replayed = runner.run(batch)  # plan attention outside the graph, then replay

A graph's key is (requests, tokens, variant). A shape without a graph runs eagerly, with the same plan and buffers.
`CallPool` records plain calls in place of CUDA graphs: with it the tests run every runner without a GPU.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

import torch

from runtime.batch import ForwardMode
from runtime.config.host_memory import MIB
from runtime.layers.attention.base import AttentionBackend, plan_pass
from runtime.layers.forward_batch import ForwardBatch
from runtime.model_executor.graph_capture import CallPool, GraphKey, GraphPool, Replay, device_bytes, paused_gc
from runtime.model_executor.input_buffers import BufferSpec, InputBuffers
from runtime.model_executor.output_arena import OutputArena
from runtime.progress_bar import progress_bar
from runtime.worker_info import GraphInfo, RunnerRuns

log = logging.getLogger(__name__)

Outputs = dict[str, torch.Tensor]
Forward = Callable[[ForwardBatch, Outputs, str], None]


class RunMode(Enum):
    """How a runner runs. The eager modes are references for graphs.

    REPLAY replays the graph of a padded size, or runs eagerly without padding if there is none. EAGER_PADDED runs eagerly over the inputs
    that a graph would read. EAGER runs eagerly without padding.
    """

    REPLAY = "replay"
    EAGER_PADDED = "eager padded"
    EAGER = "eager"


@contextmanager
def eagerly(runners: Sequence[GraphRunner], mode: RunMode = RunMode.EAGER_PADDED) -> Iterator[None]:
    """Run `runners` without their graphs in the `with` block.

    EAGER_PADDED reads the same inputs as a graph: GEMMs have the same shapes, hence the same kernels and bits, so only the replay differs.
    EAGER also shows the effect of padding, if shapes do not change the rounding of a GEMM.
    """
    before = [runner.mode for runner in runners]
    for runner in runners:
        runner.mode = mode
    try:
        yield
    finally:
        for runner, own in zip(runners, before, strict=True):
            runner.mode = own


@contextmanager
def recorded(runners: Sequence[GraphRunner]) -> Iterator[None]:
    """Run `runners` as parts of a larger graph in the `with` block: without their own graphs, and not counted.

    Their modes do not change: another thread may read them to send them to the other ranks.
    """
    for runner in runners:
        runner.is_recorded = True
    try:
        yield
    finally:
        for runner in runners:
            runner.is_recorded = False


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """The passes of a runner, and their cost.

    Attributes:
        name: for logs, metrics and errors.
        mode: the forward mode of the passes.
        width: tokens per request, or their mean in ragged passes; a size then counts requests. 0 for passes over prompts, whose size counts
            tokens.
        outputs: results, in the runner's arena.
        inputs: inputs in addition to those of every batch; the owner fills them before each run.
        num_passes: passes per run, each with its own attention metadata; 0 for passes without attention.
        tree_tail: keys that the tree mask covers; 0 for causal passes.
        variants: names of the function's variants, each captured for every size.
        launches: approximate number of kernels per run; each takes device memory in every graph.
        fallback: how sizes without a graph run, for warnings.
        max_queries: maximum tokens of a request in ragged windows; 0 for passes of one width and for prompts.
        requests: requests of a pass over prompts; with several, the pass is ragged.
        shared_prefix: whether the passes attend once to keys that all requests share.
    """

    name: str
    mode: ForwardMode
    width: int
    outputs: tuple[BufferSpec, ...]
    inputs: tuple[BufferSpec, ...] = ()
    num_passes: int = 1
    tree_tail: int = 0
    variants: tuple[str, ...] = ("",)
    launches: int = 0
    fallback: str = "eagerly and slower"
    max_queries: int = 0
    requests: int = 1
    shared_prefix: bool = False

    def shape(self, size: int) -> tuple[int, int]:
        """Requests and tokens of a pass of `size`."""
        return (size, size * self.width) if self.width else (self.requests, size)

    def ragged_queries(self, size: int) -> int:
        """Maximum tokens of a request in a ragged pass of `size`, since one prompt may have all of them; 0 for other passes."""
        return size if self.requests > 1 else self.max_queries


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """The sizes that a runner captures, and the memory of its outputs.

    Attributes:
        sizes: sizes to capture; if empty, everything runs eagerly.
        padding: whether other sizes are padded to the next captured one.
        max_size: the largest size that ever runs, including padding; None for the largest that the inputs hold.
        cuda: whether captures are CUDA graphs; False records plain calls.
        arena: memory of the outputs, shared with runners whose outputs are not in use when this one runs; None for its own.
        node_bytes: device memory of one kernel node of an instantiated graph.
        nccl_bytes: device memory of NCCL's calls in a graph of a pass, by its tokens.
    """

    sizes: Sequence[int] = ()
    padding: bool = True
    max_size: int | None = None
    cuda: bool = True
    arena: OutputArena | None = None
    node_bytes: int = field(kw_only=True)
    nccl_bytes: Callable[[int], int] = field(kw_only=True, default=lambda tokens: 0)


class GraphRunner:
    """Owner of its graphs; the module docstring shows the order of calls.

    Attributes:
        mode: the run mode of the following runs.
        is_recorded: whether a larger graph is being captured or run eagerly, with this runner's passes as a part.
        pool_peak: bytes of the graph pool that the largest size needs; set by `find_peak`.
        output_bytes: bytes by which its outputs enlarged their arena.
        reserved_bytes: bytes that it reserved for outputs and CUDA graphs.
        captured_bytes: bytes that its graphs take.
        replayed, ran_eagerly: number of runs so far.
    """

    def __init__(
        self, spec: RunnerSpec, forward: Forward, inputs: InputBuffers, backends: Sequence[AttentionBackend], options: GraphOptions
    ) -> None:
        self.spec, self._forward, self._inputs, self._backends = spec, forward, inputs, backends
        self._sizes, self._padding, self._cuda = sorted(options.sizes), options.padding, options.cuda
        self._nccl_bytes, self._node_bytes = options.nccl_bytes, options.node_bytes
        self._max_size = options.max_size or (inputs.max_requests if spec.width else inputs.max_tokens)
        self._arena = options.arena if options.arena is not None else OutputArena(inputs.device)
        self._storage: torch.Tensor | None = None
        self._buffers: Outputs = {}
        self._outputs: dict[tuple[int, int], Outputs] = {}
        self._replays: dict[GraphKey, Replay] = {}
        self.mode, self.is_recorded = RunMode.REPLAY, False
        self.replayed = self.ran_eagerly = 0
        self.pool_peak = 0
        largest = spec.shape(self._max_size)
        inputs.declare(spec.inputs, *largest)
        self.output_bytes = self._arena.reserve(spec.outputs, *largest)
        self.reserved_bytes = self.captured_bytes = 0
        self._capture_seconds = 0.0

    @property
    def sizes(self) -> list[int]:
        """Sizes that have a graph; before capture, those that will."""
        return list(self._sizes)

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether its sizes become CUDA graphs."""
        return self._cuda and bool(self._sizes)

    @property
    def buffers(self) -> Outputs:
        """The outputs at their largest size, by name."""
        if self._storage is not self._arena.storage:
            self._storage = self._arena.storage
            self._buffers = self._arena.buffers(self.spec.outputs, *self.spec.shape(self._max_size))
            self._outputs.clear()
        return self._buffers

    # ---- outside the graph

    def size_for(self, live: int) -> int:
        """The padded size at which `live` requests (or tokens) run; `live` itself if they run eagerly."""
        if self.mode is RunMode.EAGER:
            return live
        at = bisect_left(self._sizes, live)
        return self._sizes[at] if self._padding and at < len(self._sizes) else live

    def has_graph(self, size: int) -> bool:
        """Whether there is a graph of this size; before capture, whether there will be one."""
        return size in self._sizes

    def batch(self, size: int, tokens: int = 0) -> ForwardBatch:
        """The persistent inputs of a pass of `size`, including padding; with `tokens`, of a ragged pass of that many tokens."""
        requests, usual = self.spec.shape(size)
        spec = self.spec
        return self._inputs.view(spec.mode, requests, tokens or usual, spec.tree_tail, spec.ragged_queries(size), spec.shared_prefix)

    def inputs(self, size: int) -> dict[str, torch.Tensor]:
        """The additional inputs, `spec.inputs`, of a pass of `size`, to be filled in place."""
        return {i.name: self._inputs.named(i.name, i.shape(*self.spec.shape(size))[0]) for i in self.spec.inputs}

    def outputs(self, size: int) -> Outputs:
        """The buffers that a run of `size` writes."""
        return self._outputs_for(*self.spec.shape(size))

    def run(self, batch: ForwardBatch, variant: str = "", eager: bool = False, forward: Forward | None = None) -> tuple[Outputs, bool]:
        """Plan attention, and run over filled inputs.

        Args:
            eager: run eagerly on the same inputs even if there is a graph.
            forward: run this function eagerly instead of the runner's own.

        Returns:
            The outputs, valid until the next run in the same arena, and whether a graph was replayed.
        """
        self._plan(batch)
        requests, tokens = batch.batch_size, batch.num_tokens
        outputs = self._outputs_for(requests, tokens)
        replay = self._replays.get((requests, tokens, variant))
        if replay is None or eager or forward is not None or self.is_recorded or self.mode is not RunMode.REPLAY:
            self.ran_eagerly += not self.is_recorded
            (forward or self._forward)(batch, outputs, variant)
            return outputs, False
        self.replayed += 1
        replay()
        return outputs, True

    def runs(self) -> RunnerRuns:
        """Number of runs so far."""
        return RunnerRuns(self.spec.name, self.replayed, self.ran_eagerly)

    def report(self) -> GraphInfo:
        """The captured sizes and their cost."""
        reserved, used = self.reserved_bytes / MIB, (self.captured_bytes + self.output_bytes) / MIB
        return GraphInfo(self.spec.name, self.sizes, round(self._capture_seconds, 3), round(reserved, 1), round(used, 1))

    def rebind(self, backends: Sequence[AttentionBackend]) -> None:
        """Use other backends from now on, after the KV pool was replaced. Before any capture."""
        assert not self._replays, "graphs hold the addresses of the old pool"
        self._backends = backends

    # ---- memory

    def leave_out(self) -> None:
        """Capture no graphs, and reserve no memory for them."""
        assert not self._replays, "its graphs are captured already"
        self._sizes, self.pool_peak, self.reserved_bytes = [], 0, 0

    def find_peak(self) -> None:
        """Set `pool_peak` by an eager run of the largest captured size: a graph allocates as much as an eager run.

        This is a separate run even after an `eager_peak` of the same size, because the peak of a first run may include memory that
        libraries allocate once and keep, which is not part of the pool.
        """
        if self.uses_cuda_graphs:
            self.pool_peak = self._peak(self._sizes[-1])

    def nccl_bytes(self, size: int) -> int:
        """Device memory of NCCL's calls in a CUDA graph of this size, in one variant."""
        return max(self.spec.num_passes, 1) * self._nccl_bytes(self.spec.shape(size)[1])

    def calls_nccl(self, size: int) -> bool:
        """Whether a CUDA graph of this size contains NCCL calls."""
        return self._cuda and self.nccl_bytes(size) > 0

    def reserve(self, pool_bytes: int) -> int:
        """Bytes that capturing will take if the pool already has `pool_bytes`, without outputs, which are allocated already."""
        if not self.uses_cuda_graphs:
            return 0
        nodes = len(self._sizes) * self.spec.launches
        of_variant = nodes * self._node_bytes + sum(self.nccl_bytes(size) for size in self._sizes)
        needed = max(self.pool_peak - pool_bytes, 0) + len(self.spec.variants) * of_variant
        self.reserved_bytes = needed + self.output_bytes
        return needed

    def eager_peak(self) -> int:
        """Bytes that an eager run of the largest size takes in addition to its outputs; 0 on the CPU."""
        return self._peak(self._max_size) if self._inputs.device.type == "cuda" else 0

    def _peak(self, size: int) -> int:
        peak = 0
        for variant in self.spec.variants:
            batch, outputs = self._padding_batch(size), self.outputs(size)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self._forward(batch, outputs, variant)
            peak = max(peak, torch.cuda.max_memory_allocated() - before)
        return peak

    # ---- capture

    def capture(self, pool: GraphPool | CallPool, progress: Callable[[], object] = lambda: None) -> list[int]:
        """Capture every size, largest first. A size that fails runs eagerly; a warning names it.

        Returns:
            The sizes that have a graph.
        """
        started = time.perf_counter()
        if self.uses_cuda_graphs:
            self._padding_batch(self._sizes[-1])  # backends allocate their buffers for the largest pass
            torch.cuda.empty_cache()  # free the pools of the dry runs
        before = device_bytes()
        held = []
        for size in reversed(self._sizes):
            if self._captures(size, pool):
                held.append(size)
            progress()
        if self.uses_cuda_graphs:
            torch.cuda.empty_cache()  # free what warm-up runs allocated
        self.keep(held)
        self._capture_seconds = time.perf_counter() - started
        self.captured_bytes = device_bytes() - before
        return self.sizes

    def keep(self, sizes: Sequence[int]) -> None:
        """Drop the graphs of all other sizes, with a warning."""
        dropped = sorted(set(self._sizes) - set(sizes))
        self._sizes = sorted(sizes)
        kept = {self.spec.shape(size) for size in sizes}
        self._replays = {key: replay for key, replay in self._replays.items() if key[:2] in kept}
        if dropped:
            what, remedy = self._dropped_texts()
            log.warning(
                "%s: no graph for %s %s; they run %s. Lower --mem-fraction-static%s.",
                *(self.spec.name, what, dropped, self.spec.fallback, remedy),
            )

    def _dropped_texts(self) -> tuple[str, str]:
        if not self.spec.width:  # no flag limits the sizes of prompt graphs
            return "prompt lengths", ""
        return "batch sizes", f" or --cuda-graph-max-bs to {self._sizes[-1]}" if self._sizes else " or use --disable-cuda-graph"

    def _captures(self, size: int, pool: GraphPool | CallPool) -> bool:
        """Capture all variants of a size; returns whether that succeeded."""
        try:
            for variant in self.spec.variants:
                batch = self._padding_batch(size)
                # Like a CUDA graph, which holds addresses, the replay uses the tensors of this moment, not ones that are bound later.
                call = partial(self._forward, replace(batch), dict(self.outputs(size)), variant)
                key = (*self.spec.shape(size), variant)
                self._arena.frozen = self._inputs.frozen = True
                self._replays[key] = pool.capture(key, call)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return False
        except RuntimeError as error:
            log.warning("%s: graph capture failed at size %d (%s)", self.spec.name, size, error)
            return False
        return True

    def _padding_batch(self, size: int) -> ForwardBatch:
        """A planned batch of padding rows only."""
        batch = self.batch(size)
        width = batch.num_tokens // batch.batch_size
        self._inputs.reset(width)
        batch.seq_len_bounds[:] = width
        self._plan(batch)
        return batch

    def _plan(self, batch: ForwardBatch) -> None:
        for backend in self._backends if self.spec.num_passes else ():
            plan_pass(backend, batch, self.spec.num_passes)

    def _outputs_for(self, requests: int, tokens: int) -> Outputs:
        buffers = self.buffers
        if (requests, tokens) not in self._outputs:
            self._outputs[requests, tokens] = {o.name: buffers[o.name][: o.shape(requests, tokens)[0]] for o in self.spec.outputs}
        return self._outputs[requests, tokens]


def capture_all(runners: Sequence[GraphRunner]) -> None:
    """Capture the graphs of all runners in one pool, with one progress bar."""
    wanted = [runner for runner in runners if runner.sizes]
    graphs = GraphPool() if any(runner.uses_cuda_graphs for runner in wanted) else None
    total = sum(len(runner.sizes) for runner in wanted)
    bar = progress_bar(shown=graphs is not None, total=total, desc="Capturing graphs", unit="graph")
    with paused_gc(freeze=graphs is not None), bar:
        for runner in wanted:
            bar.set_postfix_str(runner.spec.name)
            runner.capture(graphs if graphs is not None and runner.uses_cuda_graphs else CallPool(), bar.update)
