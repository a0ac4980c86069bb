"""The scheduler and its worker in one process, without sockets and text: the server's own loop, driven step by step."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
import torch
from msgspec import structs

from runtime.managers.io_struct import AbortReq, GenerateReq, ToDetokenizer, TokensOutBatch, ToScheduler
from runtime.managers.scheduler import Scheduler
from runtime.sampling_params import SamplingParams
from runtime.server_args import RuntimeConfig


class EngineLoop:
    """Requests of random tokens on a worker, all decoding, until told to stop.

    Attributes:
        tokens: generated so far, by all.
    """

    def __init__(self, config: RuntimeConfig, worker: Any, overlap: bool) -> None:
        self._inbox: deque[ToScheduler] = deque()
        config = structs.replace(config, overlap=overlap)
        self._scheduler = Scheduler(config, worker, (), lambda wait: self._inbox.popleft() if self._inbox else None, self._sent)
        self._first: dict[str, int] = {}
        self.tokens = 0

    def start(self, requests: int, prompt_len: int, room: int) -> None:
        """Let `requests` in and run until each has a few tokens; they end after `room` tokens."""
        sampling = SamplingParams(temperature=0.0, max_new_tokens=room, ignore_eos=True)
        for i in range(requests):
            ids = np.random.default_rng(i).integers(10, self._scheduler.limits.vocab_size - 10, prompt_len).tolist()
            self._first[str(i)] = 0
            self._inbox.append(GenerateReq(rid=str(i), input_ids=ids, sampling=sampling, seed=i, stream=True))
        while min(self._first.values()) < 8:
            self._scheduler.step()

    def run(self, steps: int) -> float:
        """Run so many steps; returns seconds of one."""
        _wait()
        started = time.perf_counter()
        for _ in range(steps):
            self._scheduler.step()
        _wait()
        return (time.perf_counter() - started) / steps

    def stop(self) -> None:
        """End all requests and read what is in flight."""
        self._inbox.append(AbortReq(all=True))
        while self._inbox or not self._scheduler.idle:
            self._scheduler.step()

    def _sent(self, message: ToDetokenizer) -> None:
        if isinstance(message, TokensOutBatch):
            for out in message.outs:
                self._first[out.rid] += len(out.token_ids)
                self.tokens += len(out.token_ids)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
