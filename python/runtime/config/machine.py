"""Facts about this machine: cores, memory, CUDA devices and kernel packages, found without torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from runtime.config.attention_caps import ATTENTION_CAPS
from runtime.config.host_memory import CGROUPS, host_memory, text_of

_CC_MAJOR, _CC_MINOR, _NUM_SMS, _MEMORY_KHZ, _BUS_BITS = 75, 76, 16, 36, 37
"""CU_DEVICE_ATTRIBUTE_* of the CUDA driver API: COMPUTE_CAPABILITY_MAJOR and _MINOR, MULTIPROCESSOR_COUNT, MEMORY_CLOCK_RATE,
GLOBAL_MEMORY_BUS_WIDTH."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device.

    Attributes:
        name: its name in the driver.
        capability: compute capability, major and minor.
        memory: bytes.
        num_sms: number of SMs; 0 if the driver does not report it.
        bandwidth: memory bandwidth in bytes per second; 0 if the driver does not report it.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    num_sms: int = 0
    bandwidth: int = 0


KERNEL_PACKAGES = tuple(caps.package for caps in ATTENTION_CAPS.values() if caps.package is not None)
"""Packages with attention kernels."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The facts about the machine that `resolve` needs.

    Attributes:
        cores: CPU cores that this process may use, at least 1.
        memory: bytes of main memory that this process may use.
        gpus: visible CUDA devices (CUDA_VISIBLE_DEVICES), in the driver's order.
        packages: the installed `KERNEL_PACKAGES`.
        cpu: the name of the CPU.
        threads: threads per operation by OMP_NUM_THREADS; None if it is not set.
        nvcc: whether FlashInfer finds nvcc and a C++ compiler, or its kernels are installed.
    """

    cores: int
    memory: int
    gpus: tuple[Gpu, ...]
    packages: frozenset[str]
    cpu: str = "CPU"
    threads: int | None = None
    nvcc: bool = True


def probe() -> MachineFacts:
    """Find the facts about this machine. Never fails: a fact that cannot be determined counts as absent."""
    packages = frozenset(name for name in KERNEL_PACKAGES if importlib.util.find_spec(name) is not None)
    memory = host_memory().total
    return MachineFacts(cores=_cores(), memory=memory, gpus=_gpus(), packages=packages, cpu=_cpu(), threads=_threads(), nvcc=_nvcc())


def ask_for_steady_sums() -> None:
    """Let MKL sum a row of a float32 GEMM in the same order for any number of rows; call it before the first GEMM of this process.

    Only on Intel processors without AVX-512, where it does not do so unasked. On others `layers/attention/stable_shapes.py` finds shapes
    for which it does, and small GEMMs would be slower.
    """
    cpu = text_of(Path("/proc/cpuinfo"))
    if "GenuineIntel" in cpu and "avx512f" not in cpu:
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def _cores() -> int:
    allowed = len(os.sched_getaffinity(0))
    quota, _, period = text_of(CGROUPS / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        allowed = min(allowed, -(-int(quota) // int(period)))
    return max(1, allowed)


def _nvcc() -> bool:
    """Source of the places: `get_cuda_path` of flashinfer/jit/cpp_ext.py."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return True
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which(f"{home}/bin/nvcc") if home else shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    return found is not None and shutil.which(os.environ.get("CXX", "c++")) is not None


def _threads() -> int | None:
    outermost = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(outermost) or None if outermost.isdecimal() else None


def _cpu() -> str:
    lines = text_of(Path("/proc/cpuinfo")).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def _gpus() -> tuple[Gpu, ...]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_gpu(cuda, index) for index in range(count.value))


def _gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    device = ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    name = ctypes.create_string_buffer(128)
    cuda.cuDeviceGetName(name, len(name), device)
    memory = ctypes.c_size_t()
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)

    def ask(attribute: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        return value.value

    bandwidth = 2 * 1000 * ask(_MEMORY_KHZ) * ask(_BUS_BITS) // 8  # two transfers per clock
    return Gpu(name.value.decode(errors="replace"), (ask(_CC_MAJOR), ask(_CC_MINOR)), memory.value, ask(_NUM_SMS), bandwidth)
