"""Values that are created once: threads that request the same value wait for the first of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import partial, wraps
from typing import Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class Once(Generic[T]):
    """Values by key, created in the first thread that requests them. If creation raises, nothing is stored."""

    def __init__(self) -> None:
        self._made: dict[Hashable, T] = {}
        self._locks: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `key`, created by `make` in this thread or another."""
        if key not in self._made:
            with self._locks.setdefault(key, threading.Lock()):
                if key not in self._made:
                    self._made[key] = make()
        return self._made[key]


def once(function: Callable[P, T]) -> Callable[P, T]:
    """Like `functools.cache`, but threads with the same arguments wait for one call instead of calling the function several times."""
    values = Once[T]()

    @wraps(function)
    def cached(*args: P.args, **kwargs: P.kwargs) -> T:
        return values.get((args, tuple(sorted(kwargs.items()))), partial(cast("Callable[..., T]", function), *args, **kwargs))

    return cached
