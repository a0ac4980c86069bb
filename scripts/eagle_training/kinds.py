"""User turns of many kinds, drawn from the templates of `prompts.yaml`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

FILE = Path(__file__).with_name("prompts.yaml")
SLOT = re.compile(r"\{(\w+)\}|\{(\d+)-(\d+)\}")
OWN = "own"
"""The slot for a text that the model wrote itself."""
SYSTEM_SHARE, FOLLOW_UP_SHARE = 0.25, 0.3
CASUAL_SHARE, PLEASE_SHARE = 0.12, 0.06
"""Shares of turns in lower case without a full stop, and with "please" or "thanks"."""
HELD_OUT_KINDS = re.compile(
    r"\b(recipe|cook|cooking|bak(e|ed|ing)|boil|dish|dishes|dinner|breakfast|lunch|ingredient|meal|food|pasta|pizza|soup|salad|sauce|"
    r"travel|trip|itinerary|vacation|holiday|tourist|sightseeing|flight|hiking|skiing|hotel|weekend in|places to see|"
    r"compar(e|ed|ing|ison)|contrast|versus|vs|(dis)?advantage|difference|differ|better than|which is better|is it better|"
    r"e-?mail|(thank-you|apology|cover|love) (note|letter)|write an? (\w+ )?(letter|note|complaint|apology)|draft an?|invitation|"
    r"farewell|dear|poem|poetry|haiku|limerick|sonnet|lyric|song|lullaby|rap|rhym(e|es|ing)|verse|"
    r"classif(y|ies|ied|ication)|categor(y|ies|ize)|sentiment|label|spam|genre|positive or negative|sort these|group these)s?\b|"
    r"pros and cons",
    re.IGNORECASE,
)
"""Words of the kinds that are excluded from training (`everyday_prompts.jsonl`), so that these kinds measure unseen prompts."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's first turn, with the system prompt before it and the follow-up after it.

    Attributes:
        system: the system prompt, or None for the template's own.
        follow_up: the user's second turn, or None.
    """

    prompt: str
    system: str | None = None
    follow_up: str | None = None

    def messages(self, answer: str | None = None) -> list[dict[str, Any]]:
        """The chat before the first answer, or, given the text of the first, before the second answer."""
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        chat = [*before, {"role": "user", "content": self.prompt}]
        if answer is None:
            return chat
        return [*chat, {"role": "assistant", "content": answer}, {"role": "user", "content": self.follow_up}]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    kinds: dict[str, list[str]]
    follow_ups: list[str]
    systems: list[str]
    lists: dict[str, list[str | int]]


class PromptKinds:
    """Templates of user turns by kind, and the word lists that fill their slots."""

    def __init__(self, path: Path = FILE) -> None:
        self._file = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), _File)
        self.names = tuple(self._file.kinds)

    def draw(self, rng: np.random.Generator, own_texts: Sequence[str] = ()) -> Turn:
        """Draw a turn of a random kind.

        Args:
            own_texts: texts of the model, for templates that ask about a text.
        """
        templates = self._file.kinds[_pick(self.names, rng)]
        prompt = _casual(self.fill(_pick(templates, rng), rng, own_texts), rng)
        return self.around(prompt, rng, own_texts)

    def around(self, prompt: str, rng: np.random.Generator, own_texts: Sequence[str] = ()) -> Turn:
        """The turn of `prompt`, often with a system prompt or a follow-up."""
        system = self.fill(_pick(self._file.systems, rng), rng) if rng.random() < SYSTEM_SHARE else None
        follow_up = self.fill(_pick(self._file.follow_ups, rng), rng, own_texts) if rng.random() < FOLLOW_UP_SHARE else None
        return Turn(prompt, system, follow_up)

    def fill(self, template: str, rng: np.random.Generator, own_texts: Sequence[str] = ()) -> str:
        """Fill all slots of `template`; a slot that is not the name of a list stays unchanged."""

        def value(match: re.Match[str]) -> str:
            name, low, high = match.groups()
            if name is None:
                return str(rng.integers(int(low), int(high) + 1))
            if name == OWN:
                return _pick(own_texts, rng) if own_texts else self.fill("{sentence} {sentence} {sentence}", rng)
            values = self._file.lists.get(name)
            return match[0] if values is None else self.fill(str(_pick(values, rng)), rng, own_texts)

        return SLOT.sub(value, template)


def is_held_out_kind(prompt: str) -> bool:
    """Whether a prompt looks like one of the kinds that are held out."""
    return HELD_OUT_KINDS.search(prompt) is not None


def _pick(values: Sequence[Any], rng: np.random.Generator) -> Any:
    return values[int(rng.integers(len(values)))]


def _casual(text: str, rng: np.random.Generator) -> str:
    chance = rng.random()
    if "\n" in text or chance > CASUAL_SHARE + PLEASE_SHARE:
        return text[:1].upper() + text[1:] if text[:3] != "def" else text
    if chance < CASUAL_SHARE:
        return text.lower().rstrip(".?")
    return f"Please {text[:1].lower()}{text[1:]}" if chance < CASUAL_SHARE + PLEASE_SHARE / 2 else f"{text} Thanks!"
