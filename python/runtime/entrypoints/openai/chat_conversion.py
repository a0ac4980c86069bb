"""Chat bodies made by other protocols: their errors name the fields of the protocol that the client speaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from runtime.entrypoints.http.body_schema import BodySchema
from runtime.entrypoints.openai.protocol import ChatBody
from runtime.errors import RequestError


class ChatConversion:
    """Makes chat bodies.

    Args:
        names: fields of a chat body under the names that the other protocol has for them; a field comes before the one it is in.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)
        self._schema = BodySchema(ChatBody)

    def body(self, fields: Mapping[str, Any]) -> ChatBody:
        """The chat body with these fields; those that are None are left out."""
        with self.naming():
            try:
                return ChatBody.model_validate({name: value for name, value in fields.items() if value is not None})
            except ValidationError as error:
                raise self._schema.refusal(error.errors()) from None

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Rename the field at fault in errors raised inside."""
        try:
            yield
        except RequestError as error:
            for ours, theirs in self._names.items():
                if f"{error.param}.".startswith(f"{ours}."):
                    error.param = theirs + (error.param or "")[len(ours) :]
                    break
            raise
