"""Random kills, aborts and bad requests against servers of two ranks on the CPU: every request gets an answer, and nothing is lost.

    PYTHONPATH=python:test python -m process.rank_storm --rounds 200

prints one JSON line: how many rounds of each kind ran, and what went wrong.
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
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil

from process.fake import Server, dummy_model
from process.rank_deaths import PATIENCE, two_ranks

KILL_SHARE = 0.1
CLIENTS = 4
BAD: tuple[dict[str, Any], ...] = (
    {"prompt": [5], "max_tokens": -1},
    {"prompt": [5], "temperature": "hot"},
    {"prompt": [99999999]},
    {"prompt": [5] * 5000},
    {"prompt": [5], "top_logprobs": 3, "logprobs": 900},
    {"nonsense": True},
)


class Traffic:
    """Clients that ask without a pause; every request must end: with an answer, or with an error once the server is gone.

    Attributes:
        silent: requests that got no end within `PATIENCE`.
        answered: requests that ended.
    """

    def __init__(self, url: str, rng: random.Random) -> None:
        self.silent = self.answered = 0
        self._url, self._rng, self._done = url, rng, threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let open requests end."""
        self._done.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            self.silent += thread.is_alive()

    def _ask(self) -> None:
        while not self._done.is_set():
            body = {"prompt": [self._rng.randrange(2, 1000) for _ in range(self._rng.randint(1, 60))], "ignore_eos": True}
            body |= {"max_tokens": self._rng.randint(1, 60), "stream": self._rng.random() < 0.5, "temperature": self._rng.choice([0, 1])}
            try:
                httpx.post(f"{self._url}/v1/completions", json=body, timeout=PATIENCE, verify=False)
            except httpx.TimeoutException:
                self.silent += 1
            except httpx.HTTPError:  # the server is gone: an answer too
                time.sleep(0.1)
            self.answered += 1


def abort(server: Server, rng: random.Random) -> str:
    """Leave a stream after a part of it, or abort all requests."""
    if rng.random() < 0.3:
        done = httpx.post(f"{server.url}/abort_request", json={"abort_all": True}, timeout=PATIENCE, verify=False)
        return "" if done.status_code == 200 else f"abort: {done.text}"
    body = {"prompt": [5, 6, 7], "max_tokens": 200, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE, verify=False) as response:
        for count, _ in enumerate(response.iter_lines()):
            if count > rng.randint(0, 20):
                break
    return ""


def ask_badly(server: Server, rng: random.Random) -> str:
    """A request that must be refused by its status."""
    done = httpx.post(f"{server.url}/v1/completions", json=rng.choice(BAD), timeout=PATIENCE, verify=False)
    return "" if 400 <= done.status_code < 500 else f"bad request: {done.status_code} {done.text}"


def kill(server: Server, rng: random.Random) -> str:
    """Kill or stop one rank; the server must end with a failure and leave nothing."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    victim, number = rng.choice(("worker-1", "talon::scheduler")), rng.choice((signal.SIGKILL, signal.SIGSTOP))
    server.child(victim).send_signal(number)
    status = server.process.wait(PATIENCE)
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    left = server.folders()
    return "" if status == 1 and not alive and not left else f"{victim}: status {status}, {len(alive)} orphans, files {left}"


def leaked(server: Server) -> str:
    """Whether pages or rows are still held when nothing runs."""
    deadline = time.monotonic() + PATIENCE
    while (state := server.state())["num_running_reqs"] or state["num_queue_reqs"] or state["num_used_tokens"]:
        if time.monotonic() > deadline:
            return f"held: {state['num_used_tokens']} tokens, {state['num_running_reqs']} requests"
        time.sleep(0.05)
    return ""


def storm(rounds: int, seed: int = 0, kill_share: float = KILL_SHARE) -> dict[str, Any]:
    """Run random rounds; a killed server is replaced by a new one."""
    rng, wrong, done, answered = random.Random(seed), list[str](), Counter[str](), 0
    with tempfile.TemporaryDirectory() as temp:
        model = dummy_model(Path(temp) / "tiny")
        while done.total() < rounds:
            with ExitStack() as stack:
                server = stack.enter_context(two_ranks(model))
                traffic, alive = Traffic(server.url, random.Random(rng.random())), True
                while alive and done.total() < rounds:
                    alive = rng.random() >= kill_share
                    event = rng.choice((abort, ask_badly)) if alive else kill
                    done[event.__name__] += 1
                    wrong += filter(None, [event(server, random.Random(rng.random()))])
                traffic.end()
                wrong += ["a request got no answer"] * traffic.silent
                answered += traffic.answered
                if alive:
                    wrong += filter(None, [leaked(server)])
    return {"rounds": dict(done), "answered": answered, "wrong": wrong}


def main() -> int:
    """Run the storm; exit 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    outcome = storm(args.rounds, args.seed)
    print(json.dumps(outcome))
    return 1 if outcome["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
