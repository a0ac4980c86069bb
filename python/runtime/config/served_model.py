"""The model part of the configuration: which model is served, how it is stored, and how long its context is."""

from __future__ import annotations

import json
import logging
import os
import secrets
from pathlib import Path

from runtime.config.device import asked_dtype, check_fp8
from runtime.config.model_facts import ModelFacts
from runtime.config.quant_config import CPU_ONLY, Quantization, with_flag
from runtime.config.refusals import check_range
from runtime.config.runtime_config import DeviceConfig, ServedModelConfig, part_of_flags
from runtime.config.server_args import ServerArgs
from runtime.errors import ConfigError, InvalidField
from runtime.sampling_params import SamplingDefaults

log = logging.getLogger(__name__)

EMBEDDED_CPU_QUANTIZATION: Quantization = "int4"
"""Quantization of the embedded model on a CPU if neither --dtype nor --quantization is given: int4 keeps the numbers of its Q4_1 file."""


def check_model(args: ServerArgs) -> None:
    """Raise `ConfigError` for values that are invalid for any model."""
    template = args.chat_template
    if template is not None and "{" not in template and not os.path.isfile(template):
        raise ConfigError(f"--chat-template {template} is neither a file nor the text of a template.")
    _preferred(args)


def resolve_served_model(args: ServerArgs, device: DeviceConfig, model: ModelFacts) -> ServedModelConfig:
    """Combine the model's facts with the flags."""
    if args.context_length is not None:
        check_range("context_length", args.context_length, 2, model.max_context_len)
    if args.trust_remote_code:  # command lines written for other servers have it
        log.warning("--trust-remote-code has no effect: code in model folders is never run")
    preferred = _preferred(args)
    sampling = preferred.over(model.sampling)
    shown = ", ".join(f"{name} {value:g}" for name, value in sampling.complete().items())
    log.info("default sampling %s: --sampling-defaults %s", shown, args.sampling_defaults)
    return part_of_flags(
        ServedModelConfig,
        args,
        model_path=model.path,
        load_format=model.load_format,
        tokenizer_path=model.tokenizer_path,
        served_model_name=args.served_model_name or model.name,
        quantization=_quantization(args, device, model),
        context_length=args.context_length or model.max_context_len,
        random_seed=_seed(args),
        aliases=_aliases(args, model),
        default_sampling_params=sampling,
        preferred_sampling_params=preferred,
        fuse_shared_experts=not args.disable_shared_experts_fusion,
    )


def _aliases(args: ServerArgs, model: ModelFacts) -> tuple[str, ...]:
    """Other names of the model: SGLang's and its router's defaults, its path as given and as found, and the last part of these."""
    paths = [path.rstrip("/") for path in (args.model_path, model.path) if path]
    return tuple(dict.fromkeys(("default", "unknown", model.name, *paths, *(Path(path).name for path in paths))))


def _preferred(args: ServerArgs) -> SamplingDefaults:
    flag = "--preferred-sampling-params"
    try:
        raw = json.loads(args.preferred_sampling_params or "{}")
    except ValueError as error:
        raise ConfigError(f"{flag} is not JSON: {error}.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{flag} must be a JSON object such as '{{\"temperature\": 0.7}}'.")
    for name in raw.keys() - set(SamplingDefaults.__struct_fields__):
        raise ConfigError(f"{flag} cannot set {name}; it takes {', '.join(SamplingDefaults.__struct_fields__)}.")
    try:
        return SamplingDefaults.of(raw)
    except InvalidField as error:
        raise ConfigError(f"{flag}: {error}") from None


def _quantization(args: ServerArgs, device: DeviceConfig, model: ModelFacts) -> Quantization | None:
    if args.quantization in CPU_ONLY and device.gpu is not None:
        raise ConfigError(f"--quantization {args.quantization} runs on CPUs only. Leave it out, or use --device cpu.")
    quant = with_flag(model.quant, args.quantization)
    if quant is not None:
        if quant.method == "fp8":
            check_fp8("weights", device.gpu, device.dtype)
        return quant.method
    flag = args.quantization
    assert flag not in ("awq", "gptq"), "`with_flag` refuses formats of other checkpoints"
    if flag is not None or not model.embedded or device.gpu is not None:
        return None if flag == "none" else flag
    default, dtype = EMBEDDED_CPU_QUANTIZATION, asked_dtype(args)
    if dtype is not None:
        log.info("quantization none: --dtype %s asks for %s weights; --quantization %s makes them smaller", args.dtype, dtype, default)
        return None
    log.info("quantization %s: the embedded model's default on a CPU; --dtype float32 or --quantization none turns it off", default)
    return default


def _seed(args: ServerArgs) -> int:
    if args.random_seed is not None:
        return args.random_seed
    seed = secrets.randbelow(1 << 31)
    log.info("random seed %d: drawn for this start", seed)
    return seed
