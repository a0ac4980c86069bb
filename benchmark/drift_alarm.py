"""How early the drift alarm reports graphs that lose acceptance, and how rarely it is wrong.

The embedded model drafts every window twice on a CPU, through recorded passes and eagerly, once without a fault and once with each:
the next drafts start from the slot after the last accepted one, or draft-extend reads features with noise, so that acceptance falls by
about five points. Which drafts of both were accepted is recorded request by request. The simulation runs B requests at a time; each
repeats a recorded one. In all of it harmless differences of rounding spoil a share of the windows of either side. The live rows are the
embedded model itself with the first fault and as many concurrent requests as they say. Times are those of the 8B shape on an H200, where
an eager iteration of one request takes as long as five replays; a second pass of the draft alone is assumed to take 15 % of a replay.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from benchmark import picture, plots
from benchmark.markdown import Result, percent, provenance, table
from benchmark.record import Record
from benchmark.sweep import arguments
from runtime.batch import NO_SAMPLE, EagerSample, RowInit, StepStats
from runtime.check_acceptance import EMBEDDED_PROMPTS, Options, Session, read_prompts, tokenised
from runtime.config.flag_parser import parse
from runtime.entrypoints.prepare import prepare
from runtime.layers.forward_batch import ForwardBatch
from runtime.model_executor.acceptance_monitor import AcceptanceMonitor
from runtime.model_executor.drift_alarm import DriftAlarm, Pairs
from runtime.model_executor.eager_drafts import Compared
from runtime.model_executor.iteration import Iteration
from runtime.model_executor.parity import eagerly
from runtime.model_executor.sample_schedule import Samples
from runtime.text.tokenizer import Tokenizer

NAME = "drift_alarm"
KEYS = ("kind", "fault", "requests")
OFF_BY_ONE, NOISE = "slots off by one", "5 points"
MOST = {OFF_BY_ONE: 2_000, NOISE: 20_000}
"""Faults, and the longest simulation of each."""
LIVE = {1: 256, 16: 48}
"""Tokens of each answer of the live runs, by requests."""
STEPS = 3
EAGER_SECONDS = 0.028
"""Time of an eager iteration of the 8B shape on an H200: as long as launching its kernels takes, at any batch size."""
DRAFT_SHARE = 0.15
"""Share by which an iteration is longer after which the draft runs again: its passes take a tenth, their launches and copies the rest."""
SPOILT = 0.01
"""Share of windows of either side that a harmless difference spoils. Bit for bit equal passes have none."""
NOISE_SCALE = 0.02
"""Standard deviation of the noise in features, in standard deviations of these: acceptance of the embedded model falls by five points."""
WINDOW_SECONDS = 4.0
"""Eager samples must not make any stretch of this length much longer."""

SHORT, SHORT_RUNS = 250, 12
"""Iterations of a short run from the start, and how many such runs are averaged."""
Lens = list[np.ndarray]
"""Of each request int64 [n, 3]: accepted drafts of its windows, through graphs and eagerly, and whether the first of both are unlike."""
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
    ids = tokenised(Tokenizer.load(config.model.tokenizer_path), read_prompts(Options(EMBEDDED_PROMPTS, prompts, new_tokens)))
    worker = build_worker(config, model_config, make_drafter, BuildOptions("eager", [1, 2, 4, 8, 16]))
    return Session(worker, config, model_config, ids, new_tokens)


class EveryIteration:
    """A schedule of samples that drafts every window twice."""

    def next(self, alarm: DriftAlarm, possible: bool = True) -> EagerSample:
        """As `Samples.next`."""
        return EagerSample(taken=possible)

    def observe(self, seconds: float, sample: EagerSample) -> None:
        """As `Samples.observe`; times change nothing."""


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
    """Within, replays of draft-extend have a fault, and the monitor samples although the session checks graphs itself."""
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


def record_pairs(run: Session, fault: Fault | None) -> Lens:
    """Accepted drafts of each request over time, of one run of all prompts."""
    texts, rows = list[list[tuple[int, ...]]](), dict[int, list[tuple[int, ...]]]()
    drafter, drafts, waiting = run.worker.parts.drafter, run.worker.eager_drafts, deque[list[list[tuple[int, ...]]]]()
    admitted, compared = drafter.admit, drafts.compare

    def admit(new_rows: Sequence[RowInit]) -> None:
        admitted(new_rows)
        for init in new_rows:
            rows[init.row] = list[tuple[int, ...]]()
            texts.append(rows[init.row])

    def compare(iteration: Iteration, committed: torch.Tensor) -> Compared | None:
        found = compared(iteration, committed)
        if found is not None:
            waiting.append([rows[row] for row in iteration.host_rows[found.rows].tolist()])
        return found

    with faulty(run, fault) as monitor:
        count, monitor.schedule = monitor.add, EveryIteration()  # type: ignore[assignment]

        def add(iteration: Iteration, lens: np.ndarray, stats: StepStats, pairs: Pairs | None = None) -> None:
            if pairs is not None:
                for text, *pair in zip(waiting.popleft(), pairs.graph.tolist(), pairs.eager.tolist(), pairs.unlike.tolist(), strict=True):
                    text.append(tuple(pair))
            count(iteration, lens, stats, pairs)

        monitor.add, drafter.admit, drafts.compare = add, admit, compare  # type: ignore[method-assign]
        run.run()
        drafter.admit, drafts.compare = admitted, compared  # type: ignore[method-assign]
    return [np.array(text) for text in texts if text]


def live(run: Session, requests: int, new_tokens: int) -> dict[str, Any]:
    """Run some prompts again with the wrong slot in replays of draft-extend; iterations until the alarm."""
    found: dict[str, Any] = {"kind": "live", "fault": OFF_BY_ONE, "requests": requests, "alarm": None}
    seen, part = 0, replace(run, prompts=run.prompts[:requests], max_new_tokens=new_tokens)
    with faulty(part, off_by_one) as monitor:
        count, monitor.schedule = monitor.add, Samples()

        def add(iteration: Iteration, lens: np.ndarray, stats: StepStats, pairs: Pairs | None = None) -> None:
            nonlocal seen
            count(iteration, lens, stats, pairs)
            seen += 1
            if found["alarm"] is None and (drifts := monitor.alarm.check()):
                found.update(alarm=seen, drift=str(drifts[0]))

        monitor.add = add  # type: ignore[method-assign]
        part.run()
    return found


def replay_seconds(batch: int) -> float:
    """Time of the same iteration through graphs."""
    return 0.0054 + 6e-5 * batch


def extra_seconds(batch: int, sample: EagerSample) -> float:
    """By how much a sample makes an iteration longer."""
    replay = replay_seconds(batch)
    return 0.0 if not sample.taken else (EAGER_SECONDS if sample.verify else 0.0) + DRAFT_SHARE * replay


class Simulation:
    """Iterations of `batch` requests, each of which repeats a request of the record from its begin to its end.

    Attributes:
        batch: its requests.
        sampled: number of samples.
        extra: by iteration, the seconds by which it took longer.
    """

    def __init__(self, record: Lens, batch: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._record, self._lens = np.concatenate(record), np.array([len(text) for text in record])
        self._starts = self._lens.cumsum() - self._lens
        self._texts = self._rng.integers(0, len(record), batch)
        self._at = self._rng.integers(0, self._lens[self._texts])  # each begins anywhere in its text
        self.alarm, self.schedule, self.sampled = DriftAlarm(STEPS), Samples(), 0
        self.extra = array("d")
        self.batch = batch

    def run(self, iterations: int) -> int | None:
        """The iterations until the alarm, or None."""
        replay, since = replay_seconds(self.batch), 0
        self.schedule.observe(replay, NO_SAMPLE)  # all others take as long
        for i in range(1, iterations + 1):
            self.alarm.count_iteration()
            sample, since = self.schedule.next(self.alarm), since + 1
            self.extra.append(extra_seconds(self.batch, sample))
            if sample.taken:
                self.schedule.observe(replay + self.extra[-1], sample)
                graph, eager, unlike = self._next(since).T
                self.alarm.add(Pairs(graph, eager, unlike > 0, STEPS, sample.verify))
                self.sampled, since = self.sampled + 1, 0
                if self.alarm.check():
                    return i
        return None

    def _next(self, iterations: int) -> np.ndarray:
        """The windows after so many more iterations, int64 [batch, 3]."""
        self._at += iterations
        while (over := self._at >= self._lens[self._texts]).any():
            self._at[over] -= self._lens[self._texts[over]]
            self._texts[over] = self._rng.integers(0, len(self._lens), over.sum())
        found = self._record[self._starts[self._texts] + self._at]
        side, at = self._rng.random((self.batch, 2)) < SPOILT, self._rng.integers(0, STEPS, (self.batch, 2))
        found[:, :2] = np.where(side, np.minimum(found[:, :2], at), found[:, :2])
        found[:, 2] |= (side & (at == 0)).any(axis=1)
        return found


def detection(record: Lens, usual: Lens, fault: str, batch: int, runs: int, most: int) -> dict[str, Any]:
    """Iterations until the alarm over several runs; None counts as `most`. `usual`: the record without a fault."""
    found = [Simulation(record, batch, seed).run(most) for seed in range(runs)]
    times = np.array([most if one is None else one for one in found])
    rates = [float(np.mean(np.concatenate(texts)[:, 0] > 0)) for texts in (usual, record)]
    return {
        "kind": "simulation", "fault": fault, "requests": batch, "runs": runs, "most": most, "missed": found.count(None),
        "median": float(np.median(times)), "p90": float(np.quantile(times, 0.9)), "slowest": int(times.max()), "rates": rates,
    }  # fmt: skip


def false_alarms(record: Lens, batch: int, iterations: int) -> dict[str, Any]:
    """Alarms over a long run without a fault; the test starts anew after each."""
    alarms, left, sampled, seed = 0, iterations, 0, 0
    extra = array("d")
    while left > 0:
        simulation = Simulation(record, batch, seed)
        at = simulation.run(left)
        extra += simulation.extra
        alarms, left, sampled, seed = alarms + (at is not None), left - (at or left), sampled + simulation.sampled, seed + 1
    window = round(WINDOW_SECONDS / replay_seconds(batch))
    total = np.concatenate([[0.0], np.frombuffer(extra).cumsum()]) / replay_seconds(batch)
    return {"kind": "false alarms", "fault": "none", "requests": batch, "iterations": iterations, "alarms": alarms, "sampled": sampled,
            "time_share": float(total[-1]) / iterations,
            "time_share_at_first": float(np.mean([time_share(Simulation(record, batch, seed)) for seed in range(SHORT_RUNS)])),
            "most_in_window": float((total[window:] - total[:-window]).max(initial=0.0)) / window}  # fmt: skip


def time_share(simulation: Simulation) -> float:
    """The share of time that samples add to a short run."""
    simulation.run(SHORT)
    return sum(simulation.extra) / replay_seconds(simulation.batch) / SHORT


def render(result: Result) -> str:
    """The table and where it comes from."""
    return "\n".join([summary(result), "", provenance(result)])


def summary(result: Result) -> str:
    """Detection by fault and requests, false alarms, and the live run."""
    rows = result["rows"]
    simulated = [row for row in rows if row["kind"] == "simulation"]
    quiet = [row for row in rows if row["kind"] == "false alarms"]
    head = ["fault", "requests", "first drafts accepted", "iterations until the alarm (median)", "90 %", "most", "missed", "runs"]
    found = [
        [row["fault"], row["requests"], " to ".join(f"{rate:.2f}" for rate in row["rates"])]
        + [f"{row[name]:.0f}" for name in ("median", "p90", "slowest")]
        + [row["missed"], row["runs"]]
        for row in simulated
    ]
    false = [
        [row["requests"], f"{row['iterations']:,}", row["alarms"], f"{row['sampled'] / row['iterations']:.2%}"]
        + [percent(row.get(name), 1) for name in ("time_share", "time_share_at_first", "most_in_window")]
        for row in quiet
    ]
    times = ["time that they add", f"in the first {SHORT} iterations", f"at most, in {WINDOW_SECONDS:.0f} s"]
    parts = [table(head, found), table(["requests, no fault", "iterations", "alarms", "sampled", *times], false)]
    for row in rows:
        if row["kind"] == "live":
            parts.append(f"Live: alarm after {row['alarm']} iterations of {row['requests']} requests; {row.get('drift', 'none')}.")
    return "\n\n".join(part for part in parts if part)


def plot(result: Result, file: Any) -> None:
    """Iterations until the alarm by requests, one line per fault."""
    rows = [row for row in result["rows"] if row["kind"] == "simulation"]
    groups = {str(r["requests"]): {o["fault"]: o["median"] for o in rows if o["requests"] == r["requests"]} for r in rows}
    picture.draw(
        result, file, "The drift alarm: SmolLM2-135M", [plots.bars(groups, "Until the alarm, by requests", "iterations", kind="requests")]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Record, simulate, sabotage, print."""
    parser = arguments(__doc__)
    parser.add_argument("--iterations", type=int, default=10_000_000, help="of the run without a fault, for each batch size")
    args = parser.parse_args(argv)
    prompts, new_tokens = (2, 16) if args.quick else (24, 64)
    record = Record(NAME, KEYS, args.out, args.quick)
    run = session(prompts, new_tokens)
    faults: dict[str, Fault | None] = {"none": None, OFF_BY_ONE: off_by_one, NOISE: noise()}
    lens = {name: record_pairs(run, fault) for name, fault in faults.items()}
    for requests, longest in LIVE.items():
        record.add(live(run, requests, new_tokens if args.quick else longest))
    run.worker.close()
    with ProcessPoolExecutor(1 if args.quick else None, get_context("spawn")) as pool:  # each process imports torch
        quiet = [pool.submit(false_alarms, lens["none"], batch, 500 if args.quick else args.iterations) for batch in (1, 16, 64)]
        simulate_faults(record, lens, args.quick)
        for one in as_completed(quiet):
            record.add(one.result())
    plot(record.data, record.file.with_suffix(".png"))
    print(render(record.data))


def simulate_faults(record: Record, lens: Mapping[str, Lens], quick: bool) -> None:
    """Detection of each fault by requests."""
    for batch in (1, 2, 4, 8, 16, 32, 64):
        for fault, most in MOST.items():
            runs, longest = (2, 200) if quick else (40, most)
            record.add(detection(lens[fault], lens["none"], fault, batch, runs, longest))


if __name__ == "__main__":
    main()
