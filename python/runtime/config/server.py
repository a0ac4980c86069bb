"""The server part of the configuration: address, keys, logs and profiles."""

from __future__ import annotations

import re
from pathlib import Path

from runtime.config.refusals import check_positive, check_ranges, flag_of
from runtime.config.runtime_config import ServerConfig
from runtime.config.server_args import ServerArgs
from runtime.errors import ConfigError

LOGPROB_CELLS_PER_TOKEN = 128
"""Log-probabilities per token of the context that one call may ask for: six contexts with 20 alternatives each."""


def check_server(args: ServerArgs) -> None:
    """Refuse values out of range, keys that no client can send, and a profile folder that is a file."""
    check_ranges(args, port=(0, 65535), max_body_mib=(1, 1 << 10), max_parse_ms=(1, 1 << 20), max_logprob_cells=(1, 1 << 40))
    check_positive(args, shutdown_timeout=86400.0)
    for name in ("api_key", "admin_api_key"):
        if (key := getattr(args, name)) is not None:
            _check_key(flag_of(name), key)
    _origins(args)
    if args.profile is not None and (not args.profile or Path(args.profile).is_file()):
        raise ConfigError(f"--profile must name a folder for the traces; got {args.profile!r}. A missing folder is created.")


def resolve_server(args: ServerArgs, context_length: int) -> ServerConfig:
    """Take over what was asked for."""
    return ServerConfig(
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        admin_api_key=args.admin_api_key,
        max_body_mib=args.max_body_mib,
        max_parse_ms=args.max_parse_ms,
        max_logprob_cells=args.max_logprob_cells or LOGPROB_CELLS_PER_TOKEN * context_length,
        trust_request_chat_template=args.trust_request_chat_template,
        strict_request_fields=args.strict_request_fields,
        protect_metrics=args.protect_metrics,
        allow_origins=_origins(args),
        allowed_hosts=tuple(name.strip() for name in (args.allowed_hosts or "").split(",") if name.strip()),
        embedding_pooling=args.embedding_pooling,
        enable_metrics=args.enable_metrics,
        log_level=args.log_level,
        log_level_http=args.log_level_http,
        log_requests=args.log_requests,
        shutdown_timeout=args.shutdown_timeout,
        skip_server_warmup=args.skip_server_warmup,
        profile_folder=args.profile,
    )


def _origins(args: ServerArgs) -> tuple[str, ...]:
    """The origins of --allow-origins. Raises `ConfigError` for what no browser sends as an origin."""
    origins = tuple(name.strip().rstrip("/") for name in (args.allow_origins or "").split(",") if name.strip())
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin):
            raise ConfigError(f"--allow-origins {origin} is not an origin. Give scheme://host or scheme://host:port, or *.")
    return origins


def _check_key(flag: str, key: str) -> None:
    if not key:
        raise ConfigError(f"{flag} is empty, which would leave the server open. Give a key, or leave the flag out.")
    if not all("!" <= letter <= "~" for letter in key):
        raise ConfigError(f"{flag} has a character that an Authorization header cannot carry. Use printable ASCII without spaces.")
