"""Resolves the attention backend: the requested one, or the fastest that supports this machine and model."""

from __future__ import annotations

import logging

from runtime.config.attention_caps import ATTENTION_CAPS, AttentionName, AttentionNeeds, unsupported
from runtime.config.machine import MachineFacts
from runtime.config.model_facts import ModelFacts
from runtime.config.runtime_config import DeviceKind, DType
from runtime.errors import ConfigError

log = logging.getLogger(__name__)


def resolve_attention(
    asked: AttentionName | None, flag: str, device: DeviceKind, dtype: DType, machine: MachineFacts, model: ModelFacts | None
) -> AttentionName:
    """Check the backend requested by `flag`, or choose one.

    Args:
        model: None if it is not known yet.
    """
    if asked is None:
        return _default(device, dtype, machine, model)
    caps = ATTENTION_CAPS[asked]
    if caps.package is None:
        return asked
    if device == "cpu":
        raise ConfigError(f"{flag} {asked} needs CUDA. On a CPU use torch_native, or leave the flag out.")
    major, minor = machine.gpus[0].capability
    if not _runs_on(asked, major):
        others = " or ".join(name for name in ATTENTION_CAPS if name != asked and _runs_on(name, major))
        raise ConfigError(f"{flag} {asked} needs a GPU of compute capability {caps.major}.x; this one is {major}.{minor}. Use {others}.")
    if problem := _missing_software(asked, machine) or _missing_kernel(asked, dtype, model):
        raise ConfigError(f"{flag} {asked} is not possible: {problem}. Use torch_native.")
    return asked


def _default(device: DeviceKind, dtype: DType, machine: MachineFacts, model: ModelFacts | None) -> AttentionName:
    if device == "cpu":
        return "torch_native"
    capability, problems = machine.gpus[0].capability, list[str]()
    for name, caps in ATTENTION_CAPS.items():
        if caps.package is None or not _runs_on(name, capability[0]):
            continue
        if missing := _missing_software(name, machine):
            log.warning("attention backend torch_native, which is much slower: %s", missing)
            return "torch_native"
        problem = _missing_kernel(name, dtype, model)
        if not problem:
            log.info("attention backend %s: %s", name, "; ".join(problems) or "compute capability {}.{}".format(*capability))
            return name
        problems.append(f"with {name}, {problem}")
    log.info("attention backend torch_native: %s", "; ".join(problems))
    return "torch_native"


def _runs_on(name: AttentionName, major: int) -> bool:
    return ATTENTION_CAPS[name].major in (None, major)


def _missing_software(name: AttentionName, machine: MachineFacts) -> str:
    caps = ATTENTION_CAPS[name]
    if caps.package not in machine.packages:
        return f"{name} needs the package {caps.package}; install it by pip install -e '.[cuda]'"
    if caps.needs_nvcc and not machine.nvcc:
        return f"{name} needs nvcc and a C++ compiler; install both, and set CUDA_HOME to the folder of the CUDA toolkit"
    return ""


def _missing_kernel(name: AttentionName, dtype: DType, model: ModelFacts | None) -> str:
    needs = AttentionNeeds(dtype)
    if model is not None:
        needs = AttentionNeeds(dtype, key_dim=model.head_dim, sinks=model.sinks, softcap=model.softcap)
    limit = unsupported(ATTENTION_CAPS[name], needs)
    return limit and f"its kernels do not support {limit}"
