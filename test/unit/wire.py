"""Messages as their receiver gets them."""

from __future__ import annotations

import msgspec

from runtime.managers.ipc import Codec
from runtime.managers.messages import ToDetokenizer

_CODEC: Codec[ToDetokenizer] = Codec(ToDetokenizer)


def as_sent(message: ToDetokenizer) -> ToDetokenizer:
    """Encode and decode `message`, as the socket does: the scheduler keeps updating what a message refers to."""
    return _CODEC.decode(msgspec.msgpack.encode(message))
