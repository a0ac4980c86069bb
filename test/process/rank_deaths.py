"""Kills, stops or spoils one of two ranks while a request is open, and reports what became of the server.

    PYTHONPATH=python:test python -m process.rank_deaths

does it in every way, for ranks of one host, of two nodes, and of Ray, and prints one JSON line each.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import psutil
from benchmark.ports import free_port

from process import rank_faults
from process.fake import Server, dummy_model, serving

Place = Literal["host", "nodes", "ray"]
Role = Literal["scheduler", "worker-1"]
"""Rank 0, rank 1."""
PATIENCE = 60.0
FLAGS = ("--tp-size", "2", "--cpu-threads", "1", "--skip-server-warmup", "--dtype", "float32")
SIGNALS = ("SIGKILL", "SIGSTOP")
SPOILED = ("loop", "oom")
"""Behaviours of `rank_faults`."""
ACTOR = "RankHost"


@dataclass
class Outcome:
    """What one fault led to.

    Attributes:
        answered_s, ended_s: seconds from the fault until the open request had its error, and until all processes had ended. The fault of
            a rank that is spoiled begins with the request, a few steps before.
        failed: whether the request ended with an error.
        statuses: exit statuses of the server, and of node 1.
        orphans: processes that are left, without Ray's own, which end with its cluster.
        left: files that are left, of shared memory too; the logs of Ray are not the server's.
    """

    place: Place
    role: Role
    fault: str
    answered_s: float
    ended_s: float
    failed: bool
    statuses: list[int]
    orphans: list[str]
    left: list[str]

    @property
    def clean(self) -> bool:
        """Whether the request failed, the exit statuses say so, and nothing is left."""
        return self.failed and not self.orphans and not self.left and set(self.statuses) == {1}


@contextmanager
def two_ranks(model: Path, *flags: str, behaviour: str = "well", ready: bool = True) -> Iterator[Server]:
    """A server of two ranks on this host."""
    with serving(model, *FLAGS, *flags, behaviour=behaviour, ready=ready, program=rank_faults.__file__) as server:
        yield server


@contextmanager
def two_nodes(
    model: Path, *more: str, behaviour: str = "well", ready: bool = True, host: str = "127.0.0.1"
) -> Iterator[tuple[Server, Server]]:
    """Nodes 0 and 1 on this host, which talk over sockets."""
    flags = ("--nnodes", "2", "--dist-init-addr", f"{host}:{free_port()}", "--random-seed", "3", *more)
    with (
        two_ranks(model, *flags, "--node-rank", "1", behaviour=behaviour, ready=False) as other,
        two_ranks(model, *flags, behaviour=behaviour, ready=ready) as first,
    ):
        yield first, other


@contextmanager
def serving_at(place: Place, model: Path, behaviour: str) -> Iterator[list[Server]]:
    """A server whose ranks are started in this way; a server per node."""
    if place == "nodes":
        with two_nodes(model, behaviour=behaviour) as nodes:
            yield list(nodes)
    elif place == "ray":
        with two_ranks(model, "--distributed-executor-backend", "ray", behaviour=behaviour, ready=False) as server:
            server.wait_ready(180.0)
            yield [server]
    else:
        with two_ranks(model, behaviour=behaviour) as server:
            yield [server]


def strike(model: Path, place: Place, role: Role, fault: str) -> tuple[Outcome, str]:
    """Start a server, let `fault` strike the rank while a request is open, and wait for the end; also what the nodes wrote."""
    with serving_at(place, model, "well" if fault in SIGNALS else f"{fault}:{role}") as servers:
        processes = [child for server in servers for child in psutil.Process(server.process.pid).children(recursive=True)]
        names = {process: " ".join(process.cmdline()).strip()[:200] for process in processes}
        processes = [process for process in processes if not names[process].startswith("ray::") or ACTOR in names[process]]
        shared = shared_memory(processes)
        started = time.monotonic()
        stream = servers[0].stream(400)
        if fault in SIGNALS:
            started = time.monotonic()
            next(p for p in processes if f"talon::{role}" in p.cmdline()[0]).send_signal(signal.Signals[fault])
        assert stream.join(PATIENCE), servers[0].text()
        answered = time.monotonic()
        statuses = [server.process.wait(PATIENCE) for server in servers]
        while (alive := [process for process in processes if runs(process)]) and time.monotonic() < answered + PATIENCE:
            time.sleep(0.05)
        ended = time.monotonic()
        left = [str(file) for server in servers for file in server.folders() if file.name != "ray"]
        left += [file for file in shared if Path(file).exists()]
        failed = any('"error"' in event for event in stream.events)
        seconds = round(answered - started, 1), round(ended - started, 1)
        text = "".join(server.text() for server in servers)
        return Outcome(place, role, fault, *seconds, failed, statuses, [names[process] for process in alive], left), text


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended. One without a parent that ended is a zombie until process 1 reaps it, which may take seconds."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory(processes: list[psutil.Process]) -> set[str]:
    """Files of shared memory that these processes have mapped."""
    return {m.path for p in processes for m in p.memory_maps() if m.path.startswith("/dev/shm/") and Path(m.path).exists()}


def main() -> int:
    """Strike in every way; exit 1 if one was not clean or took too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", nargs="+", choices=get_args(Place), default=list(get_args(Place)))
    parser.add_argument("--seconds", type=float, default=10.0, help="how soon a server must have ended")
    args = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as temp:
        model = dummy_model(Path(temp) / "tiny")
        for place in args.places:
            for role in get_args(Role):
                for fault in (*SIGNALS, *SPOILED, *(["spin"] if role == "scheduler" else [])):
                    outcome, _ = strike(model, place, role, fault)
                    print(json.dumps(asdict(outcome)), flush=True)
                    bad += not outcome.clean or outcome.ended_s > args.seconds
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
