"""The API keys of the server and their rate limits."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from runtime.config.key_file import FLAG, ApiKey, read_key_file
from runtime.config.runtime_config import ServerConfig
from runtime.errors import ConfigError, KeyLimitReached
from runtime.small_file import is_pipe

log = logging.getLogger(__name__)

MINUTE = 60.0


class Bucket:
    """A token bucket that holds one minute's worth and refills evenly.

    Args:
        per_minute: the rate; None for no limit.
        now: a clock in seconds.
    """

    def __init__(self, per_minute: int | None, now: Callable[[], float]) -> None:
        self._rate = per_minute
        self._now = now
        self._left = float(per_minute or 0)
        self._at = now()

    def take(self, amount: float) -> None:
        """Take `amount`. It may exceed what is left; later callers then wait longer."""
        self._refill()
        self._left -= amount

    def wait(self, amount: float) -> float:
        """Seconds until `amount` is available; 0 if it is now."""
        self._refill()
        return 0.0 if self._rate is None else max(0.0, (amount - self._left) * MINUTE / self._rate)

    def _refill(self) -> None:
        if self._rate is not None:
            now = self._now()
            self._left = min(float(self._rate), self._left + (now - self._at) * self._rate / MINUTE)
            self._at = now


class KeyUse:
    """One key, its open requests and its rate limits."""

    def __init__(self, key: ApiKey, now: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self.digest = digest_of(key.key)
        self._open = 0
        self._requests = Bucket(key.requests_per_minute, now)
        self._tokens = Bucket(key.tokens_per_minute, now)

    @property
    def client(self) -> str:
        """The client's name in the fair queue."""
        return f"key {self.key.name}"

    def begin(self) -> None:
        """Count a request. Raises `KeyLimitReached` if it exceeds a limit of the key."""
        key = self.key
        if key.concurrent_requests is not None and self._open >= key.concurrent_requests:
            raise KeyLimitReached(key.name, f"{key.concurrent_requests} concurrent requests", 1)
        for bucket, limit in (
            (self._requests, f"{key.requests_per_minute} requests per minute"),
            (self._tokens, f"{key.tokens_per_minute} tokens per minute"),
        ):
            if (seconds := bucket.wait(1.0)) > 0:
                raise KeyLimitReached(key.name, limit, math.ceil(seconds))
        self._requests.take(1.0)
        self._open += 1

    def end(self) -> None:
        """Count the end of a request."""
        self._open -= 1

    def spend(self, tokens: int) -> None:
        """Count tokens of prompts or outputs."""
        self._tokens.take(tokens)


class KeyRing:
    """All API keys.

    Args:
        fixed: the keys of --api-key and --admin-api-key.
        file: the file of --api-key-file.
    """

    def __init__(self, fixed: Iterable[ApiKey], file: Path | None = None) -> None:
        self._fixed = [KeyUse(key) for key in fixed]
        self._file = file
        self._uses = self._fixed
        if file is not None:
            self._uses = [*self._fixed, *map(KeyUse, _keys(file))]

    @property
    def has_admin(self) -> bool:
        """Whether there is an admin key, which administration then needs."""
        return any(use.key.admin for use in self._uses)

    @property
    def guards_api(self) -> bool:
        """Whether the API needs a key: not with --admin-api-key alone, always with a key file."""
        return self._file is not None or any(not use.key.admin for use in self._uses)

    def find(self, given: str) -> KeyUse | None:
        """The key with this text, or None. All keys are compared, so that timing does not reveal which one matches."""
        digest = digest_of(given)
        fits = [use for use in self._uses if hmac.compare_digest(digest, use.digest)]
        return fits[0] if fits else None

    def spend(self, client: str, tokens: int) -> None:
        """Count tokens of a client, if it has a key."""
        for use in self._uses:
            if use.client == client:
                use.spend(tokens)

    def reload(self) -> None:
        """Read the file again. Unchanged keys keep their counts; if the file is invalid or a pipe, all keys stay as they were."""
        if self._file is None:
            return
        if is_pipe(self._file):
            log.error("the API keys are unchanged: %s %s is a pipe, which can be read only once, at the start", FLAG, self._file)
            return
        try:
            keys = _keys(self._file)
        except ConfigError as error:
            log.error("the API keys are unchanged: %s", error)
            return
        known = {use.key: use for use in self._uses}
        self._uses = [*self._fixed, *(known.get(key) or KeyUse(key) for key in keys)]
        log.info("read %d API keys from %s", len(keys), self._file)


def key_ring(server: ServerConfig) -> KeyRing:
    """The keys of the configuration. Raises `ConfigError` if the file is invalid."""
    fixed = [
        ApiKey(name=name, key=key, admin=admin)
        for name, key, admin in (("api-key", server.api_key, False), ("admin-api-key", server.admin_api_key, True))
        if key
    ]
    return KeyRing(fixed, Path(server.api_key_file) if server.api_key_file is not None else None)


def _keys(file: Path) -> tuple[ApiKey, ...]:
    keys = read_key_file(file)
    if file.stat().st_mode & 0o007:
        log.warning("%s %s can be read by every user of this machine", FLAG, file)
    return keys


def digest_of(key: str) -> bytes:
    """The digest that is compared instead of a key."""
    return hashlib.sha256(key.encode()).digest()
