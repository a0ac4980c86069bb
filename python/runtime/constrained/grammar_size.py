"""Bounds on the text of a grammar that compilers in native code do not keep by themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator

from runtime.errors import GrammarError
from runtime.sampling_params import GrammarSpec

MAX_RULES = 1000
"""Rules of an EBNF. llguidance calls itself for each of a chain; 3,000 overflow a stack of 8 MB, which ends the process."""
MAX_REPEATS = 4096
"""`?`, `*` and `{` in all regular expressions and EBNF. Memory and time grow with the square: 0.1 s at this number, 1 GB at
20,000."""
REPEATS = "?*{"


def check_size(spec: GrammarSpec) -> None:
    """Raise `GrammarError` where `spec` could end the process that compiles it. Text that is no grammar passes."""
    repeats = 0
    for text, is_ebnf in _parts(spec):
        rules = text.count(":") - text.count("::=") if is_ebnf else 0
        if rules > MAX_RULES:
            raise GrammarError(spec.kind, f"It has about {rules:,} rules; at most {MAX_RULES:,} can be compiled.")
        repeats += sum(map(text.count, REPEATS))
    if repeats > MAX_REPEATS:
        raise GrammarError(spec.kind, f"It has {repeats:,} repetitions (?, * and {{); at most {MAX_REPEATS:,} can be compiled.")


def _parts(spec: GrammarSpec) -> Iterator[tuple[str, bool]]:
    """The regular expressions and EBNF of a grammar, and whether each is EBNF."""
    if spec.kind in ("regex", "ebnf"):
        yield spec.text, spec.kind == "ebnf"
        return
    try:
        rest = [json.loads(spec.text)]
    except (ValueError, RecursionError):
        return
    while rest:
        value = rest.pop()
        if isinstance(value, list):
            rest += value
        elif isinstance(value, dict):
            rest += value.values()
            yield from ((value[name], name == "grammar") for name in ("pattern", "grammar") if isinstance(value.get(name), str))
            if isinstance(keys := value.get("patternProperties"), dict):
                yield from ((key, False) for key in keys)
