"""The device part of the configuration: device, dtype and kernels."""

from __future__ import annotations

import logging
from typing import cast

from runtime.config.attention import resolve_attention
from runtime.config.attention_caps import ATTENTION_CAPS
from runtime.config.device_tuning import log_tuning
from runtime.config.machine import Gpu, MachineFacts
from runtime.config.model_facts import ModelFacts
from runtime.config.runtime_config import DeviceConfig, DeviceKind, DType, KVDType, SamplingName
from runtime.config.server_args import MAX_THREADS, ServerArgs
from runtime.errors import ConfigError

log = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
"""Minimum compute capability: older GPUs have no bfloat16, and neither FA3 nor FlashInfer supports them."""
FP8_CAPABILITY = (8, 9)
"""Minimum compute capability for e4m3 in kernels for 16-bit activations: older GPUs do not have the dtype."""
_SPELLINGS: dict[str, DType] = {"float": "float32", "half": "float16"}


def check_device(args: ServerArgs) -> None:
    """Raise `ConfigError` for values that are invalid on any machine."""
    if args.sampling_backend == "flashinfer":
        raise ConfigError("--sampling-backend flashinfer is not supported. Use triton or pytorch, or leave the flag out.")


def resolve_device(args: ServerArgs, machine: MachineFacts, model: ModelFacts) -> DeviceConfig:
    """Choose device, type and kernels."""
    device = _device(args, machine)
    dtype = _dtype(args, device, model)
    if args.sampling_backend == "triton" and device == "cpu":
        raise ConfigError("--sampling-backend triton needs CUDA. On a CPU use pytorch, or leave the flag out.")
    sampling = args.sampling_backend or ("triton" if device == "cuda" else "pytorch")
    attention = resolve_attention(args.attention_backend, "--attention-backend", device, dtype, machine, model)
    kv_dtype: KVDType = "fp8_e4m3" if args.kv_cache_dtype == "fp8_e4m3" else "auto"
    if kv_dtype != "auto" and not ATTENTION_CAPS[attention].scaled_kv:
        able = " or ".join(name for name, caps in ATTENTION_CAPS.items() if caps.scaled_kv)
        raise ConfigError(f"--kv-cache-dtype {kv_dtype} is not possible with {attention} attention. Use --attention-backend {able}.")
    gpu = machine.gpus[0] if device == "cuda" else None
    if kv_dtype != "auto":
        check_fp8("keys and values", gpu, dtype)
    if args.disable_fp8_activations and device == "cpu":
        raise ConfigError("--disable-fp8-activations has no effect: a CPU never rounds activations to 8 bits. Leave it out.")
    return DeviceConfig(
        device=device,
        dtype=dtype,
        attention_backend=attention,
        kv_cache_dtype=kv_dtype,
        sampling_backend=cast(SamplingName, sampling),
        cpu_threads=args.cpu_threads or _default_threads(args, machine),
        gpu=gpu,
        fp8_activations=not args.disable_fp8_activations,
    )


def check_fp8(what: str, gpu: Gpu | None, dtype: DType) -> None:
    """Raise `ConfigError` if kernels of this GPU cannot read `what` in fp8."""
    if gpu is not None and gpu.capability < FP8_CAPABILITY and dtype != "float32":
        least, own = (".".join(map(str, capability)) for capability in (FP8_CAPABILITY, gpu.capability))
        raise ConfigError(
            f"fp8 {what} need a GPU of compute capability {least} or newer; {gpu.name} has {own}. Use 16 bits, or --dtype float32."
        )


def _default_threads(args: ServerArgs, machine: MachineFacts) -> int:
    """The default number of threads: no more than free cores, because waiting threads spin and would slow down every operation."""
    return min(machine.threads or max(machine.cores * args.nnodes // args.tp_size, 1), MAX_THREADS)


def asked_dtype(args: ServerArgs) -> DType | None:
    """The type that --dtype names; None for auto."""
    return None if args.dtype == "auto" else _SPELLINGS.get(args.dtype, cast(DType, args.dtype))


def _device(args: ServerArgs, machine: MachineFacts) -> DeviceKind:
    gpu = machine.gpus[0] if machine.gpus else None
    too_old = _too_old(gpu)
    if args.device == "cuda" and gpu is None:
        raise ConfigError(
            "--device cuda needs a GPU, but the driver reports none. Check CUDA_VISIBLE_DEVICES and the driver, or use --device cpu."
        )
    if args.device == "cuda" and too_old:
        raise ConfigError(f"--device cuda is not possible: {too_old}. Use --device cpu.")
    if args.device is not None:
        return args.device
    if gpu is None:
        log.info("device cpu: no GPU found; %d cores, %.0f GiB", machine.cores, machine.memory / 2**30)
        return "cpu"
    if too_old:
        log.warning("device cpu: %s", too_old)
        return "cpu"
    log.info("device cuda: %s, compute capability %d.%d, %.0f GiB", gpu.name, *gpu.capability, gpu.memory / 2**30)
    log_tuning(gpu)
    return "cuda"


def _too_old(gpu: Gpu | None) -> str:
    if gpu is None or gpu.capability >= MIN_CAPABILITY:
        return ""
    return "{} has compute capability {}.{}; the minimum is {}.{}".format(gpu.name, *gpu.capability, *MIN_CAPABILITY)


def _dtype(args: ServerArgs, device: DeviceKind, model: ModelFacts) -> DType:
    dtype = asked_dtype(args)
    if dtype == "float16" and device == "cpu":
        raise ConfigError("--dtype float16 is not possible on a CPU: its range is too small for hidden states. Use bfloat16 or float32.")
    if dtype is None:
        dtype, why = _default_dtype(args, device, model)
        log.info("dtype %s: %s", dtype, why)
    if args.kv_cache_dtype not in ("auto", "fp8_e4m3", dtype):
        raise ConfigError(
            f"--kv-cache-dtype must be the model's type, {dtype}, or fp8_e4m3; got {args.kv_cache_dtype}. Use auto, or leave it out."
        )
    return dtype


def _default_dtype(args: ServerArgs, device: DeviceKind, model: ModelFacts) -> tuple[DType, str]:
    if device == "cpu":
        return "float32", "exact, and the fastest for one token on most CPUs"
    if model.dtype == "float32":
        return "bfloat16", "half the memory traffic of the checkpoint's float32"
    if model.dtype == "float16" and "int4" in (args.quantization, model.quant and model.quant.method):
        return "bfloat16", "the fast kernels for int4 weights take bfloat16 activations only"
    return model.dtype, "the checkpoint's"
