"""The scheduler part of the configuration: how many requests run, and how prompts and decoding share the device."""

from __future__ import annotations

import importlib.util
import logging

from runtime.config.attention_caps import ATTENTION_CAPS, AttentionName
from runtime.config.device_tuning import CPU
from runtime.config.draft_algorithms import ALGORITHM_CAPS
from runtime.config.runtime_config import DeviceConfig, DeviceKind, SchedulerConfig, SpeculativeConfig, part_of_flags
from runtime.config.server_args import GrammarBackendName, ServerArgs
from runtime.errors import ConfigError

log = logging.getLogger(__name__)

CUDA_CHUNK, CUDA_PREFILL_TOKENS = 2048, 8192
DENSE_LARGEST_CHUNK, SPARSE_LARGEST_CHUNK = 4096, 8192
"""Chunks while many prompt tokens wait. A prompt pass of a sparse model reads all experts, which takes longer than the GEMMs of 2048
tokens."""
CPU_QUEUED_TOKENS, CUDA_QUEUED_TOKENS = 1 << 19, 1 << 23
MIN_CHUNK, MAX_CHUNK = 16, 1 << 31


def check_scheduler(args: ServerArgs) -> None:
    """Raise `ConfigError` for a chunk size out of range."""
    chunk = args.chunked_prefill_size
    if chunk not in (None, -1) and not MIN_CHUNK <= chunk <= MAX_CHUNK:
        raise ConfigError(f"--chunked-prefill-size must be between {MIN_CHUNK} and {MAX_CHUNK}, or -1 for no chunks; got {chunk}.")


def resolve_scheduler(
    args: ServerArgs, device: DeviceConfig, context_length: int, speculative: SpeculativeConfig | None, *, sparse: bool
) -> SchedulerConfig:
    """Choose the sizes that suit the device and the model, which may be `sparse`."""
    chunk = _chunk(args, device.device)
    if args.enable_mixed_chunk and (problem := _unmixable(args, device.attention_backend, speculative)):
        raise ConfigError(f"--enable-mixed-chunk is not possible: {problem}. Leave it out.")
    return part_of_flags(
        SchedulerConfig,
        args,
        max_running_requests=args.max_running_requests or (CPU.max_running_requests if device.device == "cpu" else None),
        chunked_prefill_size=chunk,
        largest_chunk_size=_largest_chunk(args, device.device, sparse),
        max_prefill_tokens=_prefill_tokens(args, device.device, chunk, context_length),
        max_queued_tokens=args.max_queued_tokens or (CPU_QUEUED_TOKENS if device.device == "cpu" else CUDA_QUEUED_TOKENS),
        overlap=not args.disable_overlap_schedule,
        mixed_chunk=args.enable_mixed_chunk,
        grammar_backend=_grammar_backend(args, speculative),
    )


def _grammar_backend(args: ServerArgs, speculative: SpeculativeConfig | None) -> GrammarBackendName:
    if args.grammar_backend == "xgrammar" and importlib.util.find_spec("xgrammar") is None:
        raise ConfigError("--grammar-backend xgrammar needs the package: pip install 'talon-runtime[xgrammar]'. Or leave the flag out.")
    if speculative is not None and speculative.synthetic_accept is not None:
        log.info("grammar backend none: synthetic acceptance commits drafts that a grammar forbids")
        return "none"
    return args.grammar_backend


def _chunk(args: ServerArgs, device: DeviceKind) -> int:
    if args.chunked_prefill_size == -1:
        return -1
    chunk = args.chunked_prefill_size or (CPU.chunked_prefill_size if device == "cpu" else CUDA_CHUNK)
    if args.max_prefill_tokens is not None and args.max_prefill_tokens < chunk:
        log.info("chunked prefill size %d: limited by --max-prefill-tokens", args.max_prefill_tokens)
        return args.max_prefill_tokens
    return chunk


def _largest_chunk(args: ServerArgs, device: DeviceKind, sparse: bool) -> int | None:
    """None if the flags fix the chunk size, if decoding requests share prompt steps, which should stay short, and on a CPU."""
    if device == "cpu" or args.chunked_prefill_size is not None or args.enable_mixed_chunk:
        return None
    largest = SPARSE_LARGEST_CHUNK if sparse else DENSE_LARGEST_CHUNK
    return largest if args.max_prefill_tokens is None else min(largest, args.max_prefill_tokens)


def _prefill_tokens(args: ServerArgs, device: DeviceKind, chunk: int, context_length: int) -> int:
    """Several chunks on a GPU, where decode steps are much shorter than prompt steps; one chunk on a CPU, for steady streams.

    If prompts are never split, the flag's value, or at least the longest prompt.
    """
    if chunk == -1 and args.max_prefill_tokens is not None:
        return args.max_prefill_tokens
    longest = context_length if chunk == -1 else chunk
    return max(longest, args.max_prefill_tokens or (0 if device == "cpu" else CUDA_PREFILL_TOKENS))


def _unmixable(args: ServerArgs, backend: AttentionName, speculative: SpeculativeConfig | None) -> str:
    """Why a pass cannot have prompts and decoding requests; empty if it can."""
    if args.chunked_prefill_size == -1:
        return "with --chunked-prefill-size -1 prompts are never split"
    if problem := ATTENTION_CAPS[backend].unmixable:
        return problem
    if speculative is None:
        return ""
    if speculative.topk > 1:
        return "a draft tree needs a mask, and a prompt pass is causal"
    return ALGORITHM_CAPS[speculative.algorithm].unmixable
