"""Which requests copy their prompt: against sets of n-grams, over the lives of rows, and how often hashes collide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.model_executor import copied_text
from runtime.model_executor.copied_text import BITS_PER_TOKEN, BLOCK, HITS, MAX_PROMPT, NGRAM, CopiedText, hash_ngrams

ROWS = 4


def int32(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


@dataclass
class Text:
    """One request by the definition, with sets of n-grams. `known` starts at the last tokens before its output."""

    prompt: list[int]
    known: list[int]
    ngrams: set[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.ngrams = {tuple(self.prompt[i : i + NGRAM]) for i in range(len(self.prompt) - NGRAM + 1)}

    @property
    def copied(self) -> bool:
        last = [tuple(self.known[len(self.known) - NGRAM - i : len(self.known) - i]) for i in range(HITS)]
        return all(len(ngram) == NGRAM and ngram in self.ngrams for ngram in last)


class Rows:
    """`CopiedText` and its definition, through the same steps. Bit sets are so large that no two n-grams share a bit."""

    def __init__(self) -> None:
        self.texts, self.step = dict[int, Text](), 0
        with mock.patch.object(copied_text, "BITS_PER_TOKEN", 1 << 16):
            self.own = CopiedText(ROWS, 64)

    def admit(self, row: int, tokens: list[int], prompt_len: int) -> None:
        with mock.patch.object(copied_text, "BITS_PER_TOKEN", 1 << 16):
            self.own.admit(row, self.step + 1, int32(tokens), prompt_len)
        self.texts[row] = Text(tokens[:prompt_len], tokens[-(NGRAM - 1) :])

    def read(self, emitted: dict[int, list[int]]) -> None:
        self.step += 1
        tokens = [token for row in emitted for token in emitted[row]]
        self.own.read(int32(list(emitted)), self.step, int32([len(each) for each in emitted.values()]), int32(tokens))
        for row, new in emitted.items():
            self.texts[row].known += new

    def check(self) -> None:
        rows = list(self.texts)
        assert self.own.copied(int32(rows)).tolist() == [self.texts[row].copied for row in rows]


tokens = st.lists(st.integers(0, 2), max_size=30)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, ROWS - 1), tokens, st.integers(0, 30)),
        st.tuples(st.just("read"), st.lists(st.integers(0, ROWS - 1), unique=True), st.lists(tokens, min_size=ROWS, max_size=ROWS)),
    ),
    max_size=12,
)


@given(steps)
@settings(max_examples=300)
def test_copied_text_is_what_sets_of_ngrams_say(steps: list[tuple]) -> None:
    rows = Rows()
    for step in steps:
        if step[0] == "admit":
            rows.admit(step[1], step[2], min(step[3], len(step[2])))
        else:
            rows.read({row: new for row, new in zip(step[1], step[2], strict=False) if row in rows.texts})
        rows.check()


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_hashes_are_those_of_python_integers(tokens: list[int]) -> None:
    factors = [int(factor) for factor in copied_text._FACTORS]
    ngrams = [tokens[i : i + NGRAM] for i in range(len(tokens) - NGRAM + 1)]
    slow = [sum(factor * token for factor, token in zip(factors, ngram, strict=True)) % 2**64 for ngram in ngrams]
    assert hash_ngrams(np.array(tokens, dtype=np.int64)).tolist() == slow


def test_text_is_copied_from_its_second_ngram_on() -> None:
    rows = Rows()
    rows.admit(1, list(range(100, 150)), 50)
    seen = list[bool]()
    for token in (120, 121, 122, 123, 124, 125, 7, 126, 127, 128, 129, 130):
        rows.read({1: [token]})
        rows.check()
        seen.append(bool(rows.own.copied(int32([1]))[0]))
    assert seen == [False] * 4 + [True] * 2 + [False] * 5 + [True]


def test_a_resumed_request_goes_on_where_it_was() -> None:
    rows, prompt = Rows(), list(range(100, 150))
    rows.admit(1, [*prompt, 120, 121, 122], 50)
    for token, copied in ((123, False), (124, True)):
        rows.read({1: [token]})
        assert rows.own.copied(int32([1]))[0] == copied
    rows.check()


def test_a_row_forgets_the_request_that_had_it() -> None:
    own, prompt = CopiedText(3), int32(list(range(100, 200)))
    rows, lens, copying = int32([1, 2]), int32([6, 6]), int32([*range(100, 106)] * 2)
    own.admit(1, 1, prompt, 100)
    own.admit(2, 1, prompt, 100)
    own.read(rows, 1, lens, copying)
    assert own.copied(rows).tolist() == [True, True]
    own.admit(1, 3, prompt, 100)  # step 2, in which another request had the row, is read later
    assert own.copied(rows).tolist() == [False, True]
    own.read(rows, 2, lens, copying)
    assert own.copied(rows).tolist() == [False, True]
    own.read(rows, 3, int32([1, 1]), int32([106, 106]))
    assert own.copied(rows).tolist() == [False, True], "it continues the new prompt's end, not the old text"


def test_unknown_prompts_are_never_copied() -> None:
    own, rows = CopiedText(2), int32([1])
    own.admit(1, 1, int32([]), 20)
    for step in range(1, 200):
        own.read(rows, step, int32([5]), int32(range(step, step + 5)))
        assert not own.copied(rows)[0]


def test_few_new_texts_count_as_copied_by_chance() -> None:
    """Of prompts that fill their bit sets most, and of neighbouring token ids; at most 1/64, by the share of bits that are set."""
    rng, rows = np.random.default_rng(0), np.arange(256, dtype=np.int32)
    for length, vocabulary in ((64, 128_000), (1024, 128_000), (1024, 2048), (16384, 128_000)):
        own = CopiedText(len(rows), length)
        for row in rows.tolist():
            own.admit(row, 1, rng.integers(0, vocabulary, length).astype(np.int32), length)
        found = 0
        for step in range(1, 41):
            own.read(rows, step, np.full(len(rows), 7), rng.integers(0, vocabulary, 7 * len(rows)).astype(np.int32))
            found += int(own.copied(rows).sum())
        assert found / (40 * len(rows)) < 1.1 / BITS_PER_TOKEN**HITS


def test_long_prompts_keep_their_last_ngrams_in_bounded_memory() -> None:
    own, rows = CopiedText(2, 10 * MAX_PROMPT), int32([1])
    assert own._sets[1].nbytes == 128 << 10
    prompt = np.random.default_rng(0).integers(0, 1 << 17, MAX_PROMPT + 1000).astype(np.int32)
    own.admit(1, 1, prompt, len(prompt))
    for at, copied in ((0, False), (1000, True), (1000 + BLOCK - 2, True), (1000 + BLOCK, True), (len(prompt) - 6, True)):
        own.read(rows, 1, int32([6]), prompt[at : at + 6])
        assert own.copied(rows)[0] == copied
