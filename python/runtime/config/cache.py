"""The cache part of the configuration: pages and size of the KV cache."""

from __future__ import annotations

import logging

from runtime.config.attention_caps import ATTENTION_CAPS, AttentionName
from runtime.config.runtime_config import CacheConfig, part_of_flags
from runtime.config.server_args import ServerArgs
from runtime.errors import ConfigError

log = logging.getLogger(__name__)

LONG_CONTEXT, BLOCK_DIM = 16384, 128
"""From this context length on, and with this head dimension, a page has as many slots as the prompt kernel's block has keys
(`AttentionCaps.block_keys`): prompts then load whole pages by TMA, which takes a tenth less time with long contexts."""
MAX_PAGE_SIZE = 1024
USUAL_TOKENS = 1024
"""Tokens of a request that every pool has space for, if the context is that long."""


def check_cache(args: ServerArgs) -> None:
    """Raise `ConfigError` for values that are invalid on any machine."""
    share, size = args.mem_fraction_static, args.page_size
    if share is not None and not 0.0 < share < 1.0:
        raise ConfigError(f"--mem-fraction-static must be above 0 and below 1; got {share}.")
    if size is not None and (not 1 <= size <= MAX_PAGE_SIZE or size & (size - 1)):
        raise ConfigError(f"--page-size must be a power of two of at most {MAX_PAGE_SIZE}; got {size}.")


def least_tokens(context_length: int, tokens_per_step: int, page_size: int) -> int:
    """KV slots that one request needs: for up to 1,024 tokens, two steps that write `tokens_per_step` past their end, and a page."""
    return min(context_length, USUAL_TOKENS) + 2 * tokens_per_step + page_size


def check_pool(max_total_tokens: int, least: int, page_size: int) -> None:
    """Raise `ConfigError` for a pool of fewer slots than `least`, in whole pages."""
    least = -(-least // page_size) * page_size
    if max_total_tokens < least:
        raise ConfigError(
            f"--max-total-tokens is {max_total_tokens}; one request needs {least}, in pages of {page_size}. Raise it or leave it out."
        )


def resolve_cache(args: ServerArgs, backend: AttentionName, context_length: int, head_dim: int, *, recurrent: bool) -> CacheConfig:
    """Choose the page size of the attention backend, and by the model. `recurrent`: as in `ModelFacts`."""
    if args.page_size is not None and args.page_size > context_length:
        raise ConfigError(f"--page-size must be at most the context length, {context_length}; got {args.page_size}.")
    caps, long = ATTENTION_CAPS[backend], context_length >= LONG_CONTEXT and head_dim == BLOCK_DIM
    page_size = args.page_size or (caps.block_keys if long else None) or caps.page_size
    if args.max_mamba_cache_size is not None and not recurrent:
        raise ConfigError("--max-mamba-cache-size needs a model with linear attention, whose recurrent states it counts.")
    return part_of_flags(CacheConfig, args, page_size=page_size, radix_cache=not args.disable_radix_cache)
