"""CUDA C++ kernels without nvcc: compiled by NVRTC and launched by the driver API, through the bindings that torch installs."""

from __future__ import annotations

import ctypes
import logging
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any

import torch

from runtime.layers.kernels.code_cache import CodeCache
from runtime.layers.kernels.once import once
from runtime.model_files.cache_folder import default_cache_dir

driver: Any = None
nvrtc: Any = None
with suppress(ImportError):  # the CPU build of torch has none
    from cuda.bindings import driver, nvrtc  # pyright: ignore[reportMissingImports]

log = logging.getLogger(__name__)
PORTABLE_CLUSTER = 8
"""Maximum portable cluster size in blocks; larger clusters need an attribute."""


@cache
def available() -> bool:
    """Whether NVRTC can compile a kernel and the driver can load it. The thread must have torch's context."""
    if nvrtc is None:
        return False
    try:
        compile_kernel('extern "C" __global__ void nothing() {}', "nothing", threads=32)
    except RuntimeError as error:  # the bindings raise it for a missing library
        log.warning("NVRTC does not work here (%s): CUDA C++ kernels are not used", error)
        return False
    return True


def on_hopper(x: torch.Tensor) -> bool:
    """Whether CUDA C++ kernels can run on this tensor's device: a GPU with Hopper's instructions."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9 and available()


class Kernel:
    """A compiled kernel, ready to be launched on torch's current stream.

    Attributes:
        clusters_at_once: clusters that the device can run concurrently.
    """

    def __init__(self, function: Any, threads: int, cluster: int, shared_bytes: int) -> None:
        self._function = function
        self._threads = threads
        self._cluster = cluster
        self._shared_bytes = shared_bytes
        self._configs: dict[tuple[int, int, bool], Any] = {}
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function, most, shared_bytes))
        if cluster > PORTABLE_CLUSTER:
            larger = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            check(driver.cuFuncSetAttribute(function, larger, 1))
        self.clusters_at_once: int = check(driver.cuOccupancyMaxActiveClusters(function, self._config(cluster, 0, False)))

    def __call__(self, blocks: int, args: tuple[Any, ...], pdl: bool) -> None:
        """Launch `blocks` blocks, a multiple of the cluster size.

        Args:
            args: the kernel's parameters: tensors, for which it gets pointers, null for None; integers, which become int32; and values of
                `tensor_map` and ctypes.
            pdl: start before the previous kernel has ended (programmatic dependent launch).
        """
        stream = torch.cuda.current_stream().cuda_stream
        key = (blocks, stream, pdl)
        config = self._configs.get(key)
        if config is None:
            config = self._configs[key] = self._config(*key)
        held = [_parameter(arg) for arg in args]
        addresses = [arg.getPtr() if hasattr(arg, "getPtr") else ctypes.addressof(arg) for arg in held]
        parameters = (ctypes.c_void_p * len(addresses))(*addresses)  # names keep both alive during the call
        check(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(parameters), 0))

    def _config(self, blocks: int, stream: int, pdl: bool) -> Any:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = stream
        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = self._cluster, 1, 1
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [cluster, early] if pdl else [cluster]
        config.numAttrs = len(config.attrs)
        return config


@once
def compile_kernel(source: str, name: str, *, threads: int, cluster: int = 1, shared_bytes: int = 0) -> Kernel:
    """Compile a program for the current device and load one of its kernels. The thread must have torch's context.

    Args:
        source: CUDA C++; the kernel is `extern "C"`.
        threads: threads per block.
        cluster: blocks per cluster.
        shared_bytes: dynamic shared memory per block.

    Raises:
        RuntimeError: the program does not compile, or the driver rejects it; the message includes the compiler's log.
    """
    module = check(driver.cuModuleLoadData(compile_program(source)))
    return Kernel(check(driver.cuModuleGetFunction(module, name.encode())), threads, cluster, shared_bytes)


@once
def compile_program(source: str) -> bytes:
    """The machine code (cubin) of a CUDA C++ program: from the cache on disk, or compiled and stored there; needs no GPU."""
    # Lambdas with a parameter `auto` have no execution space specifier.
    options = b"--gpu-architecture=sm_90a", b"--std=c++17", b"--device-as-default-execution-space"
    text, code_cache = source.encode(), _code_cache()
    if code_cache is None:
        return _run_nvrtc(text, options)
    return code_cache.code((text, *options, _compiler()), lambda: _run_nvrtc(text, options))


@cache
def _code_cache() -> CodeCache | None:
    """This user's cache; None without a home directory."""
    with suppress(RuntimeError):
        return CodeCache(default_cache_dir() / "cuda")
    return None


@cache
def _compiler() -> bytes:
    """The versions of NVRTC and of torch, which determines the patch release of NVRTC."""
    status, *version = nvrtc.nvrtcVersion()
    check((status,))
    return f"NVRTC {version}, torch {torch.__version__}".encode()


def _run_nvrtc(source: bytes, options: tuple[bytes, ...]) -> bytes:
    program = check(nvrtc.nvrtcCreateProgram(source, b"kernel.cu", 0, [], []))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), list(options))
        # NVRTC writes in place, so allocate new `bytes`: `b" " * 1` would be the interpreter's shared object.
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            text = bytes(check(nvrtc.nvrtcGetProgramLogSize(program)))
            check(nvrtc.nvrtcGetProgramLog(program, text))
            raise RuntimeError(f"a CUDA kernel does not compile ({result!r}):\n{text.rstrip(bytes(1)).decode(errors='replace')}")
        code = bytes(check(nvrtc.nvrtcGetCUBINSize(program)))
        check(nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        check(nvrtc.nvrtcDestroyProgram(program))


@lru_cache(maxsize=1 << 15)
def tensor_map(address: int, sizes: tuple[int, ...], dtype: torch.dtype, box: tuple[int, ...]) -> Any:
    """A TMA descriptor of a contiguous tensor; elements outside it read as zero. Boxes with rows of 64 or 128 bytes are swizzled.

    Args:
        address: address of the first element.
        sizes: sizes of the tensor, innermost dimension first.
        dtype: bfloat16, float16, e4m3, uint8 or int64.
        box: sizes of a box in the same order; at most 256 each.
    """
    strides, bytes_ = [], dtype.itemsize
    for size in sizes[:-1]:
        bytes_ *= size
        strides.append(driver.cuuint64_t(bytes_))
    kind = driver.CUtensorMapDataType
    kinds = {
        torch.bfloat16: kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.float8_e4m3fn: kind.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        torch.uint8: kind.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        torch.int64: kind.CU_TENSOR_MAP_DATA_TYPE_INT64,
    }
    swizzle = driver.CUtensorMapSwizzle
    swizzles = {64: swizzle.CU_TENSOR_MAP_SWIZZLE_64B, 128: swizzle.CU_TENSOR_MAP_SWIZZLE_128B}
    return check(
        driver.cuTensorMapEncodeTiled(
            kinds[dtype],
            len(sizes),
            address,
            [driver.cuuint64_t(size) for size in sizes],
            strides,
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1) for _ in sizes],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.get(box[0] * dtype.itemsize, swizzle.CU_TENSOR_MAP_SWIZZLE_NONE),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def _parameter(value: Any) -> Any:
    if value is None or isinstance(value, torch.Tensor):
        return ctypes.c_void_p(None if value is None else value.data_ptr())
    return _int32(value) if isinstance(value, int) else value


@cache
def _int32(value: int) -> ctypes.c_int:
    return ctypes.c_int(value)


def check(result: tuple[Any, ...]) -> Any:
    """The result of a call to the bindings, without its status.

    Raises:
        RuntimeError: the status is not success.
    """
    status, *values = result
    if status.value != 0:
        raise RuntimeError(f"a CUDA call failed: {status!r}")
    return values[0] if values else None
