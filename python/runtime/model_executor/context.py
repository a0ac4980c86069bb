"""The inputs of every stage of building a worker (device, dtype, sizes), and the report of the stages."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from runtime.config.device_tuning import CPU
from runtime.config.runtime_config import RuntimeConfig, SpeculativeConfig
from runtime.distributed.parallel_group import ALONE, ParallelGroup
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.moe.token_exchange import TokenExchange
from runtime.worker_info import WorkerInfo

log = logging.getLogger(__name__)
ReplayKind = Literal["cuda", "eager", "none"]


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Settings of tests and checks in addition to the configuration.

    Attributes:
        replay, sizes: how graphs are replayed, and their batch sizes; None: as configured.
        adaptive: whether the depth controller, if there is one, measures iterations and chooses depths.
        timings: times of GEMM kernels; workers that share them choose equal kernels for equal GEMMs.
    """

    replay: ReplayKind | None = None
    sizes: list[int] | None = None
    adaptive: bool = True
    timings: GemmTimings | None = None


AS_CONFIGURED = BuildOptions()


@dataclass(slots=True)
class WorkerContext:
    """Decisions made before the first weight is loaded.

    Attributes:
        running: maximum running requests of one attention group.
        sizes: batch sizes to capture.
        replay: how captured sizes are replayed.
        timings: times of GEMM kernels.
        group: the ranks that share the model.
        attention_group: the ranks that share everything except the experts; the same as `group` unless there are several attention groups.
        exchange: exchanges tokens between attention groups; None if there is one group.
        info: the report, filled stage by stage.
    """

    config: RuntimeConfig
    device: torch.device
    dtype: torch.dtype
    running: int
    sizes: list[int]
    replay: ReplayKind
    timings: GemmTimings
    group: ParallelGroup = ALONE
    attention_group: ParallelGroup = ALONE
    exchange: TokenExchange | None = None
    info: WorkerInfo = field(default_factory=WorkerInfo)

    @property
    def kv_dtype(self) -> torch.dtype | None:
        """Dtype of an 8-bit KV cache; None if the KV cache has `dtype`."""
        return torch.float8_e4m3fn if self.config.device.kv_cache_dtype == "fp8_e4m3" else None

    @property
    def speculative(self) -> SpeculativeConfig:
        """The configuration of drafts. Only for servers with drafts."""
        assert self.config.speculative is not None, "only drafters read this"
        return self.config.speculative

    @property
    def requests(self) -> int:
        """Maximum requests per pass, including padding."""
        return max(self.running, max(self.sizes, default=1))

    @property
    def extend_tokens(self) -> int:
        """Maximum prompt tokens per step: the largest chunk, or the longest prompt without chunking."""
        scheduler = self.config.scheduler
        chunk = scheduler.largest_chunk_size or scheduler.chunked_prefill_size
        return chunk if chunk > 0 else self.config.model.context_length

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds spent in the `with` block to a phase of the start-up."""
        started, seconds = time.perf_counter(), self.info.startup_seconds
        yield
        seconds[phase] = round(seconds.get(phase, 0.0) + time.perf_counter() - started, 3)


def make_context(config: RuntimeConfig, options: BuildOptions = AS_CONFIGURED, group: ParallelGroup = ALONE) -> WorkerContext:
    """Decide device, dtype, admission limit and graph sizes."""
    device = torch.device(config.device.device, 0) if config.device.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(config.device.cpu_threads)
    captured = list(config.graphs.cuda_graph_bs) if options.sizes is None else options.sizes
    kind: ReplayKind = options.replay or ("cuda" if captured and device.type == "cuda" else "none")
    default = max(captured, default=CPU.max_running_requests) if kind == "cuda" else CPU.max_running_requests
    wanted, groups = config.scheduler.max_running_requests, config.parallel.dp_size
    running = default if wanted is None else -(-wanted // groups)
    if captured and running > max(captured) and kind == "cuda":
        log.warning("batches above %d requests have no graph and run eagerly; raise --cuda-graph-max-bs to %d", max(captured), running)
    timings = options.timings or GemmTimings(config.device.tuning, group)
    attention, across = group.split(groups) if groups > 1 else (group, None)
    exchange = None if across is None else TokenExchange(across)
    return WorkerContext(config, device, getattr(torch, config.device.dtype), running, captured, kind, timings, group, attention, exchange)
