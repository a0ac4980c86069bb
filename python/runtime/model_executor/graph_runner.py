"""Captures and replays any forward function at fixed shapes: the only graph code.

One mechanism, composed and never subclassed. An owner gives a function `forward(batch, outputs, variant)` that reads persistent inputs
and writes its results into `outputs`, buffers that the runner owns; so nothing that a caller reads can be overwritten by another graph of
the shared pool.

    batch = runner.batch(live)        # outside the graph: views of the persistent inputs, padded to a captured size
    ...fill the batch...              # outside: in place
    out = runner.run(batch)           # plan (outside), then replay

`CudaReplay` is a captured graph. `EagerReplay` calls the same function on the same padded buffers: with it the tests run every runner
without a GPU. A size that was not captured runs eagerly at its own size, through the same plan and the same buffers.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from tqdm import tqdm

from runtime.batch import ForwardMode
from runtime.layers.attention.base import AttentionBackend
from runtime.layers.forward_batch import ForwardBatch
from runtime.model_executor.input_buffers import BufferSpec, InputBuffers

log = logging.getLogger(__name__)
MIB = 1 << 20
WARM_UPS = 2
BYTES_PER_NODE = 5800
"""Device memory of one kernel node of an instantiated graph, seen with CUDA 13 on an H200: 52 graphs of 300 nodes took 88 MiB."""

Outputs = dict[str, torch.Tensor]
Forward = Callable[[ForwardBatch, Outputs, str], None]


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What a runner runs, and what it will cost.

    Attributes:
        name: for logs, metrics and errors.
        mode: of its passes.
        width: tokens per request; part of a graph's key beside the batch size.
        outputs: the results, in buffers that the runner owns.
        num_steps: passes of one run, each with its own attention metadata.
        tree_tail: keys that its tree mask speaks of; 0 for causal passes.
        variants: names of the function's variants, each captured for every size.
        launches: kernels of one run, about; each takes device memory in every graph.
    """

    name: str
    mode: ForwardMode
    width: int
    outputs: tuple[BufferSpec, ...]
    num_steps: int = 1
    tree_tail: int = 0
    variants: tuple[str, ...] = ("",)
    launches: int = 0

    def output_bytes(self, max_requests: int) -> int:
        """Bytes of the outputs for `max_requests` requests."""
        return sum(spec.bytes(max_requests, self.width) for spec in self.outputs)

    def graph_bytes(self, graphs: int) -> int:
        """Bytes that `graphs` graphs take beside the memory pool."""
        return graphs * self.launches * BYTES_PER_NODE


class Replay(Protocol):
    """Runs the function once over the padded inputs."""

    def __call__(self) -> None:
        """Run it."""
        ...


@dataclass(slots=True)
class CaptureReport:
    """What one runner's capture cost.

    Attributes:
        sizes: batch sizes that have a graph.
        seconds: for all of them.
        reserved_mib: what the runner had stated.
        used_mib: device memory that its outputs and graphs took.
        captured: of that the graphs, in bytes.
    """

    name: str
    sizes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    reserved_mib: float = 0.0
    used_mib: float = 0.0
    captured: int = 0


class GraphPool:
    """The one memory pool and stream of all captures in this process."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()

    def capture(self, function: Callable[[], None]) -> Replay:
        """Warm up, then record `function`."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UPS):
                function()
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.handle, stream=self.stream):
            function()
        return graph.replay


class GraphRunner:
    """Owner of its outputs and graphs; see the file's head for the sequence of calls.

    Attributes:
        use: "graphs"; or, as a reference, "padded": eagerly over the inputs that a graph would read, or "plain": eagerly without padding.
        pool_peak: bytes of the graph pool that the largest size needs, found by `find_peak`.
        report: what capture cost.
        replayed, run_eagerly: runs so far, by kind.
    """

    def __init__(
        self,
        spec: RunnerSpec,
        forward: Forward,
        inputs: InputBuffers,
        backends: Sequence[AttentionBackend],
        replay: Literal["cuda", "eager", "none"],
        sizes: Sequence[int] = (),
        padding: bool = True,
        most: int | None = None,
    ) -> None:
        """`replay`: "cuda" captures graphs of `sizes`; "eager" pads to them and calls the function; "none" runs every batch at its size.

        `most`: requests of the largest run, padding included; None for all that `inputs` hold.
        """
        self.spec, self._forward, self._inputs, self._backends = spec, forward, inputs, backends
        self._kind, self._padding = replay, padding
        self._sizes = sorted(sizes) if replay != "none" else []
        self._replays: dict[tuple[int, str], Replay] = {}
        self._most = inputs.max_requests if most is None else most
        self._buffers = {o.name: o.allocate(self._most, spec.width, inputs.device) for o in spec.outputs}
        self._outputs: dict[int, Outputs] = {}
        self.replayed = self.run_eagerly = 0
        self.use: Literal["graphs", "padded", "plain"] = "graphs"
        self.pool_peak = 0
        self.report = CaptureReport(spec.name)

    @property
    def sizes(self) -> list[int]:
        """Batch sizes that are captured."""
        return list(self._sizes)

    # ---- outside the graph

    def size_for(self, live: int) -> int:
        """The padded size that `live` requests run at; `live` itself when they run eagerly."""
        if self.use != "plain":
            for size in self._sizes:
                if size == live or (size > live and self._padding):
                    return size
        return live

    def batch(self, size: int) -> ForwardBatch:
        """The persistent inputs for `size` requests, padding included."""
        return self._inputs.view(self.spec.mode, size, self.spec.width, self.spec.tree_tail)

    def run(self, batch: ForwardBatch, variant: str = "", oracle: bool = False) -> tuple[Outputs, bool]:
        """Plan and run over filled inputs. Returns the outputs (of the batch's size) and whether a graph was replayed.

        `oracle` makes this call an eager one on the same inputs. Outputs stay valid until this runner's next run.
        """
        self._plan(batch)
        size = batch.num_tokens // self.spec.width
        outputs = self.outputs(size)
        replay = None if oracle or self.use != "graphs" else self._replays.get((size, variant))
        if replay is None:
            self.run_eagerly += 1
            self._forward(batch, outputs, variant)
        else:
            self.replayed += 1
            replay()
        return outputs, replay is not None

    def runs(self) -> dict[str, object]:
        """How often it ran so far, for `/get_server_info`: through graphs, and eagerly."""
        return {"runner": self.spec.name, "replayed": self.replayed, "eager": self.run_eagerly}

    def rebind(self, backends: Sequence[AttentionBackend]) -> None:
        """Plan with other backends from now on: the KV pool was replaced. Before any capture."""
        assert not self._replays, "graphs hold the addresses of the old pool"
        self._backends = backends

    def find_peak(self) -> None:
        """Find `pool_peak` by an eager run of the largest size: a graph's allocations are an eager run's.

        A run of its own even where `eager_peak` ran as many: a first run's peak may hold what libraries make in it and keep, and that is
        in the memory taken by then, not in the pool.
        """
        if self._kind == "cuda" and self._sizes:
            self.pool_peak = self._peak(self._sizes[-1])

    def reserve(self, pool_bytes: int) -> int:
        """State what capturing will take, in bytes, with `pool_bytes` in the pool already; outputs are allocated and not in it."""
        if self._kind != "cuda" or not self._sizes:
            return 0
        needed = max(self.pool_peak - pool_bytes, 0) + self.spec.graph_bytes(len(self._sizes) * len(self.spec.variants))
        self.report.reserved_mib = (needed + self.spec.output_bytes(self._most)) / MIB
        return needed

    def eager_peak(self) -> int:
        """Bytes beside the outputs that an eager run of the most requests takes, where no graph fits or as a reference; 0 on the CPU."""
        return self._peak(self._most) if self._inputs.device.type == "cuda" else 0

    def _peak(self, size: int) -> int:
        """Bytes that an eager run of `size` requests allocates at its peak."""
        peak = 0
        for variant in self.spec.variants:
            batch, outputs = self._padding_batch(size), self.outputs(size)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self._forward(batch, outputs, variant)
            peak = max(peak, torch.cuda.max_memory_allocated() - before)
        return peak

    def capture(self, pool: GraphPool | None, progress: tqdm | None = None) -> CaptureReport:
        """Capture every size, largest first.

        Out of memory drops the sizes that did not fit, with a warning; other failures leave the size eager.
        """
        started = time.perf_counter()
        if self._kind == "cuda" and self._sizes:
            self._padding_batch(self._sizes[-1])  # what backends make for the largest pass is theirs
            torch.cuda.empty_cache()  # what was replaced since the profile run is nobody's
        before = _device_bytes()
        dropped: list[int] = []
        for size in reversed(self._sizes):
            try:
                self._capture_size(size, pool)
            except torch.OutOfMemoryError:
                dropped.append(size)
                torch.cuda.empty_cache()
            except RuntimeError as error:
                dropped.append(size)
                log.warning("%s: graph capture failed at batch size %d (%s); this size runs eagerly", self.spec.name, size, error)
            if progress is not None:
                progress.update()
        self._forget(dropped)
        self.report.sizes = list(self._sizes)
        self.report.seconds = time.perf_counter() - started
        if self._kind == "cuda":
            torch.cuda.empty_cache()  # what warming up took is used by nobody after it
        outputs = sum(b.numel() * b.element_size() for b in self._buffers.values())
        self.report.captured = _device_bytes() - before
        self.report.used_mib = (self.report.captured + outputs) / MIB
        return self.report

    def _capture_size(self, size: int, pool: GraphPool | None) -> None:
        outputs = self.outputs(size)
        for variant in self.spec.variants:
            batch = self._padding_batch(size)
            # A replay holds the tensors of this moment, as a captured graph holds their addresses: what is rebound later, it does not see.
            call = _bind(self._forward, replace(batch), dict(outputs), variant)
            self._replays[size, variant] = pool.capture(call) if self._kind == "cuda" and pool is not None else call

    def _padding_batch(self, size: int) -> ForwardBatch:
        """A planned batch of padding rows only."""
        batch = self.batch(size)
        self._inputs.reset()
        self._inputs.tensors["seq_lens"].fill_(batch.tokens_per_req)
        batch.seq_len_bounds[:] = batch.tokens_per_req
        self._plan(batch)
        return batch

    def _forget(self, dropped: list[int]) -> None:
        if not dropped:
            return
        self._sizes = [s for s in self._sizes if s not in dropped]
        self._replays = {key: r for key, r in self._replays.items() if key[0] not in dropped}
        if self.spec.mode is ForwardMode.EXTEND:  # its sizes are tokens, which no flag bounds
            what, way_out = "prompts of these tokens", ""
        else:
            limit = f"to {self._sizes[-1]}" if self._sizes else "or give --disable-cuda-graph"
            what, way_out = "batch sizes", f" or --cuda-graph-max-bs {limit}"
        log.warning(
            "%s: no graph for %s %s: those run eagerly and slower; lower --mem-fraction-static%s",
            *(self.spec.name, what, sorted(dropped), way_out),
        )

    def _plan(self, batch: ForwardBatch) -> None:
        for backend in self._backends:
            backend.plan(batch, self.spec.num_steps)

    def outputs(self, size: int) -> Outputs:
        """The buffers that a run of `size` requests writes (or, where a runner says so, reads)."""
        if size not in self._outputs:
            rows = {"req": size, "token": size * self.spec.width}
            self._outputs[size] = {o.name: self._buffers[o.name][: rows[o.rows]] for o in self.spec.outputs}
        return self._outputs[size]


def _bind(forward: Forward, batch: ForwardBatch, outputs: Outputs, variant: str) -> Callable[[], None]:
    return lambda: forward(batch, outputs, variant)


def _device_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


@contextmanager
def frozen_gc():
    """No garbage collection while graphs are captured: it can free tensors of a recording stream, and it slows capture threefold."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def capture_all(runners: Sequence[GraphRunner]) -> list[CaptureReport]:
    """Capture the graphs of all runners in one pool, behind one progress bar."""
    kinds = [r for r in runners if r._sizes]
    if not kinds:
        return []
    pool = GraphPool() if any(r._kind == "cuda" for r in kinds) else None
    reports = []
    quiet = pool is None
    with frozen_gc(), tqdm(total=sum(len(r._sizes) for r in kinds), desc="Capturing graphs", unit="graph", disable=quiet) as bar:
        for runner in kinds:
            bar.set_postfix_str(runner.spec.name)
            reports.append(runner.capture(pool, bar))
    return reports
