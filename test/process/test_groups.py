"""Attention groups with real processes on the CPU."""

from __future__ import annotations

from process import group_storm


def test_a_storm_over_attention_groups_gives_the_text_of_one() -> None:
    outcome = group_storm.storm(seconds=3.0, groups=2, seed=4)
    assert outcome["wrong"] == []
    assert outcome["answered"] > 4
    assert outcome["spec_accept_length"] > 1.1
