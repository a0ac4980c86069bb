"""Loading in threads."""

from __future__ import annotations

import threading

import pytest
import torch

from runtime.errors import ConfigError
from runtime.layers.quantization.dense import DENSE
from runtime.layers.quantization.scheme import WeightSlot
from runtime.layers.torch_ops import TorchOps
from runtime.models import weights
from runtime.models.context import ModelContext
from runtime.models.parallel_store import store_in_threads
from runtime.models.weights import WeightTable
from unit.test_linear import Rank


def test_tensors_are_stored_several_at_a_time_and_few_are_made_ahead() -> None:
    barrier, stored, made, ahead = threading.Barrier(3, timeout=30), list[int](), 0, list[int]()

    def store(i: int) -> None:
        barrier.wait()  # passes only if three calls run at once
        stored.append(i)

    def stores():
        nonlocal made
        for i in range(12):
            made += 1
            ahead.append(made - len(stored))
            yield lambda i=i: store(i)

    store_in_threads(stores(), threads=3)
    assert sorted(stored) == list(range(12))
    assert max(ahead) <= 2 * 3 + 1


def test_the_first_error_ends_the_load() -> None:
    begun = list[int]()

    def store(i: int) -> None:
        begun.append(i)
        if i == 3:
            raise ConfigError("tensor 3 is damaged")

    with pytest.raises(ConfigError, match="tensor 3 is damaged"):
        store_in_threads((lambda i=i: store(i) for i in range(1000)), threads=2)
    assert len(begun) < 20


def test_weights_may_be_loaded_inside_inference_mode() -> None:
    with torch.inference_mode():
        table = WeightTable(ModelContext(TorchOps(), torch.float32, torch.device("cpu"), DENSE, Rank(0, 1)))
        layer = table.linear({"a": 4, "b": 2}, 3)
        table.load({"a.weight": torch.ones(4, 3), "b.weight": torch.zeros(2, 3)}.items())
    assert layer.weight.sum() == 12


@pytest.mark.parametrize("limit", [0, weights.SMALL_MODEL])
def test_small_models_are_stored_by_the_calling_thread(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(weights, "SMALL_MODEL", limit)
    table = WeightTable(ModelContext(TorchOps(), torch.float32, torch.device("cpu"), DENSE, Rank(0, 1)))
    threads = list[threading.Thread]()
    table.add("a", WeightSlot((2,), (slice(0, 2),), lambda rows: threads.append(threading.current_thread())))
    table.load({"a": torch.ones(2)}.items())
    assert [thread is threading.current_thread() for thread in threads] == [limit > 0]


@pytest.mark.parametrize("one_core_each", [False, True])
def test_operations_may_keep_to_their_thread(one_core_each: bool) -> None:
    before, seen = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    try:
        store_in_threads((lambda: seen.append(torch.get_num_threads()) for _ in range(4)), 2, one_core_each)
        assert (seen, torch.get_num_threads()) == ([1 if one_core_each else 3] * 4, 3)
    finally:
        torch.set_num_threads(before)
