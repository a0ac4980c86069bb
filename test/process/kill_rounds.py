"""Kills one process of a server in one phase of its life, and reports what became of the rest.

    PYTHONPATH=python:test python -m process.kill_rounds --rounds 50

kills the HTTP process, the scheduler and the detokenizer in every phase and prints one JSON line per process and phase.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import httpx
import psutil

from process.fake import Server, dummy_model, serving
from process.rank_deaths import runs

Victim = Literal["http", "scheduler", "detokenizer"]
Phase = Literal["starting", "ready", "prefill", "decode", "draining"]
VICTIMS: tuple[Victim, ...] = get_args(Victim)
PHASES: tuple[Phase, ...] = get_args(Phase)
PATIENCE = 60.0
STEP_SECONDS = "0.03"
PROMPT = list(range(2, 402))  # 25 chunks of 16 tokens


@dataclass
class Round:
    """What one kill led to.

    Attributes:
        status: exit status of the server; of a killed HTTP process minus the signal.
        noticed: seconds until the server said so in its log, or until the last child of a killed HTTP process was gone.
        orphans: children alive after the end.
        files: what is left in the temporary folder.
    """

    status: int
    noticed: float
    orphans: int
    files: int

    @property
    def clean(self) -> bool:
        """Whether the exit status says that it failed, and nothing is left."""
        return self.status != 0 and self.orphans == self.files == 0


def kill(model: Path, victim: Victim, phase: Phase, rng: random.Random) -> Round:
    """Start a server, bring it into `phase`, and kill `victim`."""
    behaviour = "slow-load" if phase == "starting" else STEP_SECONDS
    flags = ("--chunked-prefill-size", "16", "--max-prefill-tokens", "16")
    with serving(model, *flags, behaviour=behaviour, ready=phase != "starting") as server:
        children = _reach(server, phase, rng)
        process = server.process if victim == "http" else server.child(f"talon::{victim}")
        started = time.monotonic()
        process.send_signal(signal.SIGKILL)
        noticed = _gone(children) - started if victim == "http" else _said(server, f"the {victim} process died") - started
        status = server.process.wait(PATIENCE)
        return Round(status, round(noticed, 3), sum(map(runs, children)), len(server.folders()))


def _reach(server: Server, phase: Phase, rng: random.Random) -> list[psutil.Process]:
    parent = psutil.Process(server.process.pid)
    if phase == "starting":
        _wait(lambda: len(parent.children()) == 2 and all("talon::" in " ".join(c.cmdline()) for c in parent.children()))
        time.sleep(rng.uniform(0.0, 1.5))
        return parent.children()
    children = parent.children()
    if phase == "prefill":
        threading.Thread(target=_ask, args=(server.url,), daemon=True).start()
        time.sleep(rng.uniform(0.1, 0.6))
    if phase in ("decode", "draining"):
        server.stream(400)
        time.sleep(rng.uniform(0.0, 0.3))
    if phase == "draining":
        server.process.send_signal(signal.SIGTERM)
        _wait(lambda: "shutting down" in server.text())
    return children


def _ask(url: str) -> None:
    try:
        httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 50, "ignore_eos": True}, timeout=PATIENCE, verify=False)
    except httpx.HTTPError:
        return


def _said(server: Server, text: str) -> float:
    _wait(lambda: text in server.text())
    return time.monotonic()


def _gone(children: list[psutil.Process]) -> float:
    _wait(lambda: not any(map(runs, children)))
    return time.monotonic()


def _wait(true: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


def main() -> int:
    """Run all rounds; exit 1 if one was not clean or was noticed late."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="kills of each process in each phase")
    parser.add_argument("--seconds", type=float, default=1.0, help="how soon a kill must be noticed")
    args = parser.parse_args()
    rng, bad = random.Random(0), 0
    with tempfile.TemporaryDirectory() as temp:
        model = dummy_model(Path(temp) / "tiny")
        for victim in VICTIMS:
            for phase in PHASES:
                rounds = [kill(model, victim, phase, rng) for _ in range(args.rounds)]
                wrong = [asdict(one) for one in rounds if not one.clean or one.noticed > args.seconds]
                slowest = max(one.noticed for one in rounds)
                row = {"victim": victim, "phase": phase, "rounds": len(rounds), "slowest_s": slowest, "wrong": wrong}
                print(json.dumps(row), flush=True)
                bad += len(wrong)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
