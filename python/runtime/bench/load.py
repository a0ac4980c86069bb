"""When requests are sent: open loop (Poisson arrivals), closed loop (a concurrency limit), or both."""

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
    """Requests per second (inf sends all at once) and the concurrency limit (None for no limit)."""

    request_rate: float
    max_concurrency: int | None
    seed: int


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Arrival times in seconds after the start; the gaps are exponential with mean 1 / `rate`.

    SGLang's client draws the same gaps from the same seed for a dataset of texts, so both clients send the same load.
    """
    if rate == float("inf"):
        return [0.0] * count
    gaps = np.random.RandomState(seed).exponential(1.0 / rate, size=count)
    return [0.0, *np.cumsum(gaps[:-1]).tolist()]


async def run_load(
    requests: Sequence[BenchRequest], load: Load, send: Send, progress: Callable[[], object] = lambda: None
) -> tuple[list[RequestRecord], float]:
    """Send each request at its arrival time.

    Returns:
        One record per request, in order, and the seconds from the first arrival to the last answer. If this task is cancelled, the
        records of the requests that have ended, and the seconds until then.

    Raises:
        CancelledError: this task is cancelled before any request has ended.
    """
    gate = asyncio.Semaphore(load.max_concurrency or max(len(requests), 1))

    async def one(request: BenchRequest) -> RequestRecord:
        async with gate:
            record = await send(request)
        progress()
        return record

    start = time.perf_counter()  # the event loop's clock may have a resolution of milliseconds
    tasks: list[asyncio.Task[RequestRecord]] = []
    try:
        for request, at in zip(requests, arrivals(len(requests), load.request_rate, load.seed), strict=True):
            # Wait relative to the start, not to the previous request, so that one late wake-up does not delay the rest.
            if (wait := start + at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(request)))
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks = [task for task in tasks if not task.cancelled()]
        if not tasks:
            raise
    return [task.result() for task in tasks], time.perf_counter() - start
