"""Measures `/health` and the first token of a good client beside four other clients, which are either well-behaved or send the most
expensive requests that the server allows.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmark import picture, plots
from benchmark.markdown import Result, pick, table, with_provenance
from benchmark.record import Record
from benchmark.server import Server
from benchmark.shapes import tiny_model
from benchmark.sweep import arguments

NAME = "abuse"
KEYS = ("neighbours",)
EMBEDDED = ("--device", "cpu", "--random-seed", "1")
NEIGHBOURS = 4
PATIENCE = 5.0
"""Seconds after which another client abandons a request and sends the next; less in shorter runs."""
HEALTH_MS, TTFT_RATIO = 50.0, 2.0
"""Bounds of the 99th percentiles: of `/health`, and of the first token relative to that beside well-behaved clients."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Request = tuple[str, bytes]


def request(path: str, **body: Any) -> Request:
    """A path and a body."""
    return path, json.dumps(body).encode()


def well_behaved(context: int, vocabulary: int, rng: random.Random) -> Iterator[Request]:
    """Streams of 64 tokens after prompts of up to 512."""
    while True:
        prompt = [rng.randrange(2, vocabulary) for _ in range(rng.randint(min(256, context // 4), min(512, context // 2)))]
        yield request(COMPLETIONS, prompt=prompt, max_tokens=64, ignore_eos=True, stream=True)


def worst(context: int, vocabulary: int, rng: random.Random) -> dict[str, Request]:
    """The most expensive requests just within each limit, by name."""
    long = [rng.randrange(2, vocabulary) for _ in range(context - 16)]
    few = {"ignore_eos": True, "max_tokens": 8}
    prompts = min(256, (500_000 if vocabulary > 1000 else 50_000) // len(long))
    user, part = {"role": "user", "content": "Hello"}, {"type": "text", "text": "a"}
    enum = json.dumps({"enum": [f"{i:04}" + "x" * 90 for i in range(600)]})
    extreme: dict[str, Any] = {"frequency_penalty": 1.5, "presence_penalty": 1.5, "repetition_penalty": 1.5, "min_p": 0.01, "top_p": 0.99}
    extreme |= {"logit_bias": {str(i): 1 for i in range(min(1024, vocabulary))}, "stop": [f"{i:x}" + "é" * 250 for i in range(16)]}
    return {
        "large body": (COMPLETIONS, b'{"prompt":"hi","max_tokens":1,"metadata":{"a":"' + b"\\u00e9" * 1_300_000 + b'"}}'),
        "unknown fields": request(COMPLETIONS, prompt="hi", max_tokens=1, **{f"f{i}": 1 for i in range(100_000)}),
        "text parts": request(CHAT, messages=[{"role": "user", "content": [part] * 4000}], **few),
        "many messages": request(CHAT, messages=[user] * 4000, **few),
        "Anthropic messages": request("/v1/messages", model="default", max_tokens=8, messages=[user | {"content": [part]}] * 3000),
        "tools": request(CHAT, messages=[user], tools=[_tool(i) for i in range(100)], tool_choice="required", max_tokens=32),
        "many prompts": request(COMPLETIONS, prompt=["Once upon a time " * 100] * 256, **few),
        "long prompts": request(COMPLETIONS, prompt=[long[i:] + long[:i] for i in range(prompts)], **few),
        "long text": request(COMPLETIONS, prompt="word " * (context - 16), **few),
        "too long text": request(COMPLETIONS, prompt="12 " * context, **few),
        "echo": request(COMPLETIONS, prompt=[long[i:] + long[:i] for i in range(6)], echo=True, logprobs=20, max_tokens=1),
        "samples": request(COMPLETIONS, prompt=long[:8], n=128, max_tokens=context // 2, ignore_eos=True, stream=True),
        "log-probabilities": request(COMPLETIONS, prompt=long[:8], n=8, max_tokens=context // 4, ignore_eos=True, stream=True, logprobs=20),
        "penalties": request(COMPLETIONS, prompt=long[: context // 2], n=16, max_tokens=context // 4, ignore_eos=True, **extreme),
        "grammar": request(COMPLETIONS, prompt="hi", max_tokens=64, json_schema=enum),
        "grammar bomb": request(COMPLETIONS, prompt="hi", max_tokens=64, regex="((a{1,900}){1,900}){1,900}"),
        "tokenize": request("/tokenize", prompt="ab " * 150_000, return_token_strs=True),
        "detokenize": request("/detokenize", tokens=[5] * 400_000),
        "rerank": request("/v1/rerank", query="a", documents=["Once upon a time"] * 1000),
        "embeddings": request("/v1/embeddings", input=["Once upon a time " * 20] * 1000),
    }  # fmt: skip


def _tool(index: int) -> dict[str, Any]:
    fields = {f"field{i}": {"type": "string", "enum": ["a", "b", "c"]} for i in range(4)}
    return {"type": "function", "function": {"name": f"tool{index}", "parameters": {"type": "object", "properties": fields}}}


# ---- clients


def post(port: int, address: str, what: Request, seconds: float, first_only: bool = False) -> tuple[int, float]:
    """Status, and seconds until the end of the answer or, with `first_only`, its first event. The status is 0 after `seconds`."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds, source_address=(address, 0))
    try:
        connection.request("POST", what[0], what[1], {"Content-Type": "application/json"})
        answer, first = connection.getresponse(), 0.0
        for line in iter(answer.readline, b""):
            first = first or (time.perf_counter() - began if line.startswith(b"data: {") else 0.0)
            if time.perf_counter() - began > seconds:
                return 0, seconds
        return answer.status, first if first_only else time.perf_counter() - began
    except (OSError, http.client.HTTPException):
        return 0, time.perf_counter() - began
    finally:
        connection.close()


def neighbours(port: int, kinds: Sequence[str] | None, facts: tuple[int, int], patience: float, out: Connection) -> None:
    """Run all other clients, each from its own address, until told to stop. Then send the count of statuses by request."""
    counts: Counter[str] = Counter()
    ending = threading.Event()

    def run(index: int) -> None:
        rng = random.Random(index)
        if kinds is None:
            requests: Iterator[tuple[str, Request]] = (("well-behaved", one) for one in well_behaved(*facts, rng))
        else:
            made = [(kind, one) for kind, one in worst(*facts, rng).items() if kind in kinds]
            requests = cycle(made[index * len(made) // NEIGHBOURS :] + made[: index * len(made) // NEIGHBOURS])
        while not ending.is_set():
            kind, one = next(requests)
            status, _ = post(port, f"127.0.0.{2 + index}", one, 60.0 if kinds is None else patience)
            counts[f"{kind}: {status or 'left'}"] += 1
            ending.wait(0.5 if status >= 400 else 0.0)  # do not flood the server with requests that it refuses

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(NEIGHBOURS)]
    for thread in threads:
        thread.start()
    out.recv()
    ending.set()
    for thread in threads:
        thread.join(2 * PATIENCE)
    out.send(dict(sorted(counts.items())))


def repeat(seconds: float, pause: float, act: Callable[[], float]) -> list[float]:
    """Call `act` repeatedly for `seconds`; return its results in milliseconds."""
    done, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        done.append(act() * 1000)
        time.sleep(pause)
    return done


def measure(server: Server, label: str, kinds: Sequence[str] | None, seconds: float) -> dict[str, Any]:
    """Measure one row: a good client and `/health` beside the other clients."""
    info = server.get("/get_model_info")
    facts, rng, failed = (info["max_context_len"], info["vocab_size"]), random.Random(9), Counter[int]()
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=neighbours, args=(server.port, kinds, facts, min(PATIENCE, seconds), theirs), daemon=True)
    child.start()
    probe = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)

    def health() -> float:
        began = time.perf_counter()
        probe.request("GET", "/health")
        answer = probe.getresponse()
        answer.read()
        failed[answer.status] += answer.status != 200
        return time.perf_counter() - began

    def good() -> float:
        body = request(COMPLETIONS, prompt=[rng.randrange(2, facts[1]) for _ in range(64)], max_tokens=8, ignore_eos=True, stream=True)
        status, first = post(server.port, "127.0.0.9", body, 60.0, first_only=True)
        failed[status] += status != 200
        return first

    time.sleep(min(5.0, seconds / 4))  # until the neighbours run
    healths: list[float] = []
    thread = threading.Thread(target=lambda: healths.extend(repeat(seconds, 0.02, health)))
    thread.start()
    firsts = repeat(seconds, 0.05, good)
    thread.join()
    ours.send(None)
    sent = ours.recv()
    child.join()
    shares = {name: statistics.quantiles(times * 2, n=100, method="inclusive") for name, times in (("health", healths), ("ttft", firsts))}
    figures = {f"{name}_p{at}_ms": round(cuts[at - 1], 1) for name, cuts in shares.items() for at in (50, 99)}
    return {
        "neighbours": label, "seconds": seconds, **figures, "health_most_ms": round(max(healths), 1), "good_requests": len(firsts),
        "failed": failed.total(), "sent": sent,
    }  # fmt: skip


# ---- output


def ratio(rows: list[dict[str, Any]], row: dict[str, Any]) -> float | None:
    """The 99th percentile of the first token relative to that beside well-behaved clients."""
    base = pick(rows, neighbours="well-behaved")
    return row["ttft_p99_ms"] / base["ttft_p99_ms"] if base else None


def summary(result: Result) -> str:
    """One row per kind of other clients."""
    header = [
        "four neighbours",
        "/health p50 ms",
        "p99",
        "most",
        "first token p50 ms",
        "p99",
        "against well-behaved",
        "good requests",
        "failed",
    ]
    names = ("neighbours", "health_p50_ms", "health_p99_ms", "health_most_ms", "ttft_p50_ms", "ttft_p99_ms")
    rows = result["rows"]
    lines = [[*(row[name] for name in names), ratio(rows, row), row["good_requests"], row["failed"]] for row in rows]
    return table(header, lines)


render = with_provenance(summary)


def plot(result: Result, file: Path) -> None:
    """First token and health by kind of other clients."""
    groups = {row["neighbours"]: {"first token p99": row["ttft_p99_ms"], "/health p99": row["health_p99_ms"]} for row in result["rows"]}
    picture.draw(result, file, "A good client beside four neighbours", [plots.bars(groups, "", "milliseconds")])


def main() -> None:
    """Measure, record and plot; exit 1 if a bound does not hold."""
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each row")
    parser.add_argument("--each", action="store_true", help="one more row for each kind of request")
    parser.add_argument("--flags", nargs="*", default=[], help="further flags of the server, without the leading dashes")
    args = parser.parse_args()
    record = Record(NAME, KEYS, args.out, args.quick)
    flags, seconds = (tiny_model().target_flags, 1.0) if args.quick else (EMBEDDED, args.seconds)
    kinds = list(worst(1024, 512, random.Random(0)))
    loads: dict[str, Sequence[str] | None] = {"well-behaved": None, "worst requests": kinds}
    loads |= {kind: [kind] for kind in kinds} if args.each else {}
    with Server([*flags, *(f"--{flag}" for flag in args.flags)]) as server:
        for label, load in loads.items():
            record.add(measure(server, label, load, seconds))
            print(json.dumps(record.rows[-1]), flush=True)
    record.show(render, plot)
    late = [row for row in record.rows if row["health_p99_ms"] > HEALTH_MS or (ratio(record.rows, row) or 0.0) > TTFT_RATIO]
    if (late and not args.quick) or any(row["failed"] for row in record.rows):
        raise SystemExit(f"a bound does not hold: {[row['neighbours'] for row in late]}")


if __name__ == "__main__":
    main()
