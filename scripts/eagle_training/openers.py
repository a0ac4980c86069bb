"""Openers of user turns. Many turns start without one, the others with one of these, so that topics and kinds of request vary."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import runtime

WORDS = Path(runtime.__file__).parent / "assets" / "words.txt"
OPENERS = (
    "Write a", "Write a short story about", "Write an email to", "Write a poem about", "Write a Python function that",
    "Write a letter",
    "Explain", "Explain in simple terms", "Describe", "Compare", "Summarize the following", "Rewrite the following",
    "Translate",
    "Correct the grammar", "List", "Give me three", "Give an example of", "Suggest", "Create a", "Plan a", "Design a",
    "Imagine that",
    "You are a", "Pretend you are", "Act as", "Let's play", "What is", "What are the", "What happens when",
    "What would", "Who was",
    "Where", "When did", "Why do", "Why is", "How do I", "How does", "How many", "How can I", "Is it", "Are there",
    "Can you", "Could you",
    "Should I", "Do you", "I have", "I need", "I'm", "I want to", "My", "If", "In", "The", "There are", "A",
    "Tell me", "Help me",
    "Solve", "Calculate", "Find the", "Extract", "From this text", "Read this and answer", "Classify",
    "Given the following",
    "Here is", "Please", "Hi", "Hello", "Thanks", "def ", "Fix this code", "SQL", "JavaScript", "A train",
    "Prove that", "History of",
)  # fmt: skip
WITH_A_WORD = (
    "Write about {}", "A story in which {}", "What does {} mean", "Tell me about {}", "Why {}", "How {}",
    "Give me ideas for {}", "The {}",
    "A question about {}:", "Write a dialogue about {}", "My {}", "Describe {}", "Is {}", "What do people think of {}",
)  # fmt: skip
PLAIN_SHARE, OPENER_SHARE = 0.4, 0.35
"""Shares of turns without and with an opener; the rest get an opener with a word filled in."""


def draw_openers(count: int, rng: np.random.Generator) -> list[str]:
    """`count` beginnings of user turns, many of them empty."""
    words = WORDS.read_text(encoding="utf-8").split()
    kinds = rng.random(count)
    return [_draw(kind, words, rng) for kind in kinds]


def _draw(kind: float, words: list[str], rng: np.random.Generator) -> str:
    if kind < PLAIN_SHARE:
        return ""
    if kind < PLAIN_SHARE + OPENER_SHARE:
        return OPENERS[rng.integers(len(OPENERS))]
    return WITH_A_WORD[rng.integers(len(WITH_A_WORD))].format(words[rng.integers(len(words))])
