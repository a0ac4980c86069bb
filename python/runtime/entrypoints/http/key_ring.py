"""The API keys of the server, and what each of them may still use in this minute."""

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

log = logging.getLogger(__name__)

MINUTE = 60.0


class Bucket:
    """A rate per minute: a full minute's worth may be used at once, and it refills evenly.

    Args:
        per_minute: the rate; None for no limit.
        now: returns seconds.
    """

    def __init__(self, per_minute: int | None, now: Callable[[], float]) -> None:
        self._rate = per_minute
        self._now = now
        self._left = float(per_minute or 0)
        self._at = now()

    def take(self, amount: float) -> None:
        """Use some; it may be more than is left, which later users wait for."""
        self._refill()
        self._left -= amount

    def wait(self, amount: float) -> float:
        """Seconds until `amount` is there; 0 if it is."""
        self._refill()
        return 0.0 if self._rate is None else max(0.0, (amount - self._left) * MINUTE / self._rate)

    def _refill(self) -> None:
        if self._rate is not None:
            now = self._now()
            self._left = min(float(self._rate), self._left + (now - self._at) * self._rate / MINUTE)
            self._at = now


class KeyUse:
    """One key and its use."""

    def __init__(self, key: ApiKey, now: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self.digest = digest_of(key.key)
        self._open = 0
        self._requests = Bucket(key.requests_per_minute, now)
        self._tokens = Bucket(key.tokens_per_minute, now)

    @property
    def client(self) -> str:
        """What the fair queue calls its user."""
        return f"key {self.key.name}"

    def begin(self) -> None:
        """Count a request. Raises `KeyLimitReached` if the key has no room for it now."""
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
        """The request is answered."""
        self._open -= 1

    def spend(self, tokens: int) -> None:
        """Count tokens of prompts or outputs."""
        self._tokens.take(tokens)


class KeyRing:
    """All keys: those of --api-key and --admin-api-key, and those of the file.

    Args:
        fixed: keys from flags.
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
        """Whether administration needs an admin key."""
        return any(use.key.admin for use in self._uses)

    @property
    def guards_api(self) -> bool:
        """Whether requests need a key. With --admin-api-key alone only administration does; a key file always guards the API."""
        return self._file is not None or any(not use.key.admin for use in self._uses)

    def find(self, given: str) -> KeyUse | None:
        """The key of this text. All keys are compared, so that the time does not depend on which key is close."""
        digest = digest_of(given)
        fits = [use for use in self._uses if hmac.compare_digest(digest, use.digest)]
        return fits[0] if fits else None

    def spend(self, client: str, tokens: int) -> None:
        """Count tokens of the client of a key."""
        for use in self._uses:
            if use.client == client:
                use.spend(tokens)

    def reload(self) -> None:
        """Read the file again. An unchanged key keeps its use; if the file is wrong, all keys stay as they were."""
        if self._file is None:
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
    """The keys that the configuration names. Raises `ConfigError` for a wrong file."""
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
    """What is compared in place of a key."""
    return hashlib.sha256(key.encode()).digest()
