"""Hostile grammars: how long a server takes to refuse each, and the effect on a concurrent stream.

Each grammar is sent twice while another client streams: the first time it is tried, the second time the result is cached. A pause is the
longest time between two events of the stream after the request. The CPU time is that of the trial.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import psutil

from benchmark.markdown import Result, table
from benchmark.record import Record
from benchmark.server import Server
from benchmark.streams import Stream

HOSTILE: dict[str, dict[str, Any]] = {
    "repetitions in repetitions": {"regex": "^((((a{1,200}){1,200}){1,200}){1,200})$"},
    "20,000 optional letters": {"regex": "a?" * 20_000},
    "regular expression that does not end": {"regex": "(a"},
    "3,999 patterns": {"json_schema": {"properties": {f"p{i}": {"pattern": f"^[a-z]{{1,{i}}}$"} for i in range(1, 4000)}}},
    "exponential schema": {"json_schema": {"allOf": [{"anyOf": [{"properties": {f"{c}{i}": {}}} for c in "ab"]} for i in range(24)]}},
    "40 patterns of one string": {"json_schema": {"allOf": [{"properties": {"a": {"pattern": f".*{i}.*"}}} for i in range(40)]}},
    "recursive schema": {"json_schema": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}},
    "schema of 1 MB": {"json_schema": {"enum": ["x" * 1000 + str(i) for i in range(1000)]}},
    "unknown keyword": {"json_schema": {"not": {"type": "string"}}},
    "EBNF without an end": {"ebnf": 'root ::= "a" root'},
    "EBNF of 3,000 rules": {"ebnf": "root ::= r0\n" + "\n".join(f'r{i} ::= r{(i + 1) % 3000} | "y"' for i in range(3000))},
}
"""Request fields by name; each is refused with 400."""
CALM_SECONDS = 2.0
"""Time of the stream without grammars."""


def pauses(stream: Stream, since: float) -> list[float]:
    """Seconds between the pieces of a stream after the time `since`, including the last piece before it."""
    times = stream.times[:]
    after = next((i for i, at in enumerate(times) if at > since), len(times))
    times = times[max(0, after - 1) :]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def ask(server: Server, fields: dict[str, Any]) -> tuple[int, float]:
    """Send a request with the grammar `fields`; returns the status and the seconds until the whole answer."""
    began = time.perf_counter()
    status = server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 64, **fields}).status_code
    return status, time.perf_counter() - began


def trials_of(server: Server) -> psutil.Process:
    """The process that runs grammar trials."""
    children = psutil.Process(server.pid).children(recursive=True)
    return next(process for process in children if "talon::grammars" in " ".join(process.cmdline()))


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of the children of `process` that have ended."""
    times = process.cpu_times()
    return times.children_user + times.children_system


def measure_hostile(record: Record, flags: list[str], calm_seconds: float = CALM_SECONDS) -> None:
    """Record one row per grammar, and one of the stream without grammars."""
    with Server(flags) as server:
        ask(server, {"regex": "ab"})  # starts the process that runs grammar trials
        trials, stream = trials_of(server), Stream(server.port, 400, forever=True)
        try:
            while len(stream.times) < 8:
                time.sleep(0.01)
            began = time.perf_counter()
            time.sleep(calm_seconds)
            calm = pauses(stream, began)
            record.add({"what": "hostile", "grammar": "none", "pause_ms": max(calm) * 1e3, "median_ms": statistics.median(calm) * 1e3})
            for name, fields in HOSTILE.items():
                began, used = time.perf_counter(), cpu_seconds(trials)
                status, first = ask(server, fields)
                again, second = ask(server, fields)
                while stream.times[-1] < began + first:
                    time.sleep(0.01)
                failed = int((status, again) != (400, 400))
                figures = {
                    "status": status,
                    "cpu_ms": (cpu_seconds(trials) - used) * 1e3,
                    "answer_ms": first * 1e3,
                    "again_ms": second * 1e3,
                    "pause_ms": max(pauses(stream, began)) * 1e3,
                }
                record.add({"what": "hostile", "grammar": name, **figures, "failed": failed})
        finally:
            stream.leave()


def hostile_table(result: Result) -> str:
    """One row per grammar; empty if not measured."""
    rows = [row for row in result["rows"] if row["what"] == "hostile"]
    names = ("grammar", "status", "cpu_ms", "answer_ms", "again_ms", "pause_ms")
    header = ["grammar", "status", "CPU time, ms", "answered after ms", "the second time", "longest pause of a stream, ms"]
    return table(header, [[row.get(name) for name in names] for row in rows]) if rows else ""


def measure_process(record: Record, flags: list[str]) -> None:
    """Record the process that runs grammar trials after its first grammar: vocabulary, resident memory and CPU time so far."""
    with Server(flags) as server:
        ask(server, {"regex": "ab"})
        trials, vocabulary = trials_of(server), server.get("/get_model_info")["vocab_size"]
        times, memory = trials.cpu_times(), trials.memory_info().rss
        record.add({"what": "process", "vocabulary": vocabulary, "memory_mib": memory / 2**20, "cpu_s": times.user + times.system})


def process_table(result: Result) -> str:
    """One row; empty if not measured."""
    rows = [row for row in result["rows"] if row["what"] == "process"]
    header = ["`talon::grammars` at its first grammar", "resident MiB", "CPU time so far, s"]
    return table(header, [[f"{row['vocabulary']:,} tokens", row["memory_mib"], row["cpu_s"]] for row in rows]) if rows else ""
