"""What a worker reports about itself, for `/get_server_info`, metrics and benchmarks. No torch."""

from __future__ import annotations

import msgspec


class GraphInfo(msgspec.Struct):
    """Cost of one runner's graphs.

    Attributes:
        sizes: requests (or tokens of short prompts) that have a graph.
        seconds: time of the capture.
        reserved_mib: memory that the runner had reserved for outputs and graphs.
        used_mib: device memory that its outputs and graphs take.
    """

    runner: str
    sizes: list[int]
    seconds: float
    reserved_mib: float
    used_mib: float


class RunnerRuns(msgspec.Struct):
    """Runs of one graph runner so far: graphs replayed, and passes run eagerly."""

    runner: str
    replayed: int
    eager: int


class AcceptanceCounts(msgspec.Struct):
    """Acceptance of one kind of run. The lists have an entry for each draft position; see `AcceptanceCounters`."""

    iterations: int
    accept_length: float
    drafted_tokens: int
    accepted_tokens: int
    drafted: list[int]
    reached: list[int]
    accepted: list[int]
    rates: list[float]


class Drift(msgspec.Struct, frozen=True):
    """One draft position where two runs accept differently, beyond chance.

    Attributes:
        position: 0 for the first draft.
        graph, eager: acceptance rates.
        z: their difference in standard deviations; negative where the graph accepts less.
    """

    position: int
    graph: float
    eager: float
    z: float

    def __str__(self) -> str:
        return f"draft {self.position + 1}: {self.graph:.3f} accepted through graphs, {self.eager:.3f} eagerly (z = {self.z:+.1f})"


class AcceptanceStats(msgspec.Struct):
    """Acceptance since the start, by how windows ran, and the positions where graphs and the eager sample differ.

    Attributes:
        graph: windows verified by a replayed graph.
        eager_sample: eager drafts of windows that count in `graph` too, as far as graphs drafted what is right before them.
        eager: all other windows.
    """

    graph: AcceptanceCounts
    eager_sample: AcceptanceCounts
    eager: AcceptanceCounts
    drift: list[Drift]


class DepthClass(msgspec.Struct, frozen=True):
    """Acceptance of one class of requests, as the depth controller expects it.

    Attributes:
        rates: by position, given that all drafts before it were accepted.
        tokens: tokens that an iteration commits per request, bonus included, by depth 0..K.
        windows: draft windows and compared guesses that were counted.
    """

    rates: list[float]
    tokens: list[float]
    windows: int


class DepthInfo(msgspec.Struct, frozen=True):
    """The depth controller's choices and estimates.

    Attributes:
        chosen: iterations by depth.
        greedy, sampled: expected acceptance of new text.
        greedy_copied, sampled_copied: of text that is copied from the prompt.
        milliseconds: expected time of an iteration with a short context, by number of requests, then by depth.
        ragged: iterations whose windows differed in width.
    """

    chosen: dict[str, int]
    greedy: DepthClass
    sampled: DepthClass
    greedy_copied: DepthClass
    sampled_copied: DepthClass
    milliseconds: dict[str, dict[str, float]]
    ragged: int = 0


class SpeculativeInfo(msgspec.Struct):
    """How drafts are made. `depths`: those that the depth controller chooses from; empty where the depth is fixed."""

    algorithm: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    disable_by_batch_size: int | None
    depths: list[int] = []


class RankInfo(msgspec.Struct, frozen=True):
    """One rank of the model: where it runs, and its memory plan by owner."""

    rank: int
    host: str
    device: str
    memory_mib: dict[str, float]


class WorkerInfo(msgspec.Struct):
    """A worker's choices and measurements of the start-up, and its counters since.

    Attributes:
        startup_seconds: by phase.
        memory_mib: the memory plan, by owner.
        gemms: the kernel that autotuning chose, by GEMM; empty where nothing was tuned.
        acceptance, speculative: None without speculation.
        depth: None where the depth is fixed.
        ranks: the processes that share the model; empty where it is not sharded.
        distinct_experts: experts of a sparse layer that at least one token of a decode pass is routed to, the mean over layers and
            recent passes; None for a dense model, with attention groups, and before the first pass.
        distinct_experts_by_layer: the same of each sparse layer, in order; empty where that is None.
        token_checks: decode steps in which all ranks had the same hash of their committed tokens; None for one rank.
        exchange_micros: microseconds of a sum over the ranks by its bytes, "own kernel / NCCL"; empty on a CPU.
        exchange_share: share of the steps' time that rank 0 spends in exchanges, waiting included; None for one rank, and on GPUs,
            where the host does not see it.
    """

    startup_seconds: dict[str, float] = {}
    memory_mib: dict[str, float] = {}
    gemms: dict[str, str] = {}
    graphs: list[GraphInfo] = []
    graph_runs: list[RunnerRuns] = []
    speculative: SpeculativeInfo | None = None
    acceptance: AcceptanceStats | None = None
    depth: DepthInfo | None = None
    ranks: list[RankInfo] = []
    distinct_experts: float | None = None
    distinct_experts_by_layer: list[float] = []
    token_checks: int | None = None
    exchange_share: float | None = None
    exchange_micros: dict[str, str] = {}
