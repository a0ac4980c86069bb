"""Reads and stores the tensors of a checkpoint in threads, so that page faults, conversions and copies overlap."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch

MAX_THREADS = 16


def store_in_threads(stores: Iterable[Callable[[], object]], threads: int | None = None, one_core_each: bool = False) -> None:
    """Call every one of `stores`, several at a time; they write to different memory.

    At most two for each thread are taken from the iterable before they have ended, so that it may make tensors as they
    are wanted. Raises the first error, after the calls that have begun.

    Args:
        threads: one for each core of this process, up to 16, by default.
        one_core_each: whether an operation of torch keeps to the thread that calls it, where it else starts one for each core.
    """
    threads = threads or min(len(os.sched_getaffinity(0)), MAX_THREADS)
    inference = torch.is_inference_mode_enabled()  # of this thread alone

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
    """Operations of torch use one core, those of other threads too if their first one falls into this time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
