"""Reads and stores a checkpoint's tensors in several threads, so that page faults, conversions and copies overlap."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch

MAX_THREADS = 16


def store_in_threads(stores: Iterable[Callable[[], object]], threads: int | None = None, one_core_each: bool = False) -> None:
    """Make all calls of `stores`, several at a time; they must write to different memory.

    Takes at most two pending calls per thread from the iterable, so that it can make tensors lazily. Raises the first
    error, once the calls under way have ended.

    Args:
        threads: by default one per core of this process, at most 16. One is the calling thread.
        one_core_each: whether torch operations run in the calling thread only, instead of starting one thread per core.
    """
    threads = threads or min(len(os.sched_getaffinity(0)), MAX_THREADS)
    if threads == 1:
        for store in stores:
            store()
        return
    inference = torch.is_inference_mode_enabled()  # thread-local, so each thread must set it

    def run(store: Callable[[], object]) -> None:
        with torch.inference_mode(inference):
            store()

    with ThreadPoolExecutor(threads, "talon::load") as pool, one_core_per_operation() if one_core_each else nullcontext():
        begun = deque[Future[None]]()
        try:
            for store in stores:
                begun.append(pool.submit(run, store))
                if len(begun) >= 2 * threads:
                    begun.popleft().result()
            while begun:
                begun.popleft().result()
        finally:
            for rest in begun:
                rest.cancel()


@contextmanager
def one_core_per_operation() -> Iterator[None]:
    """Within this context torch operations use one core; so do those of other threads that run their first operation in it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
