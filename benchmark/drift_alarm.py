"""How early the drift alarm reports graphs that lose acceptance, its false alarms, and the cost of its samples.

The embedded model drafts every window twice on a CPU, through recorded passes and eagerly: without a fault, and with each of two faults.
With the first, the next drafts start from the slot after the last accepted one. With the second, draft-extend reads features with noise, so
that acceptance falls by about five points. For each request, the accepted drafts of both sides are recorded. The simulation runs B requests
at a time, each of which repeats a recorded one. In all simulations harmless rounding differences change a share of the windows of either
side. The windows of "hard text" are random: slots off by one, with acceptance of the first draft at 0.39. The live rows are the embedded
model itself with the first fault and the stated number of concurrent requests.

Correct graphs are simulated with near-ties at which the first drafts of both sides differ, in 0 to 100 % of the windows, for 1 to 256
requests. Either both sides are right equally often, or acceptance is forced as in benchmarks and eager drafts are never accepted. The cost
of a sample is counted in replays of an iteration. It is not measured on a GPU here, so there are three assumptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmark import picture, plots
from benchmark.drift_simulation import (
    COSTS,
    EARLY,
    NEAR_TIES,
    REQUESTS,
    SPOILT,
    STEPS,
    Cost,
    Lens,
    detection,
    false_alarms,
    hard_text,
    near_ties,
    replayed,
    start_cost,
)
from benchmark.markdown import Result, percent, table, with_provenance
from benchmark.record import Record
from benchmark.sweep import arguments, positive
from runtime.batch import EagerSample, RowInit, StepStats
from runtime.check_acceptance import EMBEDDED_PROMPTS, Session, read_prompts, tokenised
from runtime.config.flag_parser import parse
from runtime.entrypoints.prepare import prepare
from runtime.layers.forward_batch import ForwardBatch
from runtime.model_executor.acceptance_monitor import AcceptanceMonitor
from runtime.model_executor.drift_alarm import DriftAlarm, Pairs
from runtime.model_executor.eager_drafts import Compared
from runtime.model_executor.graph_runner import eagerly
from runtime.model_executor.iteration import Iteration
from runtime.model_executor.sample_schedule import SampleSchedules
from runtime.text.tokenizer import Tokenizer

NAME = "drift_alarm"
KEYS = ("kind", "fault", "requests", "draft")
NONE, OFF_BY_ONE, HARD, NOISE = "none", "slots off by one", "slots off by one, hard text", "5 points"
MOST = {OFF_BY_ONE: 4_000, HARD: 4_000, NOISE: 20_000}
"""Iterations of the longest simulation, by fault."""
SOME_NEAR_TIES = 0.2
LIVE = {1: 256, 16: 48}
"""Tokens of each answer of the live runs, by number of requests."""
NOISE_SCALE = 0.02
"""Standard deviation of the noise, relative to that of the features. Acceptance of the embedded model falls by five points."""
Fault = Callable[[dict[str, torch.Tensor]], None]
"""Changes the inputs of draft-extend through graphs."""


def session(prompts: int, new_tokens: int) -> Session:
    """The embedded model with its draft on a CPU, all runners over padded buffers."""
    from runtime.model_executor.build import build_worker
    from runtime.model_executor.context import BuildOptions
    from runtime.speculative.registry import make_drafter

    flags = ["--device", "cpu", "--speculative-algorithm", "EAGLE3", "--max-running-requests", "16", "--log-level", "warning"]
    flags += ["--speculative-disable-by-batch-size", "16"]
    shape = ["--speculative-num-steps", str(STEPS), "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(STEPS + 1)]
    config, model_config = prepare(parse([*flags, *shape]).args)
    ids = tokenised(Tokenizer.load(config.model.tokenizer_path), read_prompts(EMBEDDED_PROMPTS, prompts))
    worker = build_worker(config, model_config, make_drafter, BuildOptions("eager", [1, 2, 4, 8, 16]))
    return Session(worker, config, model_config, ids, new_tokens)


class EveryIteration:
    """A sample schedule that drafts every window twice."""

    def next(self, alarm: DriftAlarm, possible: bool = True) -> EagerSample:
        """See `SampleSchedules.next`."""
        return EagerSample(taken=possible)

    def observe(self, seconds: float | None, disturbed: bool, after: EagerSample) -> None:
        """See `SampleSchedules.observe`; times are ignored."""


def off_by_one(inputs: dict[str, torch.Tensor]) -> None:
    """The next drafts start from the wrong position."""
    lens = inputs["accept_lens"]
    lens.copy_(lens % (STEPS + 1) + 1)


def noise() -> Fault:
    """The draft reads features with noise."""
    rng = torch.Generator().manual_seed(0)

    def disturb(inputs: dict[str, torch.Tensor]) -> None:
        features = inputs["features"]
        features.add_(torch.randn(features.shape, generator=rng) * features.float().std() * NOISE_SCALE)

    return disturb


@contextmanager
def faulty(run: Session, fault: Fault | None) -> Iterator[AcceptanceMonitor]:
    """Inside the `with` block, replays of draft-extend have a fault, and the monitor takes samples although the session checks graphs."""
    worker = run.worker
    (extend,) = [runner for runner in worker.runners if runner.spec.name == "draft extend"]
    replay, monitor = extend.run, worker.parts.monitor
    count, unsampled = monitor.add, monitor.without_sample

    def sabotaged(batch: ForwardBatch, variant: str = "", eager: bool = False) -> Any:
        if fault is not None and not eager:
            fault(extend.inputs(batch.batch_size))
        return replay(batch, variant, eager)

    extend.run, monitor.without_sample = sabotaged, nullcontext  # type: ignore[method-assign]
    worker.reset()
    with eagerly(worker.iteration_runners):
        yield monitor
    extend.run, monitor.add, monitor.without_sample = replay, count, unsampled  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class Recorded(Compared):
    """Also appends the pairs of each request to its list of [graph, eager, mismatched]."""

    texts: Sequence[list[list[int]]] = ()

    def pairs(self, accept_lens: npt.NDArray[np.integer], wanted: npt.NDArray[np.bool_]) -> Pairs:
        """See `Compared.pairs`."""
        found = Compared.pairs(self, accept_lens, np.ones_like(wanted))
        texts = [text for text, compared in zip(self.texts, self.rows, strict=True) if compared]
        for text, *pair in zip(texts, found.graph.tolist(), found.eager.tolist(), found.mismatched.tolist(), strict=True):
            text.append(pair)
        return found


def record_pairs(run: Session, fault: Fault | None) -> Lens:
    """Run all prompts once, and return the accepted drafts of each request over time."""
    texts, rows = list[list[list[int]]](), dict[int, list[list[int]]]()
    drafter, drafts = run.worker.parts.drafter, run.worker.eager_drafts
    admitted, compared = drafter.admit, drafts.compare

    def admit(new_rows: Sequence[RowInit]) -> None:
        admitted(new_rows)
        for init in new_rows:
            rows[init.row] = list[list[int]]()
            texts.append(rows[init.row])

    def compare(iteration: Iteration, committed: torch.Tensor) -> Compared | None:
        found = compared(iteration, committed)
        own = [rows[row] for row in iteration.host_rows.tolist()]
        return None if found is None else Recorded(found.depth, found.rows, found.found, found.verify, own)

    with faulty(run, fault) as monitor:
        monitor.schedule = EveryIteration()  # type: ignore[assignment]
        drafter.admit, drafts.compare = admit, compare  # type: ignore[method-assign]
        run.run()
        drafter.admit, drafts.compare = admitted, compared  # type: ignore[method-assign]
    return [np.array(text, dtype=np.int64) for text in texts if text]


def live(run: Session, requests: int, new_tokens: int) -> dict[str, Any]:
    """Run some prompts with the wrong slot in replays of draft-extend, and count iterations until the alarm."""
    found: dict[str, Any] = {"kind": "live", "fault": OFF_BY_ONE, "requests": requests, "draft": None, "alarm": None}
    seen, part = 0, replace(run, prompts=run.prompts[:requests], max_new_tokens=new_tokens)
    with faulty(part, off_by_one) as monitor:
        count, monitor.schedule = monitor.add, SampleSchedules()

        def add(iteration: Iteration, lens: np.ndarray, stats: StepStats, pairs: Pairs | None = None) -> None:
            nonlocal seen
            count(iteration, lens, stats, pairs)
            seen += 1
            if found["alarm"] is None and (drifts := monitor.alarm.check()):
                found.update(alarm=seen, drift=str(drifts[0]))

        monitor.add = add  # type: ignore[method-assign]
        part.run()
    return found


def simulations(lens: Mapping[str, Lens], quick: bool, iterations: int) -> Iterator[Callable[[], dict[str, Any]]]:
    """Functions that compute the rows. `iterations` is the length of the runs without a fault."""
    runs, start_runs, iterations = (2, 1, 500) if quick else (100, 24, iterations)
    for fault, most in MOST.items():
        texts, usual = (lens[fault], lens[NONE]) if fault in lens else (hard_text(), None)
        for cost in COSTS:
            for batch in (1, 4, 16, 64) if cost is COSTS[0] else (1, 4):
                yield partial(fault_row, fault, texts, usual, batch, runs, 200 if quick else most, cost)
    for share in (None, SOME_NEAR_TIES):
        for batch in (1, 16, 64):
            yield partial(quiet_row, lens[NONE], share, batch, iterations)
    for forced in (False, True):
        for cost in COSTS:
            yield partial(start_row, forced, start_runs, cost, quick)


def fault_row(fault: str, texts: Lens, usual: Lens | None, batch: int, runs: int, most: int, cost: Cost) -> dict[str, Any]:
    """Detection of a fault. `usual` is the record without the fault, or None if `texts` has both."""
    accepted = np.concatenate(texts)[:, :2] > 0
    eager = accepted[:, 1] if usual is None else np.concatenate(usual)[:, 0] > 0
    rates = [float(eager.mean()), float(accepted[:, 0].mean())]
    return detection(replayed(texts), batch, runs, most, cost) | {"fault": fault, "rates": rates}


def quiet_row(texts: Lens, share: float | None, batch: int, iterations: int) -> dict[str, Any]:
    """A long run without a fault, on recorded texts or with a share of near-ties."""
    source = replayed(texts) if share is None else near_ties(share, forced=False)
    name = f"{SPOILT:.0%} of the windows spoilt" if share is None else f"near-ties in {share:.0%}"
    return false_alarms(source, batch, iterations, COSTS[0]) | {"fault": name}


def start_row(forced: bool, runs: int, cost: Cost, quick: bool) -> dict[str, Any]:
    """The cost of samples after the start of a server."""
    requests = REQUESTS[:1] if quick else REQUESTS
    return start_cost(forced, runs, cost, NEAR_TIES, requests) | {"fault": "forced" if forced else "real"}


def summary(result: Result) -> str:
    """Detection by fault and requests, false alarms, the cost of a start, and the live run."""
    kinds = {kind: [row for row in result["rows"] if row["kind"] == kind] for kind in ("simulation", "false alarms", "start", "live")}
    head = ["fault", "requests", "a sample of the draft", "iterations until the alarm (median)", "90 %", "most", "missed", "runs"]
    found = [
        [row["fault"] + _rates(row), row["requests"], _replays(row["draft"])]
        + [f"{row[name]:.0f}" for name in ("median", "p90", "slowest")]
        + [row["missed"], row["runs"]]
        for row in kinds["simulation"]
    ]
    false = [
        [f"{row['fault']}, {row['requests']}", f"{row['iterations']:,}", row["alarms"], *_shares(row)] for row in kinds["false alarms"]
    ]
    start = [[row["fault"], _replays(row["draft"]), _replays(row["verify"]), *_start(row), row["alarms"]] for row in kinds["start"]]
    early = [f"{name} {count:,} iterations" for count in EARLY for name in ("usual replays in the first", "most in the first")]
    parts = [
        table(head, found),
        table(["no fault; near-ties, requests", "iterations", "alarms", "sampled", "time that samples add"], false),
        table(["acceptance", "a sample of the draft", "verification", *early, "alarms"], start),
    ]
    for row in kinds["live"]:
        parts.append(f"Live, batch size {row['requests']}: alarm after {row['alarm']} iterations; {row.get('drift', 'none')}.")
    return "\n\n".join(part for part in parts if part)


render = with_provenance(summary)


def _rates(row: Mapping[str, Any]) -> str:
    return f" ({' to '.join(f'{rate:.2f}' for rate in row['rates'])})"


def _shares(row: Mapping[str, Any]) -> list[str]:
    return [percent(row["sampled"] / row["iterations"], 2), percent(row["time_share"], 2)]


def _replays(cost: float) -> str:
    return f"{cost:g} replays"


def _start(row: Mapping[str, Any]) -> list[str]:
    """The mean over all near-tie shares and batch sizes, and mean and 90th percentile at the most expensive ones, by iterations."""
    figures = [row[str(count)] for count in EARLY]
    return [text for one in figures for text in (f"{one['usual']:.1f}", f"{one['mean']:.1f} (90 %: {one['p90']:.1f})")]


def plot(result: Result, file: Any) -> None:
    """Iterations until the alarm by requests, one line per fault."""
    rows = [row for row in result["rows"] if row["kind"] == "simulation" and row["draft"] == COSTS[0].draft]
    groups = {str(r["requests"]): {o["fault"]: o["median"] for o in rows if o["requests"] == r["requests"]} for r in rows}
    picture.draw(
        result, file, "The drift alarm: SmolLM2-135M", [plots.bars(groups, "Until the alarm, by requests", "iterations", kind="requests")]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Record, simulate, run with the fault, and print."""
    parser = arguments(__doc__)
    parser.add_argument("--iterations", type=positive, default=10_000_000, help="of each run without a fault")
    args = parser.parse_args(argv)
    prompts, new_tokens = (2, 4) if args.quick else (24, 64)
    record = Record(NAME, KEYS, args.out, args.quick)
    run = session(prompts, new_tokens)
    faults: dict[str, Fault | None] = {NONE: None, OFF_BY_ONE: off_by_one, NOISE: noise()}
    lens = {name: record_pairs(run, fault) for name, fault in faults.items()}
    for requests, longest in LIVE.items():
        record.add(live(run, requests, new_tokens if args.quick else longest))
    run.worker.close()
    rows = list(simulations(lens, args.quick, args.iterations))
    if args.quick:  # starting a process of a pool, which imports torch, takes longer than these rows
        for row in rows:
            record.add(row())
    else:
        with ProcessPoolExecutor(None, get_context("spawn")) as pool:
            for job in [pool.submit(row) for row in rows]:
                record.add(job.result())
    record.show(render, plot)


if __name__ == "__main__":
    main()
