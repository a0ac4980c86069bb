"""The characters that represent bytes in byte-level vocabularies."""

from __future__ import annotations


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable bytes are themselves, the others are U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def token_to_bytes(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary; an added token is plain text."""
    try:
        return bytes(_BYTES[letter] for letter in token)
    except KeyError:
        return token.encode()
