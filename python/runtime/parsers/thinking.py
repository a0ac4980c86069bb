"""The tags around thinking in the output, by model family."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Literal

from runtime.parsers.reader import WHITE, Out, Reader, Steps

_LETTERS = string.ascii_letters + WHITE

Opening = Literal["open", "closed", "unknown"]
"""Whether the output begins inside thinking, outside thinking, or the prompt does not determine it."""


@dataclass(frozen=True)
class ThinkFormat:
    """Thinking between two tags.

    Attributes:
        begin, end: the tags.
        forced: whether the output begins inside thinking if the prompt does not determine it.
        anywhere: whether thinking may begin in the middle of the answer.
        ended_by: tags of tool calls, which also end thinking.
        separate: whether thinking is emitted as reasoning; otherwise it stays in the content, with its tags.
    """

    begin: str = "<think>"
    end: str = "</think>"
    forced: bool = False
    anywhere: bool = False
    ended_by: tuple[str, ...] = ()
    separate: bool = True

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags that may be control tokens."""
        return (self.begin.rstrip(_LETTERS), self.end)

    def opening(self, prompt_end: str) -> Opening:
        """Determine from the end of the prompt where the output begins."""
        begun, ended = prompt_end.rfind(self.begin.strip()), prompt_end.rfind(self.end)
        return "unknown" if begun < 0 and ended < 0 else "open" if begun > ended else "closed"

    def read_first(self, reader: Reader, opening: Opening) -> Steps[str | None]:
        """Read the thinking at the beginning of the output, if there is any; returns the tag that ended it."""
        if opening == "closed":
            return None
        start = reader.pos
        yield from reader.skip_all(WHITE)
        begun = yield from reader.skip(self.begin)
        if not begun and reader.cut_off and len(reader.text) > reader.pos + 1 and self.begin.startswith(reader.text[reader.pos :]):
            reader.drop_rest()  # a part of the tag; a single character may well be text
            return None
        if not begun:
            reader.pos = start
        return (yield from self.read(reader)) if begun or opening == "open" or self.forced else None

    def read(self, reader: Reader) -> Steps[str | None]:
        """Read thinking whose opening tag was read; returns the tag that ended it. A tag of `ended_by` is not read.

        Line breaks at the edges and before the answer are not emitted.
        """
        reader.begin_thought()
        yield from self._read_edge(reader)
        return (yield from self.read_rest(reader))

    def read_rest(self, reader: Reader) -> Steps[str | None]:
        """Read begun thinking; see `read`."""
        tags = (self.end, *self.ended_by)
        tag = yield from reader.read_until(tags, self.out(reader), "\n" if self.separate else "")
        yield from reader.skip(self.end)
        if tag:
            reader.end_thought()
        else:
            reader.read_partial(tags, self.out(reader))
        if tag == self.end:
            yield from self._read_edge(reader)
        return tag

    def out(self, reader: Reader) -> Out:
        """Emits text of the thinking."""
        return reader.reasoning if self.separate else reader.content

    def _read_edge(self, reader: Reader) -> Steps[None]:
        if self.separate:
            yield from reader.skip_all("\n")
            reader.accept()
        else:
            reader.emit_as_content()
