"""What it saves, and costs, that short prompts wait for others (`--prefill-delayer-max-delay-passes`).

The scheduler plans steps in simulated time, for a worker whose steps last as long as assumed here: a prompt pass 3.5 ms and 10.5 µs per
token, a decode step without drafts 4.2 ms and 35 µs per request, one with three drafts 6.3 ms and 60 µs per request, with 2.5 tokens
accepted on average. That is about an 8B model in bfloat16 on an H200. Clients of a closed loop send the next request 2 ms after an answer;
others arrive at random times. Lengths vary evenly around the mean, by at most half of it. Each figure is the mean of eight runs. Nothing
here is measured on a device: the figures show the policy, not a server.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmark import picture, plots
from benchmark.markdown import Result, change, pick, table, with_provenance
from benchmark.record import Record
from benchmark.sweep import arguments
from runtime.batch import BatchResult, ScheduleBatch, StepStats, WorkerLimits
from runtime.config.flag_parser import from_fields
from runtime.config.runtime_config import RuntimeConfig
from runtime.entrypoints.prepare import prepare
from runtime.managers.messages import GenerateReq, ToDetokenizer, TokensOutBatch, ToScheduler
from runtime.managers.scheduler import Scheduler
from runtime.sampling_params import SamplingParams
from runtime.worker_info import WorkerInfo

NAME = "prompt_wait"
KEYS = ("load", "steps")
STEPS = (0, 2, 4, 8)
PASS_SECONDS, TOKEN_SECONDS = 3.5e-3, 10.5e-6
STEP_SECONDS = {0: (4.2e-3, 35e-6), 3: (6.3e-3, 60e-6)}
"""By drafts: a decode step, and each of its requests."""
ACCEPTANCE = 0.63535
"""Of each draft after an accepted one: three drafts and the token after them are then 2.5 tokens on average."""
SATURATING_TOKENS = 850
"""As for an 8B model on an H200."""
CLIENT_SECONDS = 2e-3
RUNS = 8


@dataclass(frozen=True)
class Load:
    """Requests of `prompt` and `output` tokens on average, in a closed loop of `clients`, or `rate` per second."""

    prompt: int
    output: int
    drafts: int
    requests: int
    clients: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        """How tables call it."""
        arrivals = f"{self.clients} clients" if self.clients else f"{self.rate:g} per second"
        return f"{self.prompt} to {self.output}, {arrivals}, {f'{self.drafts} drafts' if self.drafts else 'plain'}"


LOADS = (
    Load(128, 128, 3, 1500, clients=64),
    Load(128, 128, 0, 1500, clients=64),
    Load(128, 128, 3, 2000, clients=128),
    Load(200, 200, 3, 800, clients=32),
    Load(500, 500, 3, 300, clients=16),
    Load(1000, 1000, 3, 300, clients=64),
    Load(1000, 250, 3, 600, clients=128),
    Load(300, 200, 3, 600, rate=8),
    Load(150, 150, 3, 1500, rate=40),
    Load(150, 150, 3, 2000, rate=60),
)


@dataclass
class Simulation:
    """A load in simulated time; it is the worker too."""

    load: Load
    limits: WorkerLimits
    seed: int
    now: float = 0.0
    free_at: float = 0.0
    sent: int = 0
    tokens: int = 0
    prompt_passes: int = 0
    arrivals: list[float] = field(default_factory=list)
    began: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    took: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.load.name} {self.seed}")
        if self.load.clients:
            self.arrivals = [0.0003 * i for i in range(self.load.clients)]
        else:
            at = 0.0
            self.arrivals = [at := at + self.random.expovariate(self.load.rate) for _ in range(self.load.requests)]

    def receive(self, wait: float) -> ToScheduler | None:
        """The next request that has arrived; an idle scheduler waits for it."""
        if not self.arrivals or self.sent == self.load.requests or (self.arrivals[0] > self.now and not wait):
            return None
        at = heapq.heappop(self.arrivals)
        self.now, self.sent = max(self.now, at), self.sent + 1
        self.began[str(self.sent)] = at
        prompt, output = (self.random.randint(mean // 2, mean + mean // 2) for mean in (self.load.prompt, self.load.output))
        ids = [self.random.randrange(self.limits.vocab_size) for _ in range(prompt)]
        sampling = SamplingParams(temperature=0.0, max_new_tokens=output, ignore_eos=True)
        return GenerateReq(rid=str(self.sent), input_ids=ids, sampling=sampling, seed=self.sent, stream=True)

    def send(self, message: ToDetokenizer) -> None:
        """Take replies; a client sends its next request."""
        if not isinstance(message, TokensOutBatch):
            return
        for out in message.outs:
            self.tokens += len(out.token_ids)
            self.first.setdefault(out.rid, self.now)
            if out.finish is not None:
                self.took.append(self.now - self.began[out.rid])
                if self.load.clients:
                    heapq.heappush(self.arrivals, self.now + CLIENT_SECONDS)

    def info(self) -> WorkerInfo:
        """Nothing."""
        return WorkerInfo()

    def submit(self, batch: ScheduleBatch) -> Step:
        """Begin a step when the one before has ended."""
        seconds = 0.0
        if batch.num_prompts:
            self.prompt_passes += 1
            seconds += PASS_SECONDS + TOKEN_SECONDS * len(batch.token_ids)
        if batch.num_decodes:
            fixed, each = STEP_SECONDS[self.load.drafts]
            seconds += fixed + each * batch.num_decodes
        self.free_at = max(self.free_at, self.now) + seconds
        lens = [int(given < 0) for given in batch.next_tokens] + [self._accepted() for _ in range(batch.num_decodes)]
        depth = self.load.drafts if batch.num_decodes else 0
        stats = StepStats(graph=True, padded_size=batch.num_decodes, draft_tokens=depth, depth=depth)
        return Step(self, self.free_at, BatchResult(np.full(sum(lens), 7, np.int32), np.array(lens, np.int32), stats=stats))

    def _accepted(self) -> int:
        count = 1
        while count <= self.load.drafts and self.random.random() < ACCEPTANCE:
            count += 1
        return count


@dataclass(frozen=True)
class Step:
    """A step of a simulation, and when it ends."""

    simulation: Simulation
    end: float
    result: BatchResult

    def wait(self) -> BatchResult:
        """Its result, at its end."""
        self.simulation.now = max(self.simulation.now, self.end)
        return self.result


def configuration(steps: int) -> RuntimeConfig:
    """The embedded model's, with prompt steps as on a GPU."""
    fields = {"device": "cpu", "speculative_algorithm": "none", "chunked_prefill_size": 2048, "max_prefill_tokens": 8192}
    return prepare(from_fields({**fields, "prefill_delayer_max_delay_passes": steps, "watchdog_timeout": 3600.0}))[0]


def simulate(load: Load, config: RuntimeConfig, seed: int) -> dict[str, float]:
    """The figures of one run: output tokens per second, milliseconds, and prompt passes."""
    limits = WorkerLimits(
        max_total_tokens=1 << 19,
        max_running_requests=256,
        max_context_len=4096,
        max_extend_tokens=2048,
        page_size=64,
        vocab_size=32_000,
        tokens_per_step=load.drafts + 1,
        max_accept_len=load.drafts + 1,
        prefix_lookahead=int(load.drafts > 0),
        saturating_tokens=SATURATING_TOKENS,
    )
    run = Simulation(load, limits, seed)
    scheduler = Scheduler(config.scheduler, config.cache, run, (), run.receive, run.send, clock=lambda: run.now)
    while len(run.took) < load.requests:
        scheduler.step(1.0)
    ttft = [run.first[rid] - began for rid, began in run.began.items()]
    return {
        "output_throughput": run.tokens / run.now,
        "mean_ttft_ms": 1e3 * float(np.mean(ttft)),
        "p99_ttft_ms": 1e3 * float(np.percentile(ttft, 99)),
        "mean_e2e_ms": 1e3 * float(np.mean(run.took)),
        "prompt_passes": run.prompt_passes,
    }


def summary(result: Result) -> str:
    """Each load without waiting, and the change with it."""
    rows, lines = result["rows"], list[list[Any]]()
    for load in dict.fromkeys(row["load"] for row in rows):
        base = pick(rows, load=load, steps=0)
        for row in (row for row in rows if row["load"] == load):
            figures = [row[name] for name in ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_e2e_ms", "prompt_passes")]
            gain = change(row["output_throughput"], base["output_throughput"]) if base is not None and row is not base else None
            lines.append([load, row["steps"], figures[0], gain, *figures[1:]])
    header = ["load", "steps that prompts may wait", "output tok/s", "change", "TTFT, ms", "99 % of TTFT", "latency, ms", "prompt passes"]
    return table(header, lines)


render = with_provenance(summary)


def plot(result: Result, file: str) -> None:
    """Throughput against that without waiting."""
    groups: dict[str, dict[str, float | None]] = {}
    for row in result["rows"]:
        base = pick(result["rows"], load=row["load"], steps=0)
        if base is not None and row["steps"]:
            groups.setdefault(row["load"], {})[f"{row['steps']} steps"] = row["output_throughput"] / base["output_throughput"]
    picture.draw(result, file, "Prompts that wait for others", [plots.bars(groups, "Output throughput", "of that without waiting")])


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate all loads, print."""
    args = arguments(__doc__).parse_args(argv)
    record = Record(NAME, KEYS, args.out, args.quick)
    loads = [Load(32, 32, 3, 60, clients=20)] if args.quick else LOADS
    for steps in STEPS:
        config = configuration(steps)
        for load in loads:
            runs = [simulate(load, config, seed) for seed in range(1 if args.quick else RUNS)]
            record.add({"load": load.name, "steps": steps, **{name: float(np.mean([run[name] for run in runs])) for name in runs[0]}})
    record.show(render, plot)


if __name__ == "__main__":
    main()
