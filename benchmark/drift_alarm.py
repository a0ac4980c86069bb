"""How early the drift alarm reports graphs that lose acceptance, and how rarely it is wrong.

Acceptance of the embedded model is recorded once, request by request. The simulation runs B requests at a time; each
repeats a recorded one, and faulty graphs accept fewer first drafts. The live row is the embedded model itself with 16
concurrent requests and an error injected into the draft-extend graph runner: the next drafts start from the slot after the
last accepted one. Times are those of the 8B shape on an H200, where an eager iteration of one request takes as long as
five replays. An iteration with only the draft eager is assumed to be 5 % longer than a replay.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmark import picture, plots
from benchmark.markdown import Result, percent, provenance, table
from benchmark.record import Record
from benchmark.sweep import arguments
from runtime.batch import EagerSample, RowInit
from runtime.check_acceptance import EMBEDDED_PROMPTS, Options, Session, read_prompts, tokenised
from runtime.config.flag_parser import parse
from runtime.entrypoints.prepare import prepare
from runtime.model_executor.drift_alarm import DriftAlarm
from runtime.model_executor.parity import eagerly
from runtime.model_executor.sample_schedule import Samples
from runtime.text.tokenizer import Tokenizer

NAME = "drift_alarm"
KEYS = ("kind", "fault", "requests")
FAULTS = {"slots off by one": 0.1, "5 points": None}
"""Share of accepted first drafts that a fault leaves; None: as many as lower acceptance by 0.05."""
STEPS = 3
EAGER_SECONDS = 0.028
"""Time of an eager iteration of the 8B shape on an H200: as long as launching its kernels takes, at any batch size."""
DRAFT_SHARE = 0.05
"""Share by which an iteration is longer whose draft alone runs eagerly. Its launches are hidden behind verification: without the graph
of draft-extend the GPU waits for at most 1.9 % of an iteration (docs/benchmarks/draft_extend_graph.md)."""
WINDOW_SECONDS = 4.0
"""Eager samples must not make any stretch of this length much longer."""

SHORT, SHORT_RUNS = 250, 12
"""Iterations of a short run from the start, and how many such runs are averaged."""
CHUNK = 1024
"""Iterations whose accept lengths are drawn together."""

Lens = list[np.ndarray]


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


def record_acceptance(run: Session) -> Lens:
    """Accept lengths of each request over time, of one run of all prompts."""
    texts, rows = list[list[int]](), dict[int, list[int]]()
    monitor, drafter = run.worker.parts.monitor, run.worker.parts.drafter
    count, admitted = monitor.add, drafter.admit

    def admit(new_rows: Sequence[RowInit]) -> None:
        admitted(new_rows)
        for init in new_rows:
            rows[init.row] = list[int]()
            texts.append(rows[init.row])

    def add(iteration: Any, lens: Any, stats: Any) -> None:
        for row, length in zip(iteration.host_rows.tolist(), lens.tolist(), strict=True):
            rows[row].append(length)
        count(iteration, lens, stats)

    monitor.add, drafter.admit = add, admit
    run.run()
    monitor.add, drafter.admit = count, admitted
    return [np.array(text) for text in texts if text]


def live(run: Session) -> dict[str, Any]:
    """Run the prompts again with the wrong slot in replays of draft-extend; iterations until the alarm."""
    worker = run.worker
    (extend,) = [runner for runner in worker.runners if runner.spec.name == "draft extend"]
    replay = extend.run

    def off_by_one(batch: Any, variant: str = "", eager: bool = False) -> Any:
        if not eager:
            lens = extend.inputs(batch.batch_size)["accept_lens"]
            lens.copy_(lens % (STEPS + 1) + 1)
        return replay(batch, variant, eager)

    extend.run = off_by_one
    worker.reset()
    monitor, seen = worker.parts.monitor, 0
    found: dict[str, Any] = {"alarm": None}
    count = monitor.add

    def add(iteration: Any, lens: Any, stats: Any) -> None:
        nonlocal seen
        count(iteration, lens, stats)
        seen += 1
        if found["alarm"] is None and (drifts := monitor.alarm.check()):
            found.update(alarm=seen, drift=str(drifts[0]), requests=iteration.live)

    monitor.add, monitor.without_sample = add, nullcontext  # the check itself takes no sample
    with eagerly(worker.iteration_runners):
        run.run()
    monitor.add, extend.run = count, replay
    return found


def replay_seconds(batch: int) -> float:
    """Time of the same iteration through graphs."""
    return 0.0054 + 6e-5 * batch


def extra_seconds(batch: int, sample: EagerSample) -> float:
    """By how much an iteration takes longer than through graphs."""
    replay = replay_seconds(batch)
    return 0.0 if not sample.eager else EAGER_SECONDS - replay if sample.verify else DRAFT_SHARE * replay


class Simulation:
    """Iterations of `batch` requests, each of which repeats a request of the record from its begin to its end.

    Attributes:
        batch: its requests.
        eager: number of eager iterations.
        extra: by iteration, the seconds by which it took longer.
    """

    def __init__(self, record: Lens, batch: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._record = record
        self._streams = [self._rest_of_a_text() for _ in range(batch)]
        self._chunk, self._at = np.empty((0, batch), dtype=np.int64), 0
        self.alarm, self.schedule, self.eager = DriftAlarm(STEPS), Samples(), 0
        self.extra = array("d")
        self.batch = batch

    def run(self, iterations: int, keep: float) -> int | None:
        """The iterations until the alarm, or None; graphs keep this share of the accepted first drafts."""
        for i in range(1, iterations + 1):
            sample = self.schedule.next(self.batch, self.alarm)
            self.eager += sample.taken
            self.extra.append(extra_seconds(self.batch, sample))
            self.schedule.observe(replay_seconds(self.batch) + self.extra[-1], sample)
            lens = self._next()
            if not sample.taken and keep < 1:
                lens = np.where(self._rng.random(self.batch) < keep, lens, 1)
            if sample.taken or not (sample.precedes and sample.verify):
                self.alarm.add(lens, sample.taken, verify=sample.verify)
            if sample.taken and self.alarm.check():
                return i
        return None

    def _next(self) -> np.ndarray:
        """Accept lengths of an iteration."""
        if self._at == len(self._chunk):
            self._chunk, self._at = np.stack([self._drawn(row) for row in range(self.batch)], axis=1), 0
        self._at += 1
        return self._chunk[self._at - 1]

    def _drawn(self, row: int) -> np.ndarray:
        """The next `CHUNK` accept lengths of a request and those that follow it."""
        parts, left = [self._streams[row]], CHUNK - len(self._streams[row])
        while left > 0:
            parts.append(self._record[self._rng.integers(0, len(self._record))])
            left -= len(parts[-1])
        drawn = np.concatenate(parts)
        self._streams[row] = drawn[CHUNK:]
        return drawn[:CHUNK]

    def _rest_of_a_text(self) -> np.ndarray:
        """A text from anywhere on."""
        text = self._record[self._rng.integers(0, len(self._record))]
        return text[self._rng.integers(0, len(text)) :]


def detection(record: Lens, fault: str, batch: int, runs: int, most: int) -> dict[str, Any]:
    """Iterations until the alarm over several runs; None counts as `most`."""
    rate = float(np.mean(np.concatenate(record) > 1))
    keep = FAULTS[fault] or (rate - 0.05) / rate
    found = [Simulation(record, batch, seed).run(most, keep) for seed in range(runs)]
    times = np.array([most if one is None else one for one in found])
    return {
        "kind": "simulation", "fault": fault, "requests": batch, "runs": runs, "most": most, "missed": found.count(None),
        "median": float(np.median(times)), "p90": float(np.quantile(times, 0.9)), "rates": [rate, rate * keep],
    }  # fmt: skip


def false_alarms(record: Lens, batch: int, iterations: int) -> dict[str, Any]:
    """Alarms over a long run without a fault; the test starts anew after each."""
    alarms, left, eager, seed = 0, iterations, 0, 0
    extra = array("d")
    while left > 0:
        simulation = Simulation(record, batch, seed)
        at = simulation.run(left, 1.0)
        extra += simulation.extra
        alarms, left, eager, seed = alarms + (at is not None), left - (at or left), eager + simulation.eager, seed + 1
    window, total = (
        round(WINDOW_SECONDS / replay_seconds(batch)),
        np.concatenate([[0.0], np.frombuffer(extra).cumsum()]) / replay_seconds(batch),
    )
    return {"kind": "false alarms", "fault": "none", "requests": batch, "iterations": iterations, "alarms": alarms, "eager": eager,
            "time_share": float(total[-1]) / iterations,
            "time_share_at_first": float(np.mean([time_share(Simulation(record, batch, seed)) for seed in range(SHORT_RUNS)])),
            "most_in_window": float((total[window:] - total[:-window]).max(initial=0.0)) / window}  # fmt: skip


def time_share(simulation: Simulation) -> float:
    """The share of time that samples add to a short run."""
    simulation.run(SHORT, 1.0)
    return sum(simulation.extra) / replay_seconds(simulation.batch) / SHORT


def render(result: Result) -> str:
    """The table and where it comes from."""
    return "\n".join([summary(result), "", provenance(result)])


def summary(result: Result) -> str:
    """Detection by fault and requests, false alarms, and the live run."""
    rows = result["rows"]
    simulated = [row for row in rows if row["kind"] == "simulation"]
    quiet = [row for row in rows if row["kind"] == "false alarms"]
    head = ["fault", "requests", "first drafts accepted", "iterations until the alarm (median)", "90 %", "missed", "runs"]
    found = [
        [
            row["fault"],
            row["requests"],
            " to ".join(f"{rate:.2f}" for rate in row["rates"]),
            f"{row['median']:.0f}",
            f"{row['p90']:.0f}",
            row["missed"],
            row["runs"],
        ]
        for row in simulated
    ]
    false = [
        [row["requests"], f"{row['iterations']:,}", row["alarms"], f"{row['eager'] / row['iterations']:.2%}"]
        + [percent(row.get(name), 1) for name in ("time_share", "time_share_at_first", "most_in_window")]
        for row in quiet
    ]
    times = ["time that they add", f"in the first {SHORT} iterations", f"at most, in {WINDOW_SECONDS:.0f} s"]
    parts = [table(head, found), table(["requests, no fault", "iterations", "alarms", "eager share", *times], false)]
    for row in rows:
        if row["kind"] == "live":
            parts.append(f"Live: alarm after {row['alarm']} iterations of {row['live_requests']} requests; {row.get('drift', 'none')}.")
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
    prompts, new_tokens, runs = (2, 16, 2) if args.quick else (64, 96, 40)
    iterations = 500 if args.quick else args.iterations
    record = Record(NAME, KEYS, args.out, args.quick)
    run = session(prompts, new_tokens)
    lens = record_acceptance(run)
    found = live(run)
    run.worker.close()
    record.add({"kind": "live", "fault": "slots off by one", "live_requests": found.pop("requests", 0), "requests": 0, **found})
    with ProcessPoolExecutor(1 if args.quick else None, get_context("spawn")) as pool:  # each process imports torch
        quiet = [pool.submit(false_alarms, lens, batch, iterations) for batch in (1, 16, 64)]
        simulate_faults(record, lens, runs, args.quick)
        for one in as_completed(quiet):
            record.add(one.result())
    plot(record.data, record.file.with_suffix(".png"))
    print(render(record.data))


def simulate_faults(record: Record, lens: Lens, runs: int, quick: bool) -> None:
    """Detection of each fault by requests."""
    for batch in (1, 2, 4, 8, 16, 32, 64):
        for fault, most in (("slots off by one", 2_000), ("5 points", 20_000)):
            many = runs if quick or FAULTS[fault] else runs // 4
            record.add(detection(lens, fault, batch, many, most if not quick else 200))


if __name__ == "__main__":
    main()
