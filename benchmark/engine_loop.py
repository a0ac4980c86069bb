"""The scheduler and its worker in one process, without sockets and text, driven step by step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec import structs

from runtime import log as logging_setup
from runtime.bench.metrics import Figures, percentiles
from runtime.config.flag_parser import parse
from runtime.config.runtime_config import RuntimeConfig
from runtime.entrypoints.child import build_worker
from runtime.entrypoints.prepare import prepare
from runtime.managers.messages import AbortReq, GenerateReq, ToDetokenizer, TokensOutBatch, ToScheduler
from runtime.managers.scheduler import Scheduler
from runtime.sampling_params import SamplingParams


def build(flags: Sequence[str]) -> tuple[RuntimeConfig, Any]:
    """The configuration and the worker of a server with these flags."""
    args = parse([*flags]).args
    logging_setup.setup(args.log_level, "talon::bench")
    config, model_config = prepare(args)
    return config, build_worker(config, model_config)


GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class _Times:
    started: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """Latencies of the requests of a closed loop, in seconds, and their tokens."""

    seconds: float
    tokens: int
    ttfts: list[float]
    tpots: list[float]

    @staticmethod
    def together(runs: Sequence[Served]) -> Served:
        """Several runs merged into one."""
        ttfts, tpots = [one for run in runs for one in run.ttfts], [one for run in runs for one in run.tpots]
        return Served(sum(run.seconds for run in runs), sum(run.tokens for run in runs), ttfts, tpots)

    def figures(self) -> Figures:
        """The figures, with the names and definitions of `bench_serving`."""
        rate = self.tokens / self.seconds
        return {
            "duration": self.seconds,
            "output_throughput": rate,
            **percentiles("ttft", self.ttfts),
            **percentiles("tpot", self.tpots),
        }


class EngineLoop:
    """Decoding requests of random tokens on a worker, until `stop`.

    Attributes:
        tokens: number of tokens generated so far.
    """

    def __init__(self, config: RuntimeConfig, worker: Any, overlap: bool) -> None:
        self._inbox: deque[ToScheduler] = deque()
        scheduling = structs.replace(config.scheduler, overlap=overlap)
        self._scheduler = Scheduler(scheduling, config.cache, worker, (), self._receive, self._sent)
        self._times: dict[str, _Times] = {}
        self.tokens = 0

    def start(
        self, requests: int, prompt_len: int, room: int, sampling: SamplingParams = GREEDY, other: SamplingParams | None = None
    ) -> None:
        """Admit `requests` and run until each has a few tokens; they may generate `room` tokens. If `other` is given, it is used for every
        second one.
        """
        for i in range(requests):
            self._ask(i, prompt_len, room, other if other is not None and i % 2 else sampling)
        while min(times.tokens for times in self._times.values()) < 8:
            self._scheduler.step()

    def time_steps(self, requests: int, steps: int) -> Figures:
        """The time of a step, from the faster of two runs of `steps`, and the tokens that each of the `requests` gets in one."""
        self.run(8)
        before = self.tokens
        seconds = min(self.run(steps), self.run(steps))
        return {"step_ms": seconds * 1e3, "tokens_per_request_and_step": (self.tokens - before) / (2 * steps * requests)}

    def serve(self, requests: int, concurrency: int, prompt_len: int, output_len: int) -> Served:
        """Run a closed loop of `concurrency` clients until `requests` are answered."""
        self._times.clear()
        self.tokens = 0
        started, submitted = time.perf_counter(), 0
        while True:
            alive = sum(times.tokens < output_len for times in self._times.values())
            while submitted < requests and alive < concurrency:
                self._ask(submitted, prompt_len, output_len, GREEDY)
                submitted, alive = submitted + 1, alive + 1
            if not alive:
                break
            self._scheduler.step()
        while not self._scheduler.idle:
            self._scheduler.step()
        seconds, all_times = time.perf_counter() - started, self._times.values()
        tpots = [(t.last - t.first) / (t.tokens - 1) for t in all_times]
        return Served(seconds, self.tokens, [t.first - t.started for t in all_times], tpots)

    def _ask(self, number: int, prompt_len: int, output_len: int, sampling: SamplingParams) -> None:
        ids = np.random.default_rng(number).integers(10, self._scheduler.limits.vocab_size - 10, prompt_len).tolist()
        sampling = structs.replace(sampling, max_new_tokens=output_len, ignore_eos=True)
        self._times[str(number)] = _Times(time.perf_counter())
        self._inbox.append(GenerateReq(rid=str(number), input_ids=ids, sampling=sampling, seed=number, stream=True))

    def run(self, steps: int) -> float:
        """Run `steps` steps and return the mean seconds per step.

        Raises:
            RuntimeError: no request is left, e.g. because a step failed.
        """
        _wait()
        started = time.perf_counter()
        for _ in range(steps):
            self._scheduler.step()
        _wait()
        if self._scheduler.idle:
            raise RuntimeError("no request is left to decode: they ended too early, or a step failed")
        return (time.perf_counter() - started) / steps

    def stop(self) -> None:
        """End all requests and read the steps in flight."""
        self._inbox.append(AbortReq(all=True))
        while self._inbox or not self._scheduler.idle:
            self._scheduler.step()

    def _receive(self, wait: float) -> ToScheduler | None:
        return self._inbox.popleft() if self._inbox else None

    def _sent(self, message: ToDetokenizer) -> None:
        if not isinstance(message, TokensOutBatch):
            return
        now = time.perf_counter()
        for out in message.outs:
            times = self._times[out.rid]
            times.first = times.first or now
            times.last = now
            times.tokens += len(out.token_ids)
            self.tokens += len(out.token_ids)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
