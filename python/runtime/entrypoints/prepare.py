"""Resolves flags into a configuration and finds the model's files."""

from __future__ import annotations

from pathlib import Path

import msgspec

from runtime.config.device import check_fp8
from runtime.config.host_memory import host_memory
from runtime.config.machine import MachineFacts, probe
from runtime.config.model_facts import DraftFacts, ModelFacts
from runtime.config.resolve import check, resolve
from runtime.config.runtime_config import RuntimeConfig, SpeculativeConfig
from runtime.config.server_args import ServerArgs
from runtime.config.speculative import with_embedded_draft
from runtime.config.speculative_tuning import MadeFor, fitting, read_tuning
from runtime.entrypoints.memory_check import check_memory
from runtime.errors import ConfigError
from runtime.model_files.embedded import SAMPLING as EMBEDDED_SAMPLING
from runtime.model_files.fingerprint import fingerprint
from runtime.model_files.model_source import DRAFT_FLAGS, ModelSource, resolve_model, resolve_weights
from runtime.models.config import ModelConfig
from runtime.models.draft_config import draft_block_size, read_draft
from runtime.models.hf_config import recommended_sampling
from runtime.models.registry import load_hf_config
from runtime.models.sharing import check_expert_width, check_experts, check_heads, faster_replicated
from runtime.sampling_params import NO_DEFAULTS, SamplingDefaults
from runtime.text.tokenizer import Tokenizer


def find_model(args: ServerArgs) -> ModelSource:
    """The files of the model. Downloads and converts what is missing. Raises `ConfigError` if they cannot be found."""
    return resolve_model(
        args.model_path,
        load_format=args.load_format,
        tokenizer_path=args.tokenizer_path,
        revision=args.revision,
        download_dir=args.download_dir,
    )


def prepare(args: ServerArgs) -> tuple[RuntimeConfig, ModelConfig]:
    """Find the model and resolve the configuration. Downloads and converts what is missing; loads no weights.

    Raises:
        ConfigError: an option cannot take effect.
    """
    check(args)
    source = find_model(args)
    args = with_embedded_draft(args, source.is_embedded)
    model_config = load_hf_config(source.weights_folder)
    facts = ModelFacts(
        path=source.weights_folder,
        load_format=source.kind,
        tokenizer_path=source.tokenizer_folder,
        name=source.served_name,
        dtype=model_config.dtype,
        max_context_len=model_config.max_context_len,
        head_dim=model_config.head_dim,
        sinks=model_config.sinks,
        softcap=model_config.attn_softcap > 0,
        sparse=model_config.moe is not None,
        recurrent=model_config.delta is not None,
        has_mtp=model_config.mtp is not None,
        embedded=source.is_embedded,
        quant=model_config.quant,
        sampling=_sampling(args, source),
    )
    if args.enable_dp_attention and model_config.moe is None:
        raise ConfigError(f"--enable-dp-attention: {model_config.architecture} has no experts for the groups to share. Leave it out.")
    if args.enable_dp_attention and model_config.delta is not None:
        raise ConfigError(f"--enable-dp-attention: {model_config.architecture} has linear attention. Leave it out.")
    if args.kv_cache_dtype == "fp8_e4m3" and model_config.latent is not None:
        raise ConfigError(f"--kv-cache-dtype: {model_config.architecture} stores latent rows, in the model's dtype only. Use auto.")
    check_heads(model_config, args.tp_size // args.dp_size)
    check_experts(model_config, args.ep_size)
    check_expert_width(model_config, args.quantization, args.tp_size // args.ep_size)
    draft = find_draft(args, source.kind)
    machine, tuning = probe(), None if args.speculative_tuning is None else read_tuning(args.speculative_tuning)
    config = fitted(resolve(args, machine, facts, draft, tuning), machine)
    check_draft_files(config, model_config)
    check_memory(config, model_config, host_memory())
    return config, model_config


def check_draft_files(config: RuntimeConfig, target: ModelConfig) -> None:
    """Refuse a draft, before any weights are loaded, that does not fit the target or that the GPU cannot read."""
    speculative = config.speculative
    if speculative is None or speculative.draft_model_path is None:
        return
    draft = read_draft(speculative, target).model
    if draft.delta is not None:
        raise ConfigError(
            f"The draft {speculative.draft_model_path}: {draft.architecture} has linear attention, which drafts cannot have. Use another "
            "draft model, or --speculative-algorithm NGRAM."
        )
    if draft.quant is not None and draft.quant.method == "fp8":
        check_fp8("weights of the draft", config.device.gpu, config.device.dtype)
    _check_draft_heads(config, speculative, draft)


def _check_draft_heads(config: RuntimeConfig, speculative: SpeculativeConfig, draft: ModelConfig) -> None:
    """Refuse a draft whose heads the target's ranks cannot share, unless each of them may hold the whole draft."""
    device, ranks = config.device, config.parallel.tp_size // config.parallel.dp_size
    # Only the ranks know the kind of their all-reduce; with the slower kind, more drafts are replicated.
    sum_bytes = max(device.tuning.sum_bytes, device.tuning.nccl_sum_bytes)
    may_replicate = device.device == "cuda" and draft.moe is None and faster_replicated(draft, ranks, sum_bytes)
    if speculative.draft_tp_size == 1 or (speculative.draft_tp_size is None and may_replicate):
        return
    try:
        check_heads(draft, ranks)
    except ConfigError as error:
        raise ConfigError(
            f"The draft {speculative.draft_model_path}: {error} Or give --speculative-draft-tp-size 1, so that each rank holds all of it."
        ) from error


def check_weights(config: RuntimeConfig, target: ModelConfig) -> None:
    """Refuse weights that do not fit their config.json. Imports torch; a start finds this while it loads them."""
    speculative = config.speculative
    if "safetensors" in (config.model.load_format, None if speculative is None else speculative.draft_load_format):
        from runtime.speculative import weight_check

        weight_check.check_weights(config, target)


def check_tokenizer(config: RuntimeConfig) -> None:
    """Refuse a tokenizer or a chat template that cannot be read; a start reads them while the weights load."""
    Tokenizer.load(config.model.tokenizer_path, chat_template=config.model.chat_template)


def check_token_map(config: RuntimeConfig, target: ModelConfig) -> None:
    """Refuse a token map that cannot be read or does not fit the target. Imports torch, so a start leaves it to the scheduler."""
    if config.speculative is None or config.speculative.token_map is None:
        return
    from runtime.models.token_map import invert, load_token_map

    invert(load_token_map(config.speculative.token_map), target.vocab_size, f"--speculative-token-map {config.speculative.token_map!r}")


def fitted(config: RuntimeConfig, machine: MachineFacts) -> RuntimeConfig:
    """The configuration with those parts of its tuning that apply to this setup.

    Raises:
        ConfigError: the tuning was measured with another model or draft.
    """
    speculative = config.speculative
    if speculative is None or speculative.tuning is None:
        return config
    tuning = fitting(speculative.tuning, made_for(config, machine))
    return msgspec.structs.replace(config, speculative=msgspec.structs.replace(speculative, tuning=tuning))


def made_for(config: RuntimeConfig, machine: MachineFacts) -> MadeFor:
    """The setup that a tuning of this configuration is measured with."""
    model, device, speculative = config.model, config.device, config.speculative
    assert speculative is not None
    draft = speculative.draft_model_path
    return MadeFor(
        model=Path(model.model_path).name,
        model_files=fingerprint(model.model_path),
        algorithm=speculative.algorithm,
        draft="" if draft is None else Path(draft).name,
        draft_files=fingerprint(draft),
        weights=config.weights,
        device=f"{machine.cpu}, {device.cpu_threads} threads" if device.gpu is None else device.gpu.name,
        ranks=config.parallel.tp_size,
    )


def _sampling(args: ServerArgs, source: ModelSource) -> SamplingDefaults:
    """The sampling defaults that --sampling-defaults selects."""
    if args.sampling_defaults == "openai":
        return NO_DEFAULTS
    return EMBEDDED_SAMPLING if source.is_embedded else recommended_sampling(source.weights_folder)


def find_draft(args: ServerArgs, target_format: str) -> DraftFacts | None:
    """The draft model; None if there is none."""
    path = args.speculative_draft_model_path
    if path is None:
        return None
    # A dummy target has a dummy draft, except a GGUF file: its shape is unknown until it is read.
    is_dummy = target_format == "dummy" and not path.endswith(".gguf")
    load_format = args.speculative_draft_load_format or ("dummy" if is_dummy else "auto")
    folder, kind = resolve_weights(path, load_format=load_format, download_dir=args.download_dir, flags=DRAFT_FLAGS)
    algorithm = args.speculative_algorithm
    return DraftFacts(folder, kind, None if algorithm in (None, "none") else draft_block_size(folder, algorithm))
