"""Reads and stores the tensors of a checkpoint in threads, so that page faults, conversions and copies overlap."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

MAX_THREADS = 16


def store_in_threads(stores: Iterable[Callable[[], object]], threads: int | None = None) -> None:
    """Call every one of `stores`, several at a time; they write to different memory.

    At most two for each thread are taken from the iterable before they have ended, so that it may make tensors as they
    are wanted. Raises the first error, after the calls that have begun.

    Args:
        threads: one for each core of this process, up to 16, by default.
    """
    cores, each = len(os.sched_getaffinity(0)), torch.get_num_threads()
    threads = threads or min(cores, MAX_THREADS)
    inference = torch.is_inference_mode_enabled()  # of this thread alone

    def run(store: Callable[[], object]) -> None:
        with torch.inference_mode(inference):
            store()

    with ThreadPoolExecutor(threads, "talon::load") as pool:
        begun = deque[Future[None]]()
        torch.set_num_threads(max(1, cores // threads))  # a copy in each of them would start as many as there are cores
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
            torch.set_num_threads(each)
