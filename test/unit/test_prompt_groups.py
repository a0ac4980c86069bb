"""Groups of requests whose converted keys fit the buffer."""

from __future__ import annotations

import pytest

from runtime.layers.attention.prompt_groups import grouped


@pytest.mark.parametrize(
    ("pages", "most", "groups"),
    [
        ([3], 8, [(0, 1)]),
        ([2, 2, 2, 2], 8, [(0, 4)]),
        ([2, 2, 2, 2, 1], 8, [(0, 4), (4, 5)]),
        ([1, 1, 5, 1], 8, [(0, 2), (2, 3), (3, 4)]),
        ([8, 8], 8, [(0, 1), (1, 2)]),
    ],
)
def test_groups_are_full_but_fit_the_buffer(pages: list[int], most: int, groups: list[tuple[int, int]]) -> None:
    assert list(grouped(pages, most)) == groups
