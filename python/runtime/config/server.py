"""The server part of the configuration: address, keys, logs and profiles."""

from __future__ import annotations

import os
import re
import ssl
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from runtime.config.key_file import key_problem, read_key_file
from runtime.config.runtime_config import ServerConfig, part_of_flags
from runtime.config.server_args import ServerArgs
from runtime.errors import ConfigError

KEY_VARIABLE = "TALON_API_KEY"
"""Environment variable that holds the API key."""
MAX_SOCKET_PATH = 107
"""Maximum bytes of a Unix socket's path on Linux."""
LOGPROB_CELLS_PER_TOKEN = 128
"""Maximum log-probabilities per call and token of the context: enough for six contexts with 20 alternatives each."""


def check_server(args: ServerArgs) -> None:
    """Raise `ConfigError` for invalid addresses, origins and hosts, keys that no client can send, and a profile folder that is a file."""
    for name, key in (("--api-key", args.api_key), ("--admin-api-key", args.admin_api_key), (KEY_VARIABLE, _api_key(args))):
        if key is not None and (problem := key_problem(key)):
            raise ConfigError(f"{name} {problem}")
    if args.api_key_file is not None:
        read_key_file(Path(args.api_key_file))
    if args.protect_metrics and args.api_key_file is None and _api_key(args) is None:
        raise ConfigError("--protect-metrics has no effect without keys. Add --api-key or --api-key-file, or leave it out.")
    _check_address(args)
    _origins(args)
    _hosts(args)
    _traces_endpoint(args.otlp_traces_endpoint)
    if args.profile is not None and (not args.profile or (os.path.exists(args.profile) and not os.path.isdir(args.profile))):
        raise ConfigError(f"--profile must name a folder for the traces; got {args.profile!r}. A missing folder is created.")


def check_certificate(args: ServerArgs) -> None:
    """Raise `ConfigError` if the certificate or its key cannot be used; uvicorn would notice only after the model is loaded."""
    if args.ssl_keyfile is None or args.ssl_certfile is None:
        return
    try:
        # With a password, even an empty one, OpenSSL does not ask for it on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(args.ssl_certfile, args.ssl_keyfile, args.ssl_keyfile_password or "")
    except OSError as error:
        raise ConfigError(
            f"--ssl-certfile {args.ssl_certfile} and --ssl-keyfile {args.ssl_keyfile} cannot be used. Give a certificate and its own key, "
            "both in PEM, and --ssl-keyfile-password if the key is encrypted."
        ) from error


def resolve_server(args: ServerArgs, context_length: int) -> ServerConfig:
    """The server's part of the configuration, from the flags."""
    return part_of_flags(
        ServerConfig,
        args,
        api_key=_api_key(args),
        max_logprob_cells=args.max_logprob_cells or LOGPROB_CELLS_PER_TOKEN * context_length,
        allow_origins=_origins(args),
        allowed_hosts=_hosts(args),
        otlp_traces_endpoint=_traces_endpoint(args.otlp_traces_endpoint),
        profile_folder=args.profile,
    )


def _check_address(args: ServerArgs) -> None:
    """Raise `ConfigError` for an invalid host, a certificate without key or the reverse, missing files, and a long socket path."""
    if (args.ssl_keyfile is None) != (args.ssl_certfile is None):
        raise ConfigError("--ssl-keyfile and --ssl-certfile need each other. Give both, or neither.")
    if args.ssl_keyfile_password is not None and args.ssl_keyfile is None:
        raise ConfigError("--ssl-keyfile-password has no effect without --ssl-keyfile.")
    if not args.host:
        raise ConfigError("--host is empty, which would open the server to the network. Give an address, or leave the flag out.")
    if args.host.startswith("["):
        raise ConfigError(f"--host takes an address without brackets: {args.host.strip('[]')}.")
    for flag, path in (("--ssl-keyfile", args.ssl_keyfile), ("--ssl-certfile", args.ssl_certfile)):
        if path is not None and not os.path.isfile(path):
            raise ConfigError(f"{flag} {path} is not a file.")
    if args.uds is not None and not 0 < len(os.fsencode(args.uds)) <= MAX_SOCKET_PATH:
        raise ConfigError(f"--uds must be a path of at most {MAX_SOCKET_PATH} bytes; got {args.uds!r}.")


def _traces_endpoint(url: str | None) -> str | None:
    """The full URL of --otlp-traces-endpoint. Raises `ConfigError` if it is invalid, or if OpenTelemetry is not installed."""
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(url)
    except ValueError as error:
        raise ConfigError(f"--otlp-traces-endpoint {url} is not an address of OTLP over HTTP, such as http://localhost:4318.") from error
    try:
        find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry. Run pip install 'talon-runtime[otel]'.") from None
    return url if parts.path.strip("/") else url.rstrip("/") + "/v1/traces"


def _origins(args: ServerArgs) -> tuple[str, ...]:
    """The origins of --allow-origins. Raises `ConfigError` for invalid origins."""
    origins = tuple(name.strip().rstrip("/") for name in (args.allow_origins or "").split(",") if name.strip())
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin):
            raise ConfigError(f"--allow-origins {origin} is not an origin. Give scheme://host or scheme://host:port, or *.")
    return origins


def _hosts(args: ServerArgs) -> tuple[str, ...]:
    """The names of --allowed-hosts. Raises `ConfigError` for entries that no host name equals."""
    hosts = tuple(name.strip() for name in (args.allowed_hosts or "").split(",") if name.strip())
    for host in hosts:
        if not re.fullmatch(r"\*|[^*/:\s]+", host):
            raise ConfigError(f"--allowed-hosts {host} is not a host name. Give names without scheme and port, or *; addresses need none.")
    return hosts


def _api_key(args: ServerArgs) -> str | None:
    """The key of --api-key, or of the environment variable, which `ps` does not show."""
    return args.api_key or os.environ.get(KEY_VARIABLE) or None
