"""Responses kept in memory, so that clients can retrieve and continue them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from runtime.entrypoints.openai.response_protocol import InputItem
from runtime.errors import RequestError, ServingError, shown

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
ITEM_BYTES = 1536
"""Memory of an item in addition to its text: a conversation object, and JSON with an id."""

Json = dict[str, Any]


class ResponseNotFound(ServingError):
    """No response with this id is stored."""

    status = 404
    code = "response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"There is no response {shown(response_id)}. It was not stored, was deleted, or made room for newer ones "
            f"(the last {MAX_RESPONSES} are kept, up to {MAX_BYTES >> 20} MiB).",
            "response_id",
        )


class PreviousResponseNotFound(RequestError):
    """The response that a request continues is not stored."""

    code = "previous_response_not_found"


class ItemNotFound(RequestError):
    """A request refers to an item that is not stored, or to the same item twice."""

    def __init__(self, item_id: str, found: bool) -> None:
        why = "is referred to twice" if found else "is not among the items of stored responses; send the item itself"
        super().__init__(f"The item {shown(item_id)} {why}.", "input")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response.

    Attributes:
        response: the response object as sent to the client.
        input: the items of its request, with ids.
        conversation: all items so far: those of earlier responses, the input and the output.
        size: approximate memory of the conversation, in bytes.
    """

    response: Json
    input: tuple[Json, ...]
    conversation: tuple[InputItem, ...]
    size: int

    @property
    def outputs(self) -> dict[str, InputItem]:
        """The output items by id."""
        made = {item["id"] for item in self.response["output"]}
        return {item.id: item for item in self.conversation if item.id is not None and item.id in made}


def size_of(response: Json, given: Sequence[Json]) -> int:
    """Approximate memory of a response and of the items of its request, in bytes."""
    return len(orjson.dumps([response, given])) + ITEM_BYTES * (len(given) + len(response["output"]))


class ResponseStore:
    """An LRU store of responses, bounded in number and in bytes."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._items: dict[str, tuple[str, InputItem]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, stored: StoredResponse) -> None:
        """Keep a response, and drop old ones that no longer fit."""
        self._kept[stored.response["id"]] = stored
        self._bytes += stored.size
        self._items |= {name: (stored.response["id"], item) for name, item in stored.outputs.items()}
        while len(self._kept) > self._max_responses or self._bytes > self._max_bytes:
            self.remove(next(iter(self._kept)))

    def get(self, response_id: str) -> StoredResponse:
        """A response. Raises `ResponseNotFound`."""
        if response_id not in self._kept:
            raise ResponseNotFound(response_id)
        self._kept.move_to_end(response_id)
        return self._kept[response_id]

    def resolved(self, items: Iterable[InputItem]) -> list[InputItem]:
        """Replace references by the stored items. Raises `ItemNotFound`.

        Each stored item may be used once, so that a small body cannot create a large prompt.
        """
        done: list[InputItem] = []
        taken = set[str]()
        for item in items:
            if item.type == "item_reference":
                name = item.id or ""
                if name not in self._items or name in taken:
                    raise ItemNotFound(name, name in taken)
                taken.add(name)
                owner, item = self._items[name]
                self._kept.move_to_end(owner)
            done.append(item)
        return done

    def remove(self, response_id: str) -> None:
        """Remove a response. Raises `ResponseNotFound`."""
        stored = self.get(response_id)
        self._bytes -= stored.size
        for name in stored.outputs:
            del self._items[name]
        del self._kept[response_id]
