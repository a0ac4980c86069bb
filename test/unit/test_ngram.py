"""Prompt lookup proposes what a plain search proposes."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.speculative.ngram import NgramHistory


def slow_propose(text: list[int], count: int, min_n: int, max_n: int) -> list[int]:
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(text) - 1, n - 1, -1):
            if text[start - n : start] == text[-n:]:
                out = list(text)
                for i in range(count):
                    out.append(out[start + i])
                return out[len(text) :]
    return []


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (2, 4), (1, 5)])
def test_proposals_are_those_of_a_plain_search(seed: int, min_n: int, max_n: int) -> None:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 4, size=400).tolist()
    history = NgramHistory(min_n, max_n)
    done = 0
    while done < len(text):  # chunks of one to two hundred tokens, so that both ways of indexing are met
        step = int(rng.choice([1, 2, 3, 5, 63, 64, 65, 200]))
        history.extend(np.array(text[done : done + step], dtype=np.int32))
        done = min(done + step, len(text))
        assert len(history) == done
        assert history.propose(6) == slow_propose(text[:done], 6, min_n, max_n)


def test_the_way_the_text_arrived_does_not_matter() -> None:
    text = np.random.default_rng(3).integers(0, 100_000, size=500).tolist() * 2
    whole, single = NgramHistory(), NgramHistory()
    whole.extend(text[:700])
    for token in text[:700]:
        single.extend([token])
    assert whole.propose(20) == single.propose(20) == text[700:720]


def test_a_repetition_is_continued_past_the_end_of_the_text() -> None:
    history = NgramHistory()
    history.extend([9, 1, 2, 3, 1, 2, 3])
    assert history.propose(8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_the_longest_ending_wins_over_the_latest() -> None:
    history = NgramHistory(1, 3)
    history.extend([1, 2, 3, 50, 7, 3, 60, 1, 2, 3])
    assert history.propose(1) == [50]


def test_without_a_match_there_is_no_proposal() -> None:
    history = NgramHistory()
    history.extend([1, 2, 3, 4])
    assert history.propose(3) == []
    assert NgramHistory().propose(3) == []
