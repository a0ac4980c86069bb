"""The grammar backends by name."""

from __future__ import annotations

from runtime.constrained.grammar import GrammarBackend, Vocabulary


def make_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    """The backend called `name`. Imports its library, which may take seconds."""
    if name == "xgrammar":
        from runtime.constrained.xgrammar_backend import XgrammarBackend

        return XgrammarBackend(vocabulary)
    from runtime.constrained.llguidance_backend import LlguidanceBackend

    return LlguidanceBackend(vocabulary)
