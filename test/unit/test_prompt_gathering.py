"""Short prompts wait for each other while many requests decode, but never for long."""

from __future__ import annotations

import pytest

from runtime.batch import CostModel
from runtime.managers.prompt_gathering import MOST_STEPS, PromptGathering
from unit.test_scheduler import Harness, limits_of

COST = CostModel(saturating_tokens=100)


def busy(per_step: int = 1) -> PromptGathering:
    """As after many steps with a new prompt each."""
    gathering = PromptGathering(COST)
    for _ in range(200):
        gathering.planned(per_step)
    return gathering


def steps_held(gathering: PromptGathering, decoding: int, prompts: int = 1, tokens: int = 10) -> int:
    """Steps for which the prompts wait."""
    for step in range(20):
        if not (gathering.may_hold(decoding) and gathering.holds(decoding, prompts, tokens)):
            return step
        gathering.planned(0)
    raise AssertionError("held for ever")


@pytest.mark.parametrize(
    ("decoding", "prompts", "steps"), [(1, 1, 0), (7, 1, 0), (8, 1, 1), (24, 1, 3), (64, 1, 4), (256, 1, 4), (64, 4, 2), (64, 9, 0)]
)
def test_prompts_wait_in_proportion_to_what_a_pass_costs_those_that_decode(decoding: int, prompts: int, steps: int) -> None:
    assert steps_held(busy(), decoding, prompts) == steps <= MOST_STEPS


def test_prompts_that_fill_a_pass_do_not_wait() -> None:
    assert steps_held(busy(), 64, tokens=99) == 4
    assert steps_held(busy(), 64, tokens=100) == 0


def test_prompts_that_come_seldom_do_not_wait() -> None:
    assert steps_held(PromptGathering(COST), 64) == 0
    gathering = busy()
    for _ in range(200):
        gathering.planned(0)
    assert steps_held(gathering, 64) == 0


def test_the_next_prompts_wait_again() -> None:
    gathering = busy()
    assert steps_held(gathering, 64) == 4
    gathering.planned(1)
    assert steps_held(gathering, 64) == 4


def passes(cost: CostModel, arrivals: int) -> tuple[list[int], Harness]:
    """Prompts of each prompt pass while 16 requests decode and one more arrives at each step."""
    h = Harness(limits_of(max_running_requests=64, max_total_tokens=8192, cost_model=cost), max_prefill_tokens=64)
    asked = [h.ask(f"old {i}", [i + 1, 5], seed=i, max_new_tokens=100, ignore_eos=True) for i in range(16)]
    h.step(6)
    first = len(h.worker.batches)
    for i in range(arrivals):
        asked.append(h.ask(f"new {i}", [i % 30 + 1, 7, 8], seed=i, max_new_tokens=4, ignore_eos=True))
        h.step()
    h.run_until_idle()
    for req in asked:
        assert h.tokens(req.rid) == h.expected(req)
    return [batch.num_prompts for batch in h.worker.batches[first:] if batch.num_prompts], h


def test_prompts_that_keep_coming_share_passes_and_change_no_answer() -> None:
    shared, _ = passes(COST, 40)
    alone, _ = passes(CostModel(saturating_tokens=1), 40)
    assert sum(shared) == sum(alone) == 40
    assert len(shared) < 0.7 * len(alone)
    assert max(shared) <= MOST_STEPS + 1
