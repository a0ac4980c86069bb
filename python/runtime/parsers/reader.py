"""A buffer of the model's output, and the deltas that are read from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, TypeVar

from runtime.parsers.deltas import CallArguments, CallStart, Content, Delta, Reasoning, joined
from runtime.text.characters import whole_characters
from runtime.text.stop_finder import overlap

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that yields whenever it needs more text; `yield from` returns its result."""
Out = Callable[[str], None]

WHITE = " \t\r\n"
MAX_NAME = 256
"""Most characters of the name of a function or a parameter, and of a call's id."""
_NAME = re.compile(r"[\w.:/-]+")


class Malformed(Exception):
    """The text violates its format; it is emitted as content."""


class Reader:
    """A buffer with a position. Generators read from it, independent of how the text is split into pieces.

    `done` <= `pos` are offsets in `text`. Text before `done` was emitted, or was the syntax of something emitted.

    Args:
        tools: the JSON schema of the parameters of each function that may be called.
        new_id: creates the id of a call.

    Attributes:
        ended: whether no more text will arrive.
        cut_off: whether a limit or a stop string ended the output, not the model.
        ran_out: whether the text ended where more was expected. What is unread is then empty or a part of a tag.
        calls: number of started calls.
        in_call: whether the arguments of the latest call are incomplete.
        unknown: whether the latest call is of an unknown function. Such a call becomes text.
        base: number of output characters before `text`.
        thoughts: start and end offsets of thinking in the output, including its tags; the last end may be None.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], new_id: Callable[[], str]) -> None:
        self.tools = tools
        self.text = ""
        self.pos = self.done = self.base = self.calls = 0
        self.ended = self.cut_off = self.ran_out = self.in_call = self.unknown = False
        self.thoughts: list[tuple[int, int | None]] = []
        self._new_id = new_id
        self._ids = set[str]()
        self._deltas: list[Delta] = []
        self._shown: Out = self.content
        self._name: str | None = None
        self._name_start: int | None = None  # an offset in the output

    def add(self, text: str) -> None:
        """Append text, and drop the text before `done`."""
        self.text, self.base = self.text[self.done :] + text, self.base + self.done
        self.pos, self.done = self.pos - self.done, 0

    def take_deltas(self) -> list[Delta]:
        """Return the deltas since the last call of this method; adjacent deltas of one kind are merged."""
        deltas, self._deltas = self._deltas, []
        return joined(deltas)

    # ---- output

    def accept(self) -> None:
        """Mark the text read so far as syntax, which is not emitted."""
        self.done = self.pos

    def drop_rest(self) -> None:
        """Read the rest of the text without emitting it."""
        self.pos = self.done = len(self.text)

    def emit_as_content(self) -> None:
        """Emit the text between `done` and `pos` as content."""
        self.content(self.text[self.done : self.pos])

    def content(self, text: str) -> None:
        """Emit text of the answer."""
        self._emit(Content(text))

    def reasoning(self, text: str) -> None:
        """Emit text of the thinking."""
        self._emit(Reasoning(text))

    def begin_thought(self) -> None:
        """Record that thinking begins at `done`."""
        self.thoughts.append((self.base + self.done, None))

    def end_thought(self) -> None:
        """Record that thinking ends at `pos`."""
        self.thoughts[-1] = (self.thoughts[-1][0], self.base + self.pos)

    def resume_thought(self) -> None:
        """Record that thinking did not end."""
        self.thoughts[-1] = (self.thoughts[-1][0], None)

    def begin_calls(self, out: Out) -> None:
        """Forget the name and the end of the calls read before. Before a call of a known function, text is passed to `out`."""
        self.ran_out, self._name, self._name_start = False, None, None
        self.in_call = self.unknown = False
        self._shown = out

    def take_name(self, reading: Steps[str]) -> Steps[str]:
        """Read a function's name by `reading`, for `may_call`."""
        self._name, self._name_start = None, self.base + self.pos
        self._name = yield from reading
        return self._name

    def may_call(self, marked: bool) -> bool:
        """Whether what was read may begin a call of a known function.

        Args:
            marked: whether it began with a tag. Without a tag, it is a call only once a name begins.
        """
        if self._name is not None:
            return self._name.strip() in self.tools
        start = self.pos if self._name_start is None else self._name_start - self.base
        written = self.text[start : self.pos].strip(f'{WHITE}"')
        return (marked or bool(written)) and any(name.startswith(written) for name in self.tools)

    def start_call(self, name: str, call_id: str = "") -> None:
        """Emit the start of a call. If there is no such function, the whole call becomes text at `end_call`.

        Args:
            call_id: the model's own id of the call. The call gets a new one if this is empty, too long, or that of an earlier call.

        Raises:
            Malformed: no function could have this name.
        """
        self.unknown = name not in self.tools
        if self.unknown and not _NAME.fullmatch(name):
            raise Malformed
        if self.unknown:
            return
        while not call_id or call_id in self._ids or len(call_id) > MAX_NAME:
            call_id = self._new_id()
        self._ids.add(call_id)
        self._emit(CallStart(self.calls, call_id, name))
        self.calls += 1
        self.in_call, self._shown = True, self.content

    def arguments(self, text: str) -> None:
        """Emit JSON text of the latest call's arguments."""
        if not self.unknown:
            self._emit(CallArguments(self.calls - 1, whole_characters(text)))

    def end_arguments(self) -> None:
        """Record that the arguments of the latest call are complete."""
        self.in_call = False

    def end_call(self) -> None:
        """Mark the text read so far as syntax of the latest call, or emit it as text if its function is unknown."""
        if self.unknown:
            self.show_unread()
        else:
            self.accept()

    def show_unread(self) -> None:
        """Emit the text between `done` and `pos` as content, or as the text before the first call."""
        self._shown(self.text[self.done : self.pos])

    def _emit(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self.done = self.pos

    # ---- reading

    def peek(self) -> Steps[str]:
        """The next character; "" at the end."""
        while self.pos == len(self.text):
            if self.ended:
                self.ran_out = True
                return ""
            yield
        return self.text[self.pos]

    def at(self, *tags: str) -> Steps[str | None]:
        """The tag at the position, or None; reads nothing. No tag may be a prefix of another."""
        while True:
            for tag in tags:
                if self.text.startswith(tag, self.pos):
                    return tag
            rest = self.text[self.pos :]
            partial = any(tag.startswith(rest) for tag in tags)
            self.ran_out |= self.ended and partial
            if self.ended or not partial:
                return None
            yield

    def skip(self, *tags: str) -> Steps[str | None]:
        """Read the tag at the position, if there is one, and return it."""
        tag = yield from self.at(*tags)
        self.pos += len(tag or "")
        return tag

    def expect(self, *tags: str) -> Steps[str]:
        """Read white space and one of the tags. Raises `Malformed` for anything else."""
        yield from self.skip_all(WHITE)
        tag = yield from self.skip(*tags)
        if tag is None:
            raise Malformed
        return tag

    def skip_all(self, letters: Collection[str]) -> Steps[str]:
        """Read all consecutive characters that are in `letters`, and return them."""
        found = ""
        while (letter := (yield from self.peek())) and letter in letters:
            found += letter
            self.pos += 1
        return found

    def read_until(self, tags: Sequence[str], out: Out, trim: str = "") -> Steps[str | None]:
        """Pass text to `out` up to the first of `tags`, without reading the tag; returns the tag, or None at the end of the text.

        Characters of `trim` directly before a tag are read but not passed on. At the end of the text, a part of a tag stays unread, with
        the characters of `trim` before it; see `read_partial`.
        """
        while True:
            place, tag = self._first(tags)
            end = place if tag else place - self._held(tags)
            body = self.text[self.pos : end]
            shown = body.rstrip(trim) if trim and not (self.ended and end == len(self.text)) else body
            self.pos += len(shown)
            if shown:
                out(shown)
            if tag:
                self.pos = place
                return tag
            if self.ended:
                self.ran_out = True
                return None
            yield

    def read_partial(self, tags: Sequence[str], out: Out) -> None:
        """Read what `read_until` left unread at the end of the text, and pass it to `out`.

        If the output was cut off within one of `tags`, the part of the tag is dropped. A single character may well be text; it is
        dropped only after a call.
        """
        rest = self.text[self.pos :]
        self.pos = len(self.text)
        if self.cut_off and max((overlap(rest, tag) for tag in tags), default=0) > (0 if self.calls else 1):
            self.accept()
        elif rest:
            out(rest)

    def first_of(self, *tags: str) -> Steps[str | None]:
        """The first of `tags` from the position on, or None if none follows; reads nothing."""
        while not (tag := self._first(tags)[1]):
            if self.ended:
                return None
            yield
        return tag

    def take_until(self, *tags: str, limit: int = MAX_NAME, unended: Out | None = None) -> Steps[str]:
        """Read and return text up to one of `tags`; for the rest see `take`."""
        return (yield from self.take(lambda out: self.read_until(tags, out), limit, unended))

    def take(self, read: Callable[[Out], Steps[str | None]], limit: int, unended: Out | None = None) -> Steps[str]:
        """Return the text that `read` passes on. Raises `Malformed` at the end of the text or beyond `limit` characters.

        Args:
            unended: is given the text, unless it is blank, if the model ends its answer there.
        """
        taken, left = list[str](), limit

        def keep(text: str) -> None:
            nonlocal left
            taken.append(text)
            left -= len(text)
            if left < 0:
                self.pos += left  # the same position in whatever pieces the text arrives
                raise Malformed

        if (yield from read(keep)) is None:
            text = "".join(taken)
            if unended is not None and text.strip() and not (self.cut_off or self.unknown):
                unended(text)
            raise Malformed
        return "".join(taken)

    def _first(self, tags: Sequence[str]) -> tuple[int, str]:
        """Offset and text of the first tag from the position on; the end of the buffer and "" if there is none."""
        found = [(place, tag) for tag in tags if (place := self.text.find(tag, self.pos)) >= 0]
        return min(found) if found else (len(self.text), "")

    def _held(self, tags: Sequence[str]) -> int:
        """Number of characters at the end of the buffer that may begin a tag."""
        return max([overlap(self.text, tag, self.pos) for tag in tags], default=0)
