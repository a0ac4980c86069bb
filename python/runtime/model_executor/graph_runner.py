"""Captures and replays any forward function at fixed shapes: the only graph code.

One mechanism, composed and never subclassed. An owner gives a function `forward(batch, outputs, variant)` that reads persistent inputs and writes its
results into `outputs`, buffers that the runner owns; so nothing that a caller reads can be overwritten by another graph of the shared pool.

    batch = runner.batch(live)        # outside the graph: views of the persistent inputs, padded to a captured size
    ...fill the batch...              # outside: in place
    out = runner.run(batch)           # plan (outside), then replay

`CudaReplay` is a captured graph. `EagerReplay` calls the same function on the same padded buffers: with it the tests run every runner without a GPU.
A size that was not captured runs eagerly at its own size, through the same plan and the same buffers.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from tqdm import tqdm

from runtime.batch import ForwardMode
from runtime.forward_batch import ForwardBatch
from runtime.layers.attention.base import AttentionBackend
from runtime.model_executor.input_buffers import BufferSpec, InputBuffers

log = logging.getLogger(__name__)
MIB = 1 << 20
WARM_UPS = 2

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
        pool_bytes_per_token: what one token of the largest graph takes from the graph pool.
    """

    name: str
    mode: ForwardMode
    width: int
    outputs: tuple[BufferSpec, ...]
    num_steps: int = 1
    tree_tail: int = 0
    variants: tuple[str, ...] = ("",)
    pool_bytes_per_token: int = 0

    def reservation(self, max_requests: int, largest_graph: int) -> int:
        """Bytes that this runner takes: its outputs, and its share of the graph pool."""
        outputs = sum(spec.bytes(max_requests, self.width) for spec in self.outputs)
        return outputs + self.pool_bytes_per_token * self.width * largest_graph


class Replay(Protocol):
    """Runs the function once over the padded inputs."""

    def __call__(self) -> None: ...


@dataclass(slots=True)
class CaptureReport:
    """What one runner's capture cost.

    Attributes:
        sizes: batch sizes that have a graph.
        seconds: for all of them.
        reserved_mib: what the runner had stated.
        used_mib: device memory that its outputs and graphs took.
    """

    name: str
    sizes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    reserved_mib: float = 0.0
    used_mib: float = 0.0


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
    """Owner of its outputs and graphs; see the file's head for the sequence of calls."""

    def __init__(
        self,
        spec: RunnerSpec,
        forward: Forward,
        inputs: InputBuffers,
        backends: Sequence[AttentionBackend],
        replay: Literal["cuda", "eager", "none"],
        sizes: Sequence[int] = (),
        padding: bool = True,
    ) -> None:
        """`replay`: "cuda" captures graphs of `sizes`; "eager" pads to them and calls the function; "none" runs each batch at its own size."""
        self.spec, self._forward, self._inputs, self._backends = spec, forward, inputs, backends
        self._kind, self._padding = replay, padding
        self._sizes = sorted(sizes) if replay != "none" else []
        self._replays: dict[tuple[int, str], Replay] = {}
        self._buffers = {o.name: o.allocate(inputs.max_requests, spec.width, inputs.device) for o in spec.outputs}
        self._outputs: dict[int, Outputs] = {}
        self.enabled = True
        self.report = CaptureReport(spec.name, reserved_mib=spec.reservation(inputs.max_requests, max(self._sizes, default=0)) / MIB)

    # ---- outside the graph

    def size_for(self, live: int) -> int:
        """The padded size that `live` requests run at; `live` itself when they run eagerly."""
        if self.enabled:
            for size in self._sizes:
                if size == live or (size > live and self._padding):
                    return size
        return live

    def batch(self, size: int) -> ForwardBatch:
        """The persistent inputs for `size` requests, padding included."""
        return self._inputs.view(self.spec.mode, size, self.spec.width, self.spec.tree_tail)

    def run(self, batch: ForwardBatch, variant: str = "", oracle: bool = False) -> tuple[Outputs, bool]:
        """Plan and run over filled inputs. Returns the outputs (first `batch_size` requests) and whether a graph was replayed.

        `oracle` forces the eager call on the same inputs. Outputs stay valid until this runner's next run.
        """
        self._plan(batch)
        outputs = self.outputs(batch.batch_size)
        replay = None if oracle or not self.enabled else self._replays.get((batch.batch_size, variant))
        if replay is None:
            self._forward(batch, outputs, variant)
        else:
            replay()
        return outputs, replay is not None

    def capture(self, pool: GraphPool | None, progress: tqdm | None = None) -> CaptureReport:
        """Capture every size, largest first. Out of memory drops the sizes that did not fit, with a warning; other failures leave the size eager."""
        started, before = time.perf_counter(), _device_bytes()
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
        outputs = sum(b.numel() * b.element_size() for b in self._buffers.values())
        self.report.used_mib = (_device_bytes() - before + outputs) / MIB
        return self.report

    def _capture_size(self, size: int, pool: GraphPool | None) -> None:
        batch, outputs = self.batch(size), self.outputs(size)
        for variant in self.spec.variants:
            self._inputs.reset()
            self._inputs.tensors["seq_lens"].fill_(self.spec.width)
            batch.seq_len_bounds[:] = self.spec.width
            self._plan(batch)
            call = _bind(self._forward, batch, outputs, variant)
            self._replays[size, variant] = pool.capture(call) if self._kind == "cuda" and pool is not None else call

    def _forget(self, dropped: list[int]) -> None:
        if not dropped:
            return
        self._sizes = [s for s in self._sizes if s not in dropped]
        self._replays = {key: r for key, r in self._replays.items() if key[0] not in dropped}
        log.warning(
            "%s: no graph for batch sizes %s: those run eagerly and slower; lower --mem-fraction-static or --cuda-graph-max-bs %s",
            self.spec.name,
            sorted(dropped),
            f"to {self._sizes[-1]}" if self._sizes else "or give --disable-cuda-graph",
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
    """No garbage collection while graphs are captured: a collection there can free tensors of a recording stream and slows capture threefold."""
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
