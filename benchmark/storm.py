"""A storm of good and hostile clients: lost requests, leaked pages, memory growth of every process, latency of the good clients.

Four phases: calm (good clients only), storm (half of the clients are hostile, on the same server with a tiny KV cache), kills with one
rank, and kills with two ranks. A killed server must exit with a failure in time, leave no process or file, and answer or end every request.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmark import picture, plots
from benchmark.markdown import Result, provenance, table
from benchmark.record import Record
from benchmark.server import Server
from benchmark.shapes import tiny_model
from benchmark.storm_clients import Clients, Served, Tally
from benchmark.sweep import arguments, positive

NAME = "storm"
KEYS = ("phase",)
SHARES = {"calm": 0.2, "storm": 0.6, "kills, one rank": 0.1, "kills, two ranks": 0.1}
"""The share of --minutes that each phase gets."""
EMBEDDED = ("--device", "cpu", "--max-total-tokens", "12288", "--random-seed", "1", "--queue-timeout", "300")
ALL_KILLS = 1.0
"""Minutes of the whole run from which every victim is killed at least once."""
SAMPLE_SECONDS, RECORD_SECONDS = 2.0, 60.0
SERIES_POINTS = 60
"""Most points of each process's memory size over time that a row has."""
RAMP = 0.05
"""The share of a phase during which its clients start one after the other."""
MIB = 1 << 20
LONG_MINUTES, MAX_SLOPE, MAX_RATIO = 30.0, 10.0, 3.0
"""For runs of at least this many minutes: bounds of a process's growth in MiB per hour, and of good clients' 99th percentile relative to
that in the calm phase."""


@dataclass
class Memory:
    """Resident memory of a server's processes over time, in MiB by role."""

    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    async def watch(self, pid: int) -> None:
        """Sample until cancelled."""
        began = time.monotonic()
        while True:
            for process in (psutil.Process(pid), *psutil.Process(pid).children()):
                used = process.memory_info().rss / MIB
                self.samples.setdefault(_role(process), []).append((time.monotonic() - began, used))
            await asyncio.sleep(SAMPLE_SECONDS)

    def figures(self) -> dict[str, Any]:
        """By role: first and last size, slope of the second half in MiB per hour, sizes over time. Empty with fewer than four samples."""
        shown: dict[str, Any] = {}
        for role, samples in self.samples.items():
            if len(samples) >= 4:
                late = samples[len(samples) // 2 :]
                slope = statistics.linear_regression([at for at, _ in late], [used for _, used in late]).slope
                figures = {"first_mib": samples[0][1], "last_mib": samples[-1][1], "slope_mib_per_hour": slope * 3600}
                shown[role] = {name: round(value, 1) for name, value in figures.items()}
                some = samples[:: -(-len(samples) // SERIES_POINTS)]
                shown[role]["series"] = [[round((at - samples[0][0]) / 60, 1), round(used, 1)] for at, used in some]
        return shown


def _role(process: psutil.Process) -> str:
    name = (process.cmdline() or [""])[0]
    return name.removeprefix("talon::") if name.startswith("talon::") else "http"


def row(phase: str, tally: Tally, began: float) -> dict[str, Any]:
    """The values that all phases have."""
    cuts = statistics.quantiles(tally.seconds, n=100) if len(tally.seconds) > 1 else [0.0] * 99
    return {
        "phase": phase,
        "minutes": round((time.monotonic() - began) / 60, 2),
        "requests": tally.ends.total() + tally.done.total(),
        "good": dict(tally.ends),
        "hostile": dict(tally.done),
        "lost": len(tally.wrong),
        "wrong": tally.wrong[:20],
        "p50_s": round(cuts[49], 3),
        "p99_s": round(cuts[98], 3),
    }


async def leaks(server: Server) -> dict[str, int]:
    """Requests and pages that are still held when nothing runs and the prefix cache was flushed."""
    for _ in range(300):
        state = server.get("/get_server_info")["internal_states"][0]
        if not (state["num_running_reqs"] or state["num_queue_reqs"] or state["num_used_tokens"]):
            break
        await asyncio.sleep(0.1)
    held = state["num_running_reqs"] + state["num_queue_reqs"]
    if not held:
        server.post("/flush_cache")
        state = server.get("/get_server_info")["internal_states"][0]
    return {"leaked_requests": held, "leaked_pages": state["pages_total"] - state["pages_free"]}


def clients(server: Server, rng: random.Random) -> Clients:
    """Clients of a server, with the model's context length and vocabulary size."""
    info = server.get("/get_model_info")
    return Clients(Served(server.port, info["max_context_len"], info["vocab_size"]), random.Random(rng.random()))


async def run_phase(
    server: Server, record: Record, phase: str, count: int, hostile: int, until: float, rng: random.Random, think: float
) -> None:
    """Run one phase without kills; `hostile` of the `count` clients are hostile, the others good. The row is written every minute."""
    began, memory, crowd = time.monotonic(), Memory(), clients(server, rng)
    watch = asyncio.create_task(memory.watch(server.pid))
    crowd.start(count - hostile, hostile, RAMP * (until - began), think)

    async def figures() -> dict[str, Any]:
        state = (await asyncio.to_thread(server.get, "/get_server_info"))["internal_states"][0]
        known = {"clients": count, "retracted_so_far": state["num_retracted_requests_total"], "memory": memory.figures()}
        return row(phase, crowd.tally, began) | known

    while (left := until - time.monotonic()) > RECORD_SECONDS:
        await asyncio.sleep(RECORD_SECONDS)
        record.add(await figures() | {"leaked_requests": None, "leaked_pages": None})
    await asyncio.sleep(left)
    tally = await crowd.stop()
    watch.cancel()
    cut = tally.ends["cut"]
    tally.wrong += [f"{cut} streams were cut"] if cut else []
    record.add(await figures() | await leaks(server))


async def kills(
    phase: str, flags: Sequence[str], count: int, until: float, every: bool, rng: random.Random, think: float
) -> dict[str, Any]:
    """Start servers and kill a process of each, until the time is over. `every`: until every victim was killed, too."""
    began, total, killed = time.monotonic(), Tally(), Counter[str]()
    victims = [*(["worker-1"] if "--tp-size" in flags else []), "scheduler", "detokenizer", "http"]
    least = len(victims) if every else 1
    while time.monotonic() < until or len(killed) < least:
        victim = victims[killed.total() % len(victims)]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o700)
            with Server(flags, variables={"XDG_RUNTIME_DIR": folder}) as server:
                crowd = clients(server, rng)
                crowd.start(count - count // 2, count // 2, think=think)
                await asyncio.sleep(rng.uniform(0.5, 4.0))
                wrong = await asyncio.to_thread(kill, server, victim, Path(folder))
                tally = await crowd.stop()
        killed[victim] += 1
        total.seconds += tally.seconds
        total.ends += tally.ends
        total.done += tally.done
        total.wrong += [*tally.wrong, *wrong]
    return row(phase, total, began) | {"clients": count, "leaked_requests": 0, "leaked_pages": 0, "killed": dict(killed)}


def kill(server: Server, victim: str, folder: Path) -> list[str]:
    """Kill one process with SIGKILL, and return the faults: what was left behind."""
    parent = psutil.Process(server.pid)
    processes = [parent, *parent.children(recursive=True)]
    next(process for process in processes if _role(process) == victim).send_signal(signal.SIGKILL)
    status = server.wait()
    _, alive = psutil.wait_procs(processes[1:], timeout=10)
    left = [path.name for path in folder.iterdir()]
    expected = -signal.SIGKILL if victim == "http" else 1
    wrong = [f"kill of {victim}: the server ended with {status}"] if status != expected else []
    wrong += [f"kill of {victim}: {len(alive)} processes were left"] if alive else []
    return wrong + ([f"kill of {victim}: files were left: {left}"] if left else [])


async def storm(record: Record, flags: Sequence[str], minutes: float, count: int, seed: int, think: float) -> None:
    """Run the four phases and record a row for each. A phase ends at its share of the total time, even if the previous one took longer."""
    rng, tiny = random.Random(seed), tiny_model().target_flags
    with Server(flags) as server:
        ends = [time.monotonic() + share * minutes * 60 for share in itertools.accumulate(SHARES.values())]
        await run_phase(server, record, "calm", count, 0, ends[0], rng, think)
        await run_phase(server, record, "storm", count, count // 2, ends[1], rng, think)
    for phase, more, until in (("kills, one rank", (), ends[2]), ("kills, two ranks", ("--tp-size", "2"), ends[3])):
        record.add(await kills(phase, [*tiny, *more], min(count, 16), until, minutes >= ALL_KILLS, rng, think))


def failures(rows: Sequence[Mapping[str, Any]], minutes: float) -> list[str]:
    """The failures as sentences: lost requests, leaks and, in a long run, growth of a process or late answers."""
    found = [text for one in rows for text in one["wrong"]]
    found += [f"{one['phase']}: {one[kind]} {kind}" for one in rows for kind in ("leaked_requests", "leaked_pages") if one[kind]]
    if minutes < LONG_MINUTES:
        return found
    calm, stormy = (next(one for one in rows if one["phase"] == phase) for phase in ("calm", "storm"))
    if stormy["p99_s"] > MAX_RATIO * calm["p99_s"]:
        found.append(f"good clients wait {stormy['p99_s']} s in storm, {calm['p99_s']} s in calm (99th percentiles)")
    slopes = {role: figures["slope_mib_per_hour"] for role, figures in stormy["memory"].items()}
    return found + [f"{role} grows by {slope} MiB an hour" for role, slope in slopes.items() if slope >= MAX_SLOPE]


def summary(result: Result) -> str:
    """One row per phase."""
    header = ["phase", "minutes", "clients", "requests", "lost", "leaked pages", "p50 s", "p99 s"]
    names = ("phase", "minutes", "clients", "requests", "lost", "leaked_pages", "p50_s", "p99_s")
    return table(header, [[one[name] for name in names] for one in result["rows"]])


def render(result: Result) -> str:
    """The same, then the growth of each process."""
    parts = [summary(result)]
    names = ("first_mib", "last_mib", "slope_mib_per_hour")
    sizes = [
        [one["phase"], role, *(figures[name] for name in names)]
        for one in result["rows"]
        for role, figures in one.get("memory", {}).items()
    ]
    if sizes:
        parts.append(table(["phase", "process", "first MiB", "last MiB", "second half, MiB per hour"], sizes))
    return "\n\n".join([*parts, provenance(result)])


def plot(result: Result, file: Path) -> None:
    """Latency of good clients by phase."""
    groups = {one["phase"]: {"p50": one["p50_s"], "p99": one["p99_s"]} for one in result["rows"]}
    picture.draw(result, file, "Storm: latency of good clients", [plots.bars(groups, "", "seconds")])


def main() -> None:
    """Run, record and plot; exit 1 if anything was lost or leaked, or if a long run shows growth or late answers."""
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="length of the whole run")
    parser.add_argument("--clients", type=positive, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--think", type=float, default=0.0, help="seconds that good clients wait after an answer, at the most")
    args = parser.parse_args()
    record = Record(NAME, KEYS, args.out, args.quick)
    asyncio.run(storm(record, tiny_model().target_flags if args.quick else EMBEDDED, args.minutes, args.clients, args.seed, args.think))
    record.show(render, plot)
    if wrong := failures(record.rows, args.minutes):
        raise SystemExit("\n".join(["failed:", *wrong]))


if __name__ == "__main__":
    main()
