"""When each request is sent: open loop by a Poisson process, closed loop by a limit on how many are under way, or both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.bench.records import BenchRequest, RequestRecord

Send = Callable[[BenchRequest], Awaitable[RequestRecord]]


@dataclass(frozen=True, slots=True)
class Load:
    """How hard to press: requests a second (inf: all at once) and most under way (None: no limit)."""

    request_rate: float
    max_concurrency: int | None
    seed: int


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which each request arrives; the gaps are exponential with mean 1 / `rate`.

    They are the draws that SGLang's client makes with the same seed for a dataset of texts, so that one seed is one load in both.
    """
    if rate == float("inf"):
        return [0.0] * count
    gaps = np.random.RandomState(seed).exponential(1.0 / rate, size=count)
    return [0.0, *np.cumsum(gaps[:-1]).tolist()]


async def run_load(
    requests: Sequence[BenchRequest], load: Load, send: Send, progress: Callable[[], object] = lambda: None
) -> tuple[list[RequestRecord], float]:
    """Send every request at its time.

    Returns:
        One record for each request, in order, and the seconds from the first arrival to the last answer.
    """
    gate = asyncio.Semaphore(load.max_concurrency or max(len(requests), 1))

    async def one(request: BenchRequest) -> RequestRecord:
        async with gate:
            record = await send(request)
        progress()
        return record

    start = time.perf_counter()  # an event loop's own clock may count whole milliseconds
    tasks: list[asyncio.Task[RequestRecord]] = []
    for request, at in zip(requests, arrivals(len(requests), load.request_rate, load.seed), strict=True):
        # Against the clock, not the request before: sleeping late once must not slow all that follow.
        if (wait := start + at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(request)))
    records = await asyncio.gather(*tasks)
    return records, time.perf_counter() - start
