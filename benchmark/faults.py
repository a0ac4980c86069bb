"""How fast the server detects and handles faults; each time has an upper bound."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmark import picture, plots
from benchmark.markdown import Result, provenance, table
from benchmark.record import Record
from benchmark.server import Server
from benchmark.streams import BODY, Stream
from benchmark.sweep import arguments

NAME = "faults"
KEYS = ("what",)
STREAMS = 10
"""Streams that are requested at most until one comes in several pieces."""


def running(port: int, tokens: int) -> Stream:
    """A stream that has begun, or has ended in one piece: the server joins pieces that it could not send in time."""
    stream = Stream(port, tokens)
    wait_for(lambda: len(stream.times) > 1 or (stream.ended > 0 and len(stream.times) == 1 and not stream.failed))
    return stream


def longest(server: Server) -> int:
    """A token count large enough that the stream runs until it is closed."""
    return server.get("/v1/models")["data"][0]["max_model_len"] - 64


def wait_for(true: Callable[[], bool], seconds: float = 60.0, pause: float = 0.002) -> float:
    """Wait until `true()` and return the seconds. Raises `TimeoutError`."""
    started = time.perf_counter()
    while not true():
        if time.perf_counter() - started > seconds:
            raise TimeoutError(f"the condition did not hold within {seconds:g} s")
        time.sleep(pause)
    return time.perf_counter() - started


def status(server: Server, path: str) -> int:
    """HTTP status of GET `path`; 0 without an answer."""
    try:
        return server.http.get(path).status_code
    except httpx.HTTPError:
        return 0


def ask_ms(port: int, path: str, count: int, body: dict[str, Any] | None = None) -> tuple[float, int]:
    """Median milliseconds per answer on one connection, and the last status."""
    times, code = [], 0
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False, verify=False) as client:
        for _ in range(count):
            started = time.perf_counter()
            code = client.request("GET" if body is None else "POST", path, json=body).status_code
            times.append((time.perf_counter() - started) * 1000)
    return statistics.median(times), code


def health(server: Server) -> dict[str, Any]:
    """`/health` while eight streams run."""
    streams = [running(server.port, 96) for _ in range(8)]
    median, _ = ask_ms(server.port, "/health", 200)
    for stream in streams:
        stream.join()
    return {"what": "/health answers while 8 streams run, median", "value": median, "bound": 5.0, "unit": "ms"}


def client_gone(server: Server) -> dict[str, Any]:
    """Time from closing a stream until its KV is free, polled without pause."""
    waits, gaps = [], []
    for _ in range(10):
        stream = running(server.port, longest(server))
        wait_for(lambda stream=stream: len(stream.times) > 8)
        stream.leave()
        waits.append(wait_for(lambda: server.get("/get_server_info")["internal_states"][0]["token_usage"] == 0, pause=0) * 1000)
        gaps += stream.gaps_ms
    step = statistics.median(gaps)
    return {"what": "client gone: KV is free again, median", "value": statistics.median(waits), "bound": step + 100, "unit": "ms"}


def queue_full(server: Server) -> dict[str, Any]:
    """Time of a refusal by a server with one row and a queue of one."""
    body, times, code = BODY | {"max_tokens": 4}, [], 0
    for _ in range(20):
        stream, waiting = running(server.port, longest(server)), Stream(server.port, 4)
        wait_for(lambda stream=stream: _queued(server) == 1 or stream.ended > 0)
        median, answer = ask_ms(server.port, "/v1/completions", 10, body)
        stream.leave()
        waiting.leave()
        if answer in (429, 503):  # otherwise a fast model has emptied the queue meanwhile
            times.append(median)
            code = answer
        if len(times) == 5:
            break
    assert times, "the queue was never full"
    return {"what": f"queue full: {code} with Retry-After, median", "value": statistics.median(times), "bound": 20.0, "unit": "ms"}


def _queued(server: Server) -> int:
    return server.get("/get_server_info")["internal_states"][0]["num_queue_reqs"]


def gap_ms(server: Server) -> float:
    """The median gap between the pieces of a stream. One that came in one piece has no gaps, so another is requested."""
    for _ in range(STREAMS):
        if gaps := Stream(server.port, 128).join().gaps_ms:
            return statistics.median(gaps)
    raise TimeoutError(f"all of {STREAMS} streams came in one piece, or failed")


def idle_crowd(server: Server, count: int) -> dict[str, Any]:
    """The gap between tokens of one stream, alone and with `count` idle connections."""
    alone = gap_ms(server)
    crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(count)]
    beside = gap_ms(server)
    for sock in crowd:
        sock.close()
    return {"what": f"gap between tokens beside {count} idle connections", "value": beside, "bound": alone * 1.2, "unit": "ms"}


def doubling(server: Server, runs: int, total: int) -> dict[str, Any]:
    """The factor of CPU time for tokenising twice the text, averaged over the four doublings from 64 KiB to 1 MiB; best of `runs`.

    `total`: bytes of all requests of a size and run, because the clock counts hundredths of a second.
    """
    process = psutil.Process(server.pid)

    def seconds(size: int) -> float:
        body = {"prompt": "many words and a number 12 " * (size // 27)}
        repeats = total // size
        before = sum(process.cpu_times()[:2])
        ask_ms(server.port, "/tokenize", repeats, body)
        return (sum(process.cpu_times()[:2]) - before) / repeats

    small, large = (min(seconds(1 << n) for _ in range(runs)) for n in (16, 20))
    return {
        "what": "text of twice the length costs, mean from 64 KiB to 1 MiB",
        "value": (large / small) ** 0.25,
        "bound": 2.3,
        "unit": "times",
    }


def killed(server: Server, role: str) -> list[dict[str, Any]]:
    """Kill -9 of one child while a stream runs."""
    stream = running(server.port, longest(server))
    (child,) = (p for p in psutil.Process(server.pid).children() if p.cmdline()[:1] == [f"talon::{role}"])
    started = time.perf_counter()
    child.kill()
    wait_for(lambda: status(server, "/health") == 503)
    red = time.perf_counter() - started
    stream.join()
    assert stream.failed
    ended = stream.ended - started
    assert server.wait() == 1
    gone = time.perf_counter() - started
    name = f"kill -9 of the {role}:"
    return [
        {"what": f"{name} /health is 503", "value": red, "bound": 1.0, "unit": "s"},
        {"what": f"{name} open streams end with an error", "value": ended, "bound": 2.0, "unit": "s"},
        {"what": f"{name} the server has exited with status 1", "value": gone, "bound": 5.0, "unit": "s"},
    ]


def stopped(server: Server) -> list[dict[str, Any]]:
    """SIGSTOP of the scheduler."""
    (child,) = (p for p in psutil.Process(server.pid).children() if p.cmdline()[:1] == ["talon::scheduler"])
    started = time.perf_counter()
    child.suspend()
    wait_for(lambda: status(server, "/health") == 503)
    red = time.perf_counter() - started
    assert server.wait() == 1
    gone = time.perf_counter() - started
    return [
        {"what": "SIGSTOP of the scheduler: /health is 503", "value": red, "bound": 15.0, "unit": "s"},
        {"what": "SIGSTOP of the scheduler: the server has exited", "value": gone, "bound": 15.0, "unit": "s"},
    ]


def orphans(server: Server) -> dict[str, Any]:
    """kill -9 of the server itself."""
    children = psutil.Process(server.pid).children()
    started = time.perf_counter()
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in children))
    return {"what": "kill -9 of the server: no child is left", "value": time.perf_counter() - started, "bound": 2.0, "unit": "s"}


def render(result: Result) -> str:
    """One row per effect of a fault: the measured time and its bound."""
    rows = [[row["what"], _time(row, "value"), _time(row, "bound")] for row in result["rows"]]
    return "\n".join([table(["fault", "measured", "at most"], rows), "", provenance(result)])


def summary(result: Result) -> str:
    """One row per fault, with all its effects."""
    effects: dict[str, list[str]] = {}
    for row in result["rows"]:
        fault, _, effect = row["what"].partition(": ")
        effects.setdefault(fault, []).append(f"{effect} {_time(row, 'value')} (at most {_time(row, 'bound')})".strip())
    return table(["fault", "measured"], [[fault, "; ".join(texts)] for fault, texts in effects.items()])


def _time(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2f} {row['unit']}" if name == "value" else f"{row[name]:.4g} {row['unit']}"


def plot(result: Result, file: Path) -> None:
    """The measured values as shares of their bounds."""
    rows = {row["what"]: row for row in result["rows"]}
    shares = {what: {"share": row["value"] / row["bound"]} for what, row in rows.items()}

    def text(what: str, _: str) -> str:
        row = rows[what]
        return f"{row['value']:.2f} of {row['bound']:.4g} {row['unit']}"

    panel = plots.bars(shares, "", "measured / allowed", bound=1.0, text=text, room=0.25)
    picture.draw(result, file, "Faults: SmolLM2-135M", [panel])


def measure(record: Record, flags: Sequence[str], crowd: int, runs: int, text: int) -> None:
    """Measure a server that survives, and one with a short queue. `text`: bytes to tokenise for each size."""
    with Server(flags) as server:
        for row in (health(server), client_gone(server), idle_crowd(server, crowd), doubling(server, runs, text)):
            record.add(row)
    with Server([*flags, "--max-running-requests", "1", "--max-queued-requests", "1"]) as server:
        record.add(queue_full(server))


def measure_deaths(record: Record, flags: Sequence[str]) -> None:
    """Measure four servers that are killed."""
    for role in ("scheduler", "detokenizer"):
        with Server(flags) as server:
            for row in killed(server, role):
                record.add(row)
    with Server(flags) as server:
        for row in stopped(server):
            record.add(row)
    with Server(flags) as server:
        record.add(orphans(server))


def main() -> None:
    """Measure, record and plot."""
    args = arguments(__doc__).parse_args()
    record = Record(NAME, KEYS, args.out, args.quick)
    if args.quick:
        from benchmark.shapes import tiny_model

        measure(record, tiny_model().target_flags[:-2], 20, 1, 1 << 20)
    else:
        measure(record, ("--device", "cpu"), 1000, 3, 1 << 21)
        measure_deaths(record, ("--device", "cpu"))
    record.show(render, plot)


if __name__ == "__main__":
    main()
