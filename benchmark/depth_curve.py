"""Throughput by concurrency without drafts, at fixed depths, and at the depth that the controller chooses.

One server drafts, another does not. Acceptance is synthetic and set while the server runs; K is the fixed depth or auto. In rows with an
arrow, acceptance changes after each third of a burst's tokens, and fixed depths are not measured. Fixed depths are measured at one
acceptance; for others, an `estimate` assumes the same time for prompts and for each iteration.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmark import picture, plots
from benchmark.markdown import Result, models, table, with_provenance
from benchmark.record import Record, Row
from benchmark.server import Server, bench
from benchmark.shapes import Model
from benchmark.sweep import KEPT, Burst, add_model, arguments, names, numbers, positive, random_ids, served_model
from runtime.config.speculative import DEFAULT_STEPS
from runtime.config.synthetic_acceptance import synthetic_acceptance

NAME = "depth_curve"
KEYS = ("model", "speculation", "acceptance", "concurrency", "input_len", "output_len")
OFF, AUTO, ARROW = "off", "auto", " → "
CHANGING = ARROW.join(("3.5", "1.2", "3.5"))
MIN_PROMPTS = 16
"""Prompts of the smallest bursts. With fewer, random acceptance would change throughput by several per cent."""
POLL = 0.05
"""Seconds between two polls of the number of generated tokens."""


def drafting(served: Model) -> tuple[str, ...]:
    """Flags of the server that drafts, at any depth."""
    flags = served.eagle_flags("2.5")
    shape = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
    return tuple(flag for before, flag in zip(("", *flags), flags, strict=False) if not {before, flag} & set(shape))


def set_state(server: Server, **state: Any) -> None:
    """Set acceptance or depth of a running server."""
    server.post("/set_internal_state", {"server_args": {f"speculative_{name}": value for name, value in state.items()}})


def measure(server: Server, record: Record, labels: Row, burst: Burst) -> None:
    """Measure one burst; the row also has the controller's estimates."""
    before = counters(server)
    acceptance = labels["acceptance"] or ""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(bench, server, burst.flags)
        if ARROW in acceptance:
            total = burst.labels["num_prompts"] * burst.labels["output_len"]
            for part, length in enumerate(acceptance.split(ARROW)):
                while (
                    not running.done()
                    and counters(server)["generation_tokens_total"] - before["generation_tokens_total"] < part * total / 3
                ):
                    time.sleep(POLL)
                set_state(server, synthetic_accept_length=length)
        figures = running.result()
    record.add(
        {**labels, **burst.labels, **{name: figures[name] for name in KEPT}, "controller": belief(server, burst.labels["concurrency"])}
    )
    print(f"  {figures['output_throughput']:.1f} tok/s, steps by depth {figures['steps_by_depth']}", flush=True)


def counters(server: Server) -> dict[str, Any]:
    """The scheduler's counters."""
    return server.get("/get_server_info")["internal_states"][0]


def belief(server: Server, concurrency: int) -> dict[str, Any] | None:
    """The controller's estimates: milliseconds of an iteration of about `concurrency` requests by depth, and acceptance."""
    depth = counters(server)["worker"]["depth"]
    if depth is None:
        return None
    size = min(map(int, depth["milliseconds"]), key=lambda n: abs(n - concurrency))
    return {"requests": size, "milliseconds": depth["milliseconds"][str(size)], "greedy": depth["greedy"], "sampled": depth["sampled"]}


def run(record: Record, served: Model, args: argparse.Namespace) -> None:
    """Measure all points, without drafts first."""
    common = (*served.target_flags, "--disable-radix-cache")
    # The largest concurrency first: after a change of acceptance the controller adapts within its first iterations.
    loads = sorted(args.concurrency, reverse=True)
    least = 4 if args.quick else MIN_PROMPTS
    bursts = [random_ids(c, args.input_len, args.output_len, max(2 * c, least)) for c in loads]
    changing = [random_ids(c, args.input_len, 4 * args.output_len) for c in args.changing]
    with Server([*common, *(() if args.quick else ("--attention-backend", "fa3"))]) as server:
        for burst in [*bursts, *changing]:
            measure(server, record, {"model": served.name, "speculation": OFF, "acceptance": None}, burst)
    with Server([*common, *drafting(served), *(() if args.quick else ("--attention-backend", "fa3"))]) as server:
        for label, state, length, loads in points(args, bursts, changing):
            set_state(server, num_steps=state)
            if ARROW not in length:
                set_state(server, synthetic_accept_length=length)
            for burst in loads:
                measure(server, record, {"model": served.name, "speculation": label, "acceptance": length}, burst)


def points(args: argparse.Namespace, bursts: Sequence[Burst], changing: Sequence[Burst]) -> Iterator[tuple[str, Any, str, Sequence[Burst]]]:
    """Name, depth, acceptance and loads of each series with drafts."""
    for length in args.accept_lengths:
        yield AUTO, AUTO, length, bursts
    for depth in args.fixed:
        yield f"K={depth}", depth, args.fixed_at, bursts
    yield AUTO, AUTO, CHANGING, changing


# ---- what is shown


def expected(depth: int, length: str) -> float:
    """Tokens that a window of `depth` drafts commits if the mean accept length at the usual depth is `length`."""
    (rate,) = synthetic_acceptance(length, 1, DEFAULT_STEPS)
    return sum(rate**i for i in range(depth + 1))


def estimate(row: Row, length: str) -> float:
    """Output tokens per second of a fixed depth at another acceptance. Iterations take the same time and commit more or fewer tokens.

    A depth that has graphs for few sizes only runs at a lower depth if more requests decode together, so steps count at their actual depth.
    Prompts take the same time at any acceptance: the time until the last request of the first batch has its first token.
    """
    steps = {int(depth): count for depth, count in row["steps_by_depth"].items() if count}
    before, after = (sum(count * expected(depth, at) for depth, count in steps.items()) for at in (row["acceptance"], length))
    prompts = min(1e-3 * row["p99_ttft_ms"] * row["num_prompts"] / row["concurrency"], row["duration"])
    return row["output_throughput"] * row["duration"] / (prompts + (row["duration"] - prompts) * before / after)


def comparable(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """For each acceptance at which the controller ran: a title, the acceptance, and the rows of the same model and lengths."""

    def load(row: Row) -> tuple[str, int, int]:
        return row["model"], row["input_len"], row["output_len"]

    found = list(dict.fromkeys((row["acceptance"], load(row)) for row in rows if row["speculation"] == AUTO))
    for length, same in found:
        several = sum(length == other for other, _ in found) > 1
        yield length + (", {}, {} → {}".format(*same) if several else ""), length, [row for row in rows if load(row) == same]


def curves(rows: Sequence[Row], length: str) -> dict[str, list[tuple[int, float]]]:
    """Output tokens per second by concurrency for each series, at one acceptance, of rows of the same model and lengths."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        name, known = row["speculation"], row["acceptance"]
        fixed = name.startswith("K=") and ARROW not in length
        if name == OFF or fixed or known == length:
            points = found.setdefault(name, {})
            if fixed and known != length:
                points.setdefault(row["concurrency"], estimate(row, length))
            else:
                points[row["concurrency"]] = row["output_throughput"]
    return {name: sorted(points.items()) for name, points in found.items()}


def summary(result: Result) -> str:
    """Throughput with the controller's choice, relative to no drafts and to the best fixed depth."""
    rows = result["rows"]
    columns = sorted({row["concurrency"] for row in rows})
    lines: list[list[Any]] = []
    for title, length, same in comparable(rows):
        by = {name: dict(points) for name, points in curves(same, length).items()}
        auto, plain = by[AUTO], by.get(OFF, {})
        best = {c: max(found) for c in auto if (found := [points[c] for name, points in by.items() if name != AUTO and c in points])}
        lines.append([f"{title}: auto, tok/s", *map(auto.get, columns)])
        lines.append([f"{title}: auto / no drafts", *(auto[c] / plain[c] if c in auto and c in plain else None for c in columns)])
        if any(name.startswith("K=") for name in by):
            lines.append([f"{title}: auto / best fixed depth", *(auto[c] / best[c] if c in best else None for c in columns)])
    return table(["accept length", *(f"c={c}" for c in columns)], lines)


render = with_provenance(summary)


def plot(result: Result, file: Any) -> None:
    """A panel per accept length."""
    rows = result["rows"]
    panels = [
        plots.lines(curves(same, length), f"accept length {title}", "concurrency", "output tokens/s", log=True)
        for title, length, same in comparable(rows)
        if ARROW not in length
    ]
    picture.draw(result, file, f"No drafts, fixed depths and the controller's choice: {models(result)}", panels, columns=2)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--concurrency", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--accept-lengths", type=names, default=["1.2", "1.6", "2.5", "3.5"])
    parser.add_argument("--fixed", type=numbers, default=[1, 2, 3, 5, 7], help="fixed depths (default %(default)s)")
    parser.add_argument("--fixed-at", default="2.5", help="accept length at which fixed depths run (default %(default)s)")
    parser.add_argument("--changing", type=numbers, default=[16, 64], help="concurrencies at which acceptance changes during the burst")
    parser.add_argument("--input-len", type=positive, default=128)
    parser.add_argument("--output-len", type=positive, default=128)
    add_model(parser)
    return parser.parse_args()


def main() -> None:
    """Measure, record and plot."""
    args = parse()
    record = Record(NAME, KEYS, args.out, args.quick)
    served = served_model(args)
    if args.quick:
        args.concurrency, args.accept_lengths, args.fixed, args.changing = [1, 2], ["1.2", "3.5"], [1, 3], [2]
        args.input_len, args.output_len = 16, 8
    run(record, served, args)
    record.show(render, plot)


if __name__ == "__main__":
    main()
