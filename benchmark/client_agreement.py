"""`bench_serving` compared with SGLang's own client on the same servers, and with itself: differences of the medians of the runs.

Both clients get the same prompts, arrivals and flags, and they alternate. The servers have steps of known length, so that only the client
differs. Both clients start the clock before they connect, and a seed gives both the same arrivals. Requests to the mock overlap. Requests
to Talon do not: if a first token overlaps with another request, it waits for the step in flight, which varies from run to run with either
client.

The remaining differences: SGLang's client takes longer to send a request, which shows in the TTFT of the fast mock, whose first token takes
20 ms; a median gap of 5 ms is not stable for either client. `bench_serving` counts a token when it arrives, even if its text is held back
(an incomplete character, a special token); these servers send whole words, so this does not occur here. In an open loop SGLang's client
also waits for the gap after the last arrival, which does not matter with many requests.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from benchmark import picture, plots
from benchmark.machine import ROOT
from benchmark.markdown import Result, provenance, signed, split, table
from benchmark.record import Record
from benchmark.server import Server, environment
from benchmark.shapes import tiny_model, write_tiny
from benchmark.sweep import arguments, names, positive
from runtime.bench.datasets import embedded_prompts

NAME = "client_agreement"
KEYS = ("server", "backend", "load")
BACKENDS = ("sglang", "sglang-oai")
SERVERS = ("timed", "mock", "fast-mock", "model")
MOCKS = {"mock": (0.2, 0.02), "fast-mock": (0.02, 0.005)}
"""TTFT and time between tokens, in seconds."""
STEP = 0.1
"""Seconds per step of the timed worker."""
FIGURES = {
    "request_throughput": "requests/s",
    "output_throughput": "tokens/s",
    **{f"{kind}_{name}_ms": f"{kind} {short}" for name, short in
       (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2e_latency", "E2E")) for kind in ("mean", "median")},
}  # fmt: skip
KINDS = ("difference", "repeat")
_SEED = 42
_WORDS = 1024  # vocabulary size of the timed worker
_LOG_TAIL = 3000

Figures = dict[str, Any]


class ClientFailed(Exception):
    """A client did not run or a request failed; the message has the end of its output."""


@dataclass(frozen=True)
class Client:
    """A program with SGLang's flags: its command and environment."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]

    def run(self, flags: Sequence[str], requests: int) -> Figures:
        """Run the client and return its JSON line; raise ClientFailed."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.jsonl"
            command = [*self.command, *flags, "--num-prompts", str(requests), "--disable-tqdm", "--output-file", str(out)]
            done = subprocess.run(command, env=self.environment, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode != 0 or not out.is_file():
                raise ClientFailed(f"{' '.join(command)}:\n{done.stdout[-_LOG_TAIL:]}{done.stderr[-_LOG_TAIL:]}")
            figures = json.loads(out.read_text(encoding="utf-8"))
        if figures["completed"] != requests:
            raise ClientFailed(f"{' '.join(command)}: {figures['completed']} of {requests} requests succeeded")
        return figures


@dataclass(frozen=True)
class Load:
    """One load, as flags for both clients."""

    name: str
    requests: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """A running server: its name in the rows, the flags for both clients, and its loads."""

    name: str
    flags: tuple[str, ...]
    loads: tuple[Load, ...]


def loads(requests: int, tokens: int, concurrency: int, rate: float) -> tuple[Load, ...]:
    """A closed loop and an open loop of the same requests."""
    length = ("--sharegpt-output-len", str(tokens))
    return (
        Load(f"{concurrency} at a time", requests, (*length, "--max-concurrency", str(concurrency))),
        Load(f"{rate:g} a second", requests, (*length, "--request-rate", str(rate))),
    )


def our_client() -> Client:
    """`runtime.bench_serving` of this checkout."""
    return Client("bench_serving", (sys.executable, "-m", "runtime.bench_serving"), environment())


def sglang_client(folder: Path, python: str) -> Client:
    """SGLang's client.

    Args:
        folder: folder of the package `sglang`: an unpacked wheel, or `python` of a source tree.
        python: an interpreter with the client's dependencies.

    Raises:
        ClientFailed: the client cannot be imported.
    """
    python = os.path.abspath(python) if os.sep in python else python  # each client runs in its own folder
    settings = os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    program = "import sglang, sglang.benchmark.serving; print(sglang.__version__)"
    try:
        done = subprocess.run([python, "-c", program], env=settings, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ClientFailed(f"--sglang-python {python}: {error}") from error
    if done.returncode != 0:
        raise ClientFailed(f"SGLang's client in {folder} does not start with {python}:\n{done.stderr[-_LOG_TAIL:]}")
    return Client(f"SGLang {done.stdout.split()[-1]}", (python, "-m", "sglang.benchmark.serving"), settings)


def compare(ours: Client, theirs: Client | None, flags: Sequence[str], requests: int, rounds: int) -> Figures:
    """Run our client, theirs, and ours again, `rounds` times.

    Each round starts with a different one, so that a drift of the machine affects all equally. Returns the measurements of all runs and
    the differences of the medians in per cent.
    """
    clients = [("ours", ours), ("again", ours), *([("theirs", theirs)] if theirs else [])]
    runs: dict[str, list[Figures]] = {name: [] for name, _ in clients}
    for number in range(rounds):
        turn = number % len(clients)
        for name, client in clients[turn:] + clients[:turn]:
            figures = client.run(flags, requests)
            runs[name].append({figure: figures[figure] for figure in FIGURES})
    medians = {name: {figure: median([run[figure] for run in each]) for figure in FIGURES} for name, each in runs.items()}
    return {
        "difference": differences(medians["ours"], medians["theirs"]) if theirs else None,
        "repeat": differences(medians["ours"], medians["again"]),
        "medians": medians,
        "runs": runs,
    }


def median(values: Sequence[float | None]) -> float | None:
    """The median; None if a run has no value."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def differences(ours: Figures, other: Figures) -> dict[str, float | None]:
    """By metric, the change from `other` to `ours` in per cent."""
    return {name: (ours[name] / other[name] - 1) * 100 if ours[name] and other[name] else None for name in FIGURES}


def shared_prompts() -> str:
    """The held-out chat prompts as a ShareGPT file, which both clients read and shuffle in the same way."""
    turns = [[{"value": line["prompt"]}, {"value": "An answer that is not used."}] for line in embedded_prompts()]
    return json.dumps([{"conversations": conversation} for conversation in turns])


def write_words(folder: Path) -> None:
    """Write a tokenizer in which every id is a word.

    If the text of a token is held back (an incomplete character), `bench_serving` counts it when the token arrives, SGLang's client when
    its text arrives.
    """
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(_WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8")


@contextmanager
def mock(name: str, quick: bool) -> Iterator[Target]:
    """The mock server of the tests, with known timings, in its own process."""
    ttft, gap = MOCKS[name]
    command = [sys.executable, str(ROOT / "test" / "mock_server.py"), str(ttft), str(gap)]
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        write_words(Path(folder))
        assert process.stdout is not None
        try:
            load = loads(4, 8, 2, 8.0) if quick else loads(24, 32, 4, 6.0)
            title = f"mock, TTFT {ttft * 1000:g} ms, {gap * 1000:g} ms a token"
            yield Target(title, ("--base-url", f"http://127.0.0.1:{int(process.stdout.readline())}", "--tokenizer", folder), load)
        finally:
            process.terminate()


@contextmanager
def timed(quick: bool) -> Iterator[Target]:
    """Talon's processes with the worker of the tests, whose steps take a known time.

    With this seed requests do not overlap: the first token of an overlapping request waits a random time for the step in flight.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((write_tiny(Path(folder))[0] / "config.json").read_text(encoding="utf-8"))
        (Path(folder) / "config.json").write_text(json.dumps(config | {"vocab_size": _WORDS}), encoding="utf-8")
        write_words(Path(folder))
        flags = ("--model-path", folder, "--load-format", "dummy", "--device", "cpu", "--disable-overlap-schedule")
        with Server(flags, program=(str(ROOT / "test" / "process" / "fake.py"), "serve", str(STEP))) as server:
            yield _served(f"Talon, steps of {STEP * 1000:g} ms", server, loads(4, 4, 1, 2.0) if quick else loads(5, 8, 1, 0.5))


@contextmanager
def model(quick: bool) -> Iterator[Target]:
    """The embedded model on one thread, to leave a core for the client; a tiny model for a quick run."""
    with Server(tiny_model().target_flags if quick else ("--device", "cpu", "--cpu-threads", "1")) as server:
        name = "tiny model" if quick else "embedded model, its own draft"
        yield _served(name, server, loads(4, 8, 2, 8.0) if quick else loads(10, 32, 2, 0.6))


def _served(name: str, server: Server, load: tuple[Load, ...]) -> Target:
    tokenizer = str(server.get("/model_info")["tokenizer_path"])
    return Target(name, ("--base-url", f"http://127.0.0.1:{server.port}", "--flush-cache", "--tokenizer", tokenizer), load)


def start(name: str, quick: bool) -> AbstractContextManager[Target]:
    """Start the server with this name, one of SERVERS."""
    if name in MOCKS:
        return mock(name, quick)
    return {"timed": timed, "model": model}[name](quick)


def measure(record: Record, target: Target, backends: Sequence[str], clients: tuple[Client, Client | None], rounds: int) -> None:
    """Measure all backends and loads of one server."""
    ours, theirs = clients
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as prompts:
        prompts.write(shared_prompts())
        prompts.flush()
        common = (*target.flags, "--dataset-name", "sharegpt", "--dataset-path", prompts.name, "--seed", str(_SEED))
        for backend, load in itertools.product(backends, target.loads):
            figures = compare(ours, theirs, (*common, "--backend", backend, *load.flags), load.requests, rounds)
            labels = {"server": target.name, "backend": backend, "load": load.name, "requests": load.requests, "rounds": rounds}
            record.add(labels | {"client": theirs.name if theirs else None, **figures})
            worst = [signed(farthest(figures[kind])) for kind in ("difference", "repeat")]
            print(f"  {target.name}, {backend}, {load.name}: {', '.join(worst)}", flush=True)


def render(result: Result) -> str:
    """Differences in per cent by metric: from SGLang's client if it ran, and from itself."""
    parts = []
    if compared := [row for row in result["rows"] if row["client"]]:
        clients = ", ".join(dict.fromkeys(row["client"] for row in compared))
        parts += [f"`bench_serving` against the client of {clients}:", "", _table(compared, "difference"), ""]
    return "\n".join([*parts, "`bench_serving` against itself:", "", _table(result["rows"], "repeat"), "", provenance(result)])


def summary(result: Result) -> str:
    """The largest difference of any median and load, by server."""
    lines = []
    for server, rows in split(result["rows"], itemgetter("server")).items():
        found = [{f"{i} {name}": v for i, row in enumerate(rows) for name, v in (row[kind] or {}).items()} for kind in KINDS]
        lines.append([server, *(signed(farthest(values)) for values in found)])
    return table(["largest difference of medians, %", "against SGLang's client", "against itself"], lines)


def _title(row: dict[str, Any]) -> str:
    return f"{row['server']}; {row['backend']}, {row['load']}"


def _table(rows: Sequence[dict[str, Any]], kind: str) -> str:
    lines = [[_title(row), *(signed(row[kind][name]) for name in FIGURES), signed(farthest(row[kind]))] for row in rows]
    return table(["medians, %", *FIGURES.values(), "farthest"], lines)


def farthest(values: dict[str, float | None] | None) -> float | None:
    """The difference with the largest absolute value."""
    return max((value for value in (values or {}).values() if value is not None), key=abs, default=None)


def plot(result: Result, file: Path) -> None:
    """The largest difference of each row."""
    groups: dict[str, dict[str, float | None]] = {}
    for number, row in enumerate(result["rows"]):
        for kind, label in (("difference", "against SGLang's client"), ("repeat", "against itself")):
            values = [abs(value) for value in (row[kind] or {}).values() if value is not None]
            if values:
                groups.setdefault(str(number + 1), {})[label] = max(values)
    panel = plots.bars(groups, "", "farthest figure, %", kind="row of the table", bound=3.0)
    picture.draw(result, file, "bench_serving against SGLang's client, and against itself", [panel])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--sglang-client", type=Path, help="folder of the package sglang, e.g. an unpacked wheel")
    parser.add_argument("--sglang-python", default=sys.executable, help="interpreter with the dependencies of SGLang's client")
    parser.add_argument("--rounds", type=positive, default=5, help="runs of each client; medians are compared")
    parser.add_argument("--backends", type=names, default=list(BACKENDS))
    parser.add_argument("--servers", type=names, default=list(SERVERS), help=f"some of {','.join(SERVERS)}")
    args = parser.parse_args()
    if unknown := set(args.servers) - set(SERVERS):
        parser.error(f"--servers {','.join(sorted(unknown))}: choose from {', '.join(SERVERS)}")
    if args.sglang_client is None and not args.quick:
        parser.error("--sglang-client FOLDER is required; only --quick runs without it")
    return args


def main() -> None:
    """Measure, record and plot."""
    args = parse()
    record = Record(NAME, KEYS, args.out, args.quick)
    theirs = sglang_client(args.sglang_client.resolve(), args.sglang_python) if args.sglang_client else None
    clients, rounds = (our_client(), theirs), 1 if args.quick else args.rounds
    for name in args.servers:
        with start(name, args.quick) as target:
            measure(record, target, args.backends[:1] if args.quick else args.backends, clients, rounds)
    record.show(render, plot)


if __name__ == "__main__":
    main()
