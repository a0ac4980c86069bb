"""Which attention backend runs: the one asked for, or the fastest that this machine and model can use."""

from __future__ import annotations

import logging

from runtime.config.attention_caps import ATTENTION_CAPS
from runtime.config.machine import MachineFacts
from runtime.config.model_facts import ModelFacts
from runtime.config.runtime_config import AttentionName, DeviceKind, DType
from runtime.errors import ConfigError

log = logging.getLogger(__name__)

_PACKAGES = {"fa3": "sgl_kernel", "flashinfer": "flashinfer"}
_HOPPER = 9


def resolve_attention(
    asked: AttentionName | None, flag: str, device: DeviceKind, dtype: DType, machine: MachineFacts, model: ModelFacts | None
) -> AttentionName:
    """Check the backend that `flag` asks for, or choose one.

    Args:
        model: None if it is not known yet.
    """
    if asked is None:
        return _default(device, dtype, machine, model)
    if asked == "torch_native":
        return asked
    if device == "cpu":
        raise ConfigError(f"{flag} {asked} needs CUDA. On a CPU use torch_native, or leave the flag out.")
    major, minor = machine.gpus[0].capability
    if asked == "fa3" and major != _HOPPER:
        raise ConfigError(f"{flag} fa3 needs a Hopper GPU (9.0); this one is {major}.{minor}. Use flashinfer or torch_native.")
    if problem := _missing_package(asked, machine) or _missing_kernel(asked, dtype, model):
        raise ConfigError(f"{flag} {asked} is not possible: {problem}. Use torch_native.")
    return asked


def _default(device: DeviceKind, dtype: DType, machine: MachineFacts, model: ModelFacts | None) -> AttentionName:
    if device == "cpu":
        return "torch_native"
    capability = machine.gpus[0].capability
    name: AttentionName = "fa3" if capability[0] == _HOPPER else "flashinfer"
    if missing := _missing_package(name, machine):
        log.warning("attention backend torch_native, which is much slower: %s", missing)
    elif problem := _missing_kernel(name, dtype, model):
        log.info("attention backend torch_native: with %s, %s", name, problem)
    else:
        log.info("attention backend %s: compute capability %d.%d", name, *capability)
        return name
    return "torch_native"


def _missing_package(name: AttentionName, machine: MachineFacts) -> str:
    package = _PACKAGES[name]
    return "" if package in machine.packages else f"{name} needs the package {package}; install it by pip install -e '.[cuda]'"


def _missing_kernel(name: AttentionName, dtype: DType, model: ModelFacts | None) -> str:
    caps = ATTENTION_CAPS[name]
    if caps.dtypes is not None and dtype not in caps.dtypes:
        return f"its kernels take {' and '.join(sorted(caps.dtypes))}, not {dtype}"
    if model is None:
        return ""
    if caps.head_dims is not None and model.head_dim not in caps.head_dims:
        return f"its kernels take head dimensions {', '.join(map(str, sorted(caps.head_dims)))}, not {model.head_dim}"
    return "its kernels take no attention sinks" if model.sinks and not caps.sinks else ""
