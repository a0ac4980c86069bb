"""CPU time of each process of the server for one request in one step, without a device.

The scheduler plans steps, submits them to a worker that answers immediately, and encodes the replies. The detokenizer processes such
replies. The HTTP process writes chunks of streaming chats to sockets that another process reads; `http behind` is the same if the replies
of four steps have arrived before it writes. The value is the 10th percentile of the thread's CPU time over many steps, so other load on the
machine has little effect. With `--base`, another checkout alternates with this one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from benchmark import picture, plots
from benchmark.engine_loop import EngineLoop
from benchmark.machine import ROOT
from benchmark.markdown import Result, pick, table, with_provenance
from benchmark.record import Record
from benchmark.sweep import arguments, positive
from runtime.batch import BatchResult, ScheduleBatch, StepStats, WorkerLimits
from runtime.config.flag_parser import parse
from runtime.config.runtime_config import RuntimeConfig
from runtime.entrypoints.kept_memory import freeze_gc
from runtime.entrypoints.prepare import prepare
from runtime.entrypoints.server.server import serve
from runtime.managers.detokenizer_manager import DetokenizerManager
from runtime.managers.messages import (
    Finish,
    GenerateReq,
    RequestInfo,
    TextOut,
    TextOutBatch,
    ToDetokenizer,
    TokensOut,
    TokensOutBatch,
    ToScheduler,
    ToTokenizer,
)
from runtime.managers.scheduler import Scheduler
from runtime.managers.telemetry.decode_stats import DecodeStats
from runtime.managers.telemetry.progress import Progress
from runtime.managers.telemetry.spec_stats import SpecStats
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.models.config import ModelConfig
from runtime.text.tokenizer import Tokenizer
from runtime.worker_info import WorkerInfo

NAME = "host_cost"
KEYS = ("process", "requests", "drafts", "checkout")
SIZES = (1, 16, 64, 128, 256)
PARTS = {"plan": "_plan", "submit": "_submit", "apply": "_apply", "send": "_send_replies"}
READER = """
import selectors, socket, sys
port, streams, body = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
head = b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n"
selector, buffer = selectors.DefaultSelector(), bytearray(1 << 20)
for _ in range(streams):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(head % len(body) + body)
    selector.register(connection, selectors.EVENT_READ)
while streams:
    for key, _ in selector.select():
        count = key.fileobj.recv_into(buffer)
        if not count or b"[DONE]" in buffer[:count]:
            selector.unregister(key.fileobj)
            streams -= 1
"""
"""The program that reads streams to their end."""


@dataclass(frozen=True)
class Done:
    """A step that has ended."""

    result: BatchResult

    def wait(self) -> BatchResult:
        return self.result


class NullWorker:
    """Answers every decode row with the same tokens: one without drafts, two with."""

    def __init__(self, drafts: int) -> None:
        self.limits = WorkerLimits(
            max_total_tokens=1 << 20,
            max_running_requests=max(SIZES),
            max_context_len=1 << 14,
            max_extend_tokens=8192,
            page_size=64,
            vocab_size=32_000,
            tokens_per_step=drafts + 1,
            max_accept_len=drafts + 1,
            prefix_lookahead=int(drafts > 0),
        )

    def info(self) -> WorkerInfo:
        return WorkerInfo()

    def submit(self, batch: ScheduleBatch) -> Done:
        drafts = self.limits.max_accept_len - 1
        ended = (batch.next_tokens < 0).astype(np.int32)
        accept_lens = np.concatenate([ended, np.full(batch.num_decodes, 2 if drafts else 1, np.int32)])
        stats = StepStats(graph=True, padded_size=batch.num_decodes, draft_tokens=drafts, depth=drafts)
        return Done(BatchResult(np.full(int(accept_lens.sum()), 7, np.int32), accept_lens, stats=stats))


class EncodingLoop(EngineLoop):
    """The loop of the scheduler process. Messages are encoded and, while it is `measured`, discarded."""

    measured = False

    def _sent(self, message: ToDetokenizer) -> None:
        if not self.measured:
            super()._sent(message)
        msgspec.msgpack.encode(message)


def configuration() -> tuple[RuntimeConfig, ModelConfig]:
    """The configuration of the default model."""
    return prepare(parse(["--device", "cpu", "--log-level", "warning"]).args)


def typical(times: Sequence[float], requests: int) -> float:
    """Microseconds for each request: the 10th percentile of the steps."""
    return float(np.quantile(times, 0.1)) / requests * 1e6


def timed(function: Callable[[], object]) -> float:
    """CPU seconds of one call on this thread."""
    began = time.thread_time()
    function()
    return time.thread_time() - began


def scheduler(requests: int, drafts: int, steps: int) -> dict[str, Any]:
    """Time the scheduler's whole step, then its parts."""
    config, _ = configuration()
    scheduling = msgspec.structs.replace(config.scheduler, chunked_prefill_size=8192)
    loop = EncodingLoop(msgspec.structs.replace(config, scheduler=scheduling), NullWorker(drafts), overlap=True)
    loop.start(requests, 8, 8000)
    loop.measured = True
    freeze_gc()
    whole = [timed(lambda: loop.run(1)) for _ in range(steps)]
    spent: dict[str, list[float]] = {part: [] for part in PARTS}
    for part, name in PARTS.items():
        method = getattr(Scheduler, name)

        def measured(*args: Any, method: Any = method, part: str = part) -> Any:
            began = time.thread_time()
            result = method(*args)
            spent[part].append(time.thread_time() - began)
            return result

        setattr(Scheduler, name, measured)
    for _ in range(steps):
        loop.run(1)
    return {"us": typical(whole, requests), "parts": {part: typical(times, requests) for part, times in spent.items()}}


def _progress(drafts: int) -> Progress:
    spec = SpecStats(50, 150, 50, [30, 15, 5]) if drafts else None
    return Progress(8, 0, 100, 0.01, spec, DecodeStats(50, 50, 12800, 0), 0.01)


def detokenizer(requests: int, drafts: int, steps: int) -> dict[str, Any]:
    """Time the detokenizer: decode the scheduler's message, handle it, encode the result."""
    tokenizer, rng = Tokenizer.load(configuration()[0].model.tokenizer_path), np.random.default_rng(0)

    def send(message: ToTokenizer) -> None:
        msgspec.msgpack.encode(message)

    manager = DetokenizerManager(tokenizer, send, lambda stop: None)
    names = [str(i + 1000) for i in range(requests)]
    for rid in names:
        manager.handle(RequestInfo(rid=rid, stop=(), skip_special_tokens=True, stream=True))
    decoder, frames, vocabulary = msgspec.msgpack.Decoder(ToDetokenizer), list[bytes](), rng.integers(100, 10_000, 2000)
    for _ in range(steps):
        tokens = rng.choice(vocabulary, (requests, 2 if drafts else 1)).tolist()
        outs = [TokensOut(rid=rid, token_ids=ids, progress=_progress(drafts)) for rid, ids in zip(names, tokens, strict=True)]
        frames.append(msgspec.msgpack.encode(TokensOutBatch(outs=outs)))
    freeze_gc()
    return {"us": typical([timed(lambda f=frame: manager.handle(decoder.decode(f))) for frame in frames], requests)}


def http(requests: int, drafts: int, steps: int, unread: int = 1) -> dict[str, Any]:
    """Time the HTTP process for the updates of `unread` steps of each stream, from the detokenizer's messages to the sockets."""
    return {"us": uvloop.run(_http(requests, drafts, steps, unread))}


async def _http(requests: int, drafts: int, steps: int, unread: int) -> float:
    config, model_config = configuration()
    names: list[str] = []

    def to_scheduler(message: ToScheduler) -> None:
        if isinstance(message, GenerateReq):
            names.append(message.rid)

    tokenizer = Tokenizer.load(config.model.tokenizer_path)
    manager = TokenizerManager(config, tokenizer, model_config, NullWorker(drafts).limits, to_scheduler)
    listener, stopping = socket.create_server(("127.0.0.1", 0), backlog=512), asyncio.Event()
    serving = asyncio.create_task(serve(manager, listener, stopping))
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 1000})
    reader = subprocess.Popen([sys.executable, "-c", READER, str(listener.getsockname()[1]), str(requests), body])
    while len(names) < requests:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    decoder, times = msgspec.msgpack.Decoder(ToTokenizer), list[float]()
    freeze_gc()

    async def step(finish: Finish | None) -> None:
        outs = [
            TextOut(rid=rid, text=" the", token_ids=[7] * (1 + bool(drafts)), progress=_progress(drafts), finish=finish) for rid in names
        ]
        frame = msgspec.msgpack.encode(TextOutBatch(outs=outs))
        began = time.thread_time()
        for _ in range(1 if finish is not None else unread):
            manager.handle(decoder.decode(frame))
        for _ in range(6):  # iterations of the event loop until everything is written
            await asyncio.sleep(0)
        times.append(time.thread_time() - began)
        await asyncio.sleep(0.02)

    for i in range(steps):
        await step(Finish(reason="length") if i == steps - 1 else None)
    await asyncio.to_thread(reader.wait, 30)
    stopping.set()
    await serving
    manager.close()
    return typical(times, requests * unread)


PROCESSES = {
    "scheduler": (scheduler, 300),
    "detokenizer": (detokenizer, 100),
    "http": (http, 60),
    "http behind": (partial(http, unread=4), 60),
}
"""By process: the function that measures it, and the number of steps."""


def measured(checkout: Path, process: str, requests: int, drafts: int, quick: bool) -> dict[str, Any]:
    """Measure one process of a checkout in a separate process."""
    env = {**os.environ, "PYTHONPATH": f"{checkout / 'python'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    only = ["--only", process, str(requests), str(drafts)]
    command = [sys.executable, "-m", f"benchmark.{NAME}", *only, *(["--quick"] if quick else [])]
    return json.loads(subprocess.run(command, env=env, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])


def summary(result: Result) -> str:
    """Microseconds per request and step, by number of requests; the value before an arrow is the base checkout's."""
    rows = result["rows"]
    lines, sizes = [], sorted({row["requests"] for row in rows})
    for process, drafts in dict.fromkeys((row["process"], row["drafts"]) for row in rows):
        found = [_cell(rows, process, drafts, size) for size in sizes]
        lines.append([f"{process}, {drafts} drafts", *found])
    parts = [row for row in rows if row.get("parts") and row["requests"] == sizes[-1]]
    by_part = [[f"{row['drafts']} drafts, {row['checkout']}", *row["parts"].values()] for row in parts]
    return "\n\n".join(
        [
            table(["µs per request and step", *(f"{size}" for size in sizes)], lines),
            f"The scheduler by part, {sizes[-1]} requests:",
            table(["µs per request and step", *PARTS], by_part),
        ]
    )


render = with_provenance(summary)


def _cell(rows: Sequence[dict[str, Any]], process: str, drafts: int, requests: int) -> str:
    found = [pick(rows, process=process, drafts=drafts, requests=requests, checkout=checkout) for checkout in ("base", "this")]
    return " → ".join(f"{row['us']:.1f}" for row in found if row is not None) or "-"


def plot(result: Result, file: Any) -> None:
    """Microseconds by process at the largest number of requests."""
    rows = [row for row in result["rows"] if row["requests"] == max(other["requests"] for other in result["rows"])]
    groups = {
        f"{row['process']}, {row['drafts']} drafts": {
            other["checkout"]: other["us"] for other in rows if (other["process"], other["drafts"]) == (row["process"], row["drafts"])
        }
        for row in rows
    }
    title = f"One request in one step of {rows[0]['requests']}"
    picture.draw(result, file, "Host time", [plots.bars(groups, title, "µs of CPU time", kind="process")])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all processes at all sizes, print."""
    parser = arguments(__doc__)
    parser.add_argument("--base", type=Path, help="another checkout, measured in turn with this one")
    parser.add_argument("--sizes", type=positive, nargs="+", default=SIZES, help="requests of a step")
    parser.add_argument("--rounds", type=positive, default=2, help="the best of so many is kept")
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.only:
        function, steps = PROCESSES[args.only[0]]
        print(json.dumps(function(int(args.only[1]), int(args.only[2]), 5 if args.quick else steps)))
        return
    record = Record(NAME, KEYS, args.out, args.quick)
    checkouts = {**({"base": args.base} if args.base else {}), "this": ROOT}
    for process in PROCESSES:
        for requests in SIZES[:1] if args.quick else args.sizes:
            for drafts in (0, 3):
                found: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
                for _ in range(1 if args.quick else args.rounds):
                    for name, checkout in checkouts.items():
                        found[name].append(measured(checkout, process, requests, drafts, args.quick))
                for name, runs in found.items():
                    best = min(runs, key=lambda run: run["us"])
                    record.add({"process": process, "requests": requests, "drafts": drafts, "checkout": name, **best})
    record.show(render, plot)


if __name__ == "__main__":
    main()
