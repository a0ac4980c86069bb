"""Estimates the time to parse and validate a JSON body, while it arrives."""

from __future__ import annotations

_KEPT = b'"[{,:'
_DROPPED = bytes(byte for byte in range(256) if byte not in _KEPT)

BYTE_MS = 4e-6
COMMA_MS = 8e-5
COLON_MS = 3e-4
CONTAINER_MS = 5e-3
"""Milliseconds to parse and validate a byte, a comma, a colon (one per member of an object), and an array or object. Measured on one
core of a cloud machine with the slowest bodies that the endpoints accept: escaped text, token ids, unknown fields, text parts."""


class BodyCost:
    """Counts the bytes, commas, colons and containers of a body that arrives in chunks; characters inside strings count as bytes only."""

    def __init__(self) -> None:
        self.bytes = self.commas = self.colons = self.containers = 0
        self._in_string = False
        self._escape = b""  # a backslash at the end of the last chunk

    @property
    def milliseconds(self) -> float:
        """Time that parsing and validation will take."""
        values = self.commas * COMMA_MS + self.colons * COLON_MS + self.containers * CONTAINER_MS
        return self.bytes * BYTE_MS + values

    def feed(self, chunk: bytes) -> None:
        """Count one chunk. Every operation runs over the whole chunk in C; together they take a few ms per MiB."""
        self.bytes += len(chunk)
        plain = (self._escape + chunk).replace(b"\\\\", b"").replace(b'\\"', b"")
        self._escape = b"\\" if plain.endswith(b"\\") else b""
        parts = plain.translate(None, _DROPPED).split(b'"')
        for part in parts[int(self._in_string) :: 2]:
            self.commas += part.count(b",")
            self.colons += part.count(b":")
            self.containers += part.count(b"[") + part.count(b"{")
        self._in_string ^= len(parts) % 2 == 0
