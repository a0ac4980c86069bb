"""Keeps control tokens that users write in their messages from becoming tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from runtime.errors import RequestError

# Unicode assigns no characters to these code points, so one that a request does not use can mark positions in its text.
_NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


@dataclass(frozen=True)
class ControlTokens:
    """The texts that must not become tokens if a user writes them.

    Attributes:
        special: tokens that never occur as text.
        soft: added tokens such as `</think>`. They may occur in earlier assistant messages, where templates search for them.
    """

    special: frozenset[str] = frozenset()
    soft: frozenset[str] = frozenset()

    @cached_property
    def for_assistant(self) -> TextGuard:
        """The guard for assistant messages."""
        return TextGuard(self.special)

    @cached_property
    def for_others(self) -> TextGuard:
        """The guard for everything else that a request may contain."""
        return TextGuard(self.special | self.soft)


class TextGuard:
    """Inserts a mark into every control token in a text, and wherever adjacent text could complete one."""

    def __init__(self, spellings: Collection[str]) -> None:
        spellings = [s for s in spellings if len(s) > 1]  # a single character has no inside
        longest_first = [re.escape(s) for s in sorted(spellings, key=len, reverse=True)]
        # A lookahead also finds overlapping spellings. The mark after the first character breaks each of them.
        self._inside = re.compile(f"(?=(?:{'|'.join(longest_first)}))(.)", re.DOTALL) if spellings else None
        self._starts = frozenset(s[:n] for s in spellings for n in range(1, len(s)))
        self._ends = frozenset(s[n:] for s in spellings for n in range(1, len(s)))
        self._longest = max(map(len, spellings), default=0)

    def __call__(self, value: object, mark: str) -> Any:
        """Return a JSON value with `mark` inserted into its strings where needed."""
        if isinstance(value, str):
            return self._mark_text(value, mark)
        if isinstance(value, Mapping):
            return {self._mark_text(str(key), mark): self(item, mark) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(item, mark) for item in value]
        return value

    def _mark_text(self, text: str, mark: str) -> str:
        if self._inside is None:
            return text
        return self._inside.sub(rf"\1{mark}", self._mark_edges(text, mark))

    def _mark_edges(self, text: str, mark: str) -> str:
        """Mark the start or end of a text that adjacent text could complete to a control token.

        The mark is not the outermost character, so that a template that strips white space works as without it.
        """
        body = text.strip()
        if not body:
            return text
        offset = text.index(body[0])
        lengths = range(1, min(self._longest, len(body) + 1))
        cuts = {offset + len(body) - n + 1 for n in lengths if body[-n:] in self._starts}
        cuts |= {offset + n - 1 for n in lengths if body[:n] in self._ends}
        for cut in sorted(cuts, reverse=True):
            text = text[:cut] + mark + text[cut:]
        return text


def unused_noncharacters(messages: object, template_kwargs: object) -> tuple[str, str]:
    """Return two noncharacters that do not occur in a request, neither as characters nor escaped.

    Raises:
        RequestError: the request is not plain JSON, or it uses all noncharacters.
    """
    try:
        used = json.dumps([messages, template_kwargs], ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError("messages must consist of plain JSON values that are not nested deeply.", "messages") from error
    free = [char for char in _NONCHARACTERS if char not in used and escaped_mark(char) not in used]
    if len(free) < 2:
        raise RequestError("messages must not use all of the Unicode noncharacters U+FDD0 to U+FDEF.", "messages")
    return free[0], free[1]


def escaped_mark(mark: str) -> str:
    """The mark as it appears if a template writes a text as ASCII JSON or as a Python literal."""
    return ascii(mark)[1:-1]
