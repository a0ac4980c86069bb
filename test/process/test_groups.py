"""Attention groups with real processes on the CPU."""

from __future__ import annotations

import pytest

from process import group_storm


@pytest.mark.parametrize("steps", ["3", "auto"])
def test_a_storm_over_attention_groups_gives_the_text_of_one(steps: str) -> None:
    outcome = group_storm.storm(seconds=2.0 if steps == "3" else 30.0, groups=2, seed=4, steps=steps, least=2.0)  # until the depth changes
    assert outcome["wrong"] == []
    assert outcome["answered"] > 4
    if steps == "auto":
        assert len(outcome["spec_depth_steps_total"]) > 1, "the depth changes"
    else:
        assert outcome["spec_accept_length"] > 1.1
