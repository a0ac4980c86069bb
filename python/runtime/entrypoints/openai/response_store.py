"""Responses kept in memory, so that clients can retrieve and continue them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from runtime.entrypoints.openai.response_protocol import InputItem
from runtime.errors import RequestError, ServingError, shown

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
ITEM_BYTES = 1536
"""Memory of an item besides its text: as an object of the conversation, and as JSON with an id."""

Json = dict[str, Any]


class ResponseNotFound(ServingError):
    """No response of this name is stored."""

    status = 404
    kind = "not_found_error"
    code = "response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"There is no response {shown(response_id)}. It was not stored, was deleted, or made room for newer ones "
            f"(the last {MAX_RESPONSES} are kept, up to {MAX_BYTES >> 20} MiB).",
            "response_id",
        )


class PreviousResponseNotFound(RequestError):
    """The response that a request wants to continue is not stored."""

    code = "previous_response_not_found"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response.

    Attributes:
        response: as the client got it.
        input: the items of its request, with ids.
        conversation: all items so far: those of earlier responses, the input and the output.
        size: bytes of the conversation in memory, about.
    """

    response: Json
    input: tuple[Json, ...]
    conversation: tuple[InputItem, ...]
    size: int


def size_of(response: Json, given: Sequence[Json]) -> int:
    """Bytes in memory, about, of a response and of the items of its request."""
    return len(orjson.dumps([response, given])) + ITEM_BYTES * (len(given) + len(response["output"]))


class ResponseStore:
    """The latest responses, bounded in number and in bytes; the least recently used are dropped first."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, stored: StoredResponse) -> None:
        """Keep a response, and drop old ones that no longer fit."""
        self._kept[stored.response["id"]] = stored
        self._bytes += stored.size
        while len(self._kept) > self._max_responses or self._bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.size

    def get(self, response_id: str) -> StoredResponse:
        """A response. Raises `ResponseNotFound`."""
        if response_id not in self._kept:
            raise ResponseNotFound(response_id)
        self._kept.move_to_end(response_id)
        return self._kept[response_id]

    def remove(self, response_id: str) -> None:
        """Forget a response. Raises `ResponseNotFound`."""
        self._bytes -= self.get(response_id).size
        del self._kept[response_id]
