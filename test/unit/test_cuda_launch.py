"""The parameters of a CUDA kernel, as far as the host prepares them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.layers.kernels import cuda_driver


def test_a_kernel_gets_pointers_to_tensors_and_its_numbers_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[Any]()

    def launch(config: Any, function: Any, parameters: int, extra: int) -> tuple[int]:
        places = (ctypes.c_void_p * 6).from_address(parameters)
        kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_float, ctypes.c_uint64, ctypes.c_int32)
        found.extend(kind.from_address(place).value for kind, place in zip(kinds, places, strict=True))
        return (0,)

    monkeypatch.setattr(cuda_driver, "driver", SimpleNamespace(cuLaunchKernelEx=launch))
    monkeypatch.setattr(cuda_driver, "check", lambda result: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    kernel: Any = object.__new__(cuda_driver.Kernel)  # __init__ needs a GPU
    kernel._configs, kernel._function = {(3, 0, True): "config"}, None
    tensor, wide = torch.zeros(4), ctypes.c_uint64(1 << 40)
    kernel(3, (tensor, None, -7, ctypes.c_float(0.5), wide, tensor.shape[0]), True)
    assert found == [tensor.data_ptr(), None, -7, 0.5, 1 << 40, 4]
