"""Short prompts wait for others while many requests decode."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime.managers.prompt_wait import LEAST_DECODES, PromptWait
from unit.test_scheduler import Harness, limits_of

BUSY = 64
ENOUGH = 1000


def wait_for(rate: float = 1.5, steps: int = 4) -> PromptWait:
    """After many decode steps with `rate` new prompts each."""
    wait, owed = PromptWait(steps, ENOUGH), 0.0
    for _ in range(200):
        owed += rate
        wait.decoded(int(owed))
        owed -= int(owed)
    return wait


def waiting(prompts: int, tokens: int) -> Callable[[int], tuple[int, int]]:
    def measure(enough: int) -> tuple[int, int]:
        assert enough == ENOUGH
        return prompts, tokens

    return measure


def held(wait: PromptWait, decodes: int, prompts: int, tokens: int) -> int:
    """Decode steps until these prompts run."""
    steps = 0
    while wait.holds(decodes, waiting(prompts, tokens)):
        steps += 1
        assert steps < 100
    return steps


@pytest.mark.parametrize("steps", [0, 1, 4, 7])
def test_prompts_wait_at_most_as_many_steps_as_allowed(steps: int) -> None:
    wait = wait_for(steps=steps)
    assert held(wait, BUSY, 1, 128) == steps
    assert held(wait, BUSY, 1, 128) == steps, "the next ones wait again"


def test_prompts_run_when_waiting_has_cost_as_much_as_a_pass() -> None:
    """A row that waits costs 1/64 of a step, a pass a third of one: 21 such steps of rows."""
    assert held(wait_for(), BUSY, 7, 700) == 3
    assert held(wait_for(), BUSY, 20, 700) == 1
    assert held(wait_for(), BUSY, 22, 700) == 0
    assert held(wait_for(steps=50), LEAST_DECODES, 1, 10) == LEAST_DECODES // 3


def test_prompts_of_enough_tokens_run_at_once() -> None:
    assert held(wait_for(), BUSY, 2, ENOUGH) == 0
    assert held(wait_for(), BUSY, 2, ENOUGH - 1) == 4


def test_prompts_do_not_wait_beside_few_requests() -> None:
    assert held(wait_for(), LEAST_DECODES - 1, 1, 10) == 0


def test_prompts_wait_only_if_others_are_likely_to_come() -> None:
    assert held(wait_for(rate=0.2), BUSY, 1, 10) == 0
    assert held(wait_for(rate=0.3), BUSY, 1, 10) == 4
    assert held(wait_for(rate=0.0), BUSY, 1, 10) == 0


def test_the_first_requests_of_an_idle_server_are_no_rate() -> None:
    wait = PromptWait(4, ENOUGH)
    wait.decoded(256)
    assert held(wait, BUSY, 1, 10) == 0


def test_nothing_is_measured_where_nothing_can_wait() -> None:
    """A cached prefix is looked up for each prompt that waits."""

    def measure(enough: int) -> tuple[int, int]:
        raise AssertionError("not needed")

    assert not wait_for(rate=0.0).holds(BUSY, measure)
    assert not wait_for().holds(0, measure)
    assert not wait_for(steps=0).holds(BUSY, measure)


# ---- in the scheduler


def prompt_steps(steps: int, tokens: int = 5, mixed: bool = False, **settings: object) -> tuple[Harness, list[int]]:
    """40 requests decode; 60 more come one per step. Returns the number of prompts in each prompt step of the latter."""
    limits = limits_of(
        max_total_tokens=8192, max_running_requests=128, saturating_tokens=40, mixed=mixed, tokens_per_step=1, max_extend_tokens=256
    )
    harness = Harness(limits, prefill_delayer_max_delay_passes=steps, **settings)
    asked = [harness.ask(f"a{i}", [i % 40, 1, 2], max_new_tokens=100, ignore_eos=True) for i in range(40)]
    harness.step(3)
    before = len(harness.worker.batches)
    for i in range(60):
        asked.append(harness.ask(f"b{i}", [i % 40] * tokens, i, max_new_tokens=4, ignore_eos=True))
        harness.step()
    harness.run_until_idle()
    for req in asked:
        harness.check_answer(req)
    harness.check_empty()
    return harness, [batch.num_prompts for batch in harness.worker.batches[before:] if batch.num_prompts]


def test_prompts_that_wait_share_steps() -> None:
    alone, shared = prompt_steps(0)[1], prompt_steps(4)[1]
    assert sum(alone) == sum(shared) == 60
    assert len(shared) <= len(alone) / 2, "the rate of new prompts is known only after some steps"
    assert max(shared) >= 4


def test_long_prompts_run_at_once() -> None:
    assert prompt_steps(4, tokens=40, radix_cache=False)[1] == prompt_steps(0, tokens=40, radix_cache=False)[1]


def test_cached_tokens_do_not_count() -> None:
    """The last 20 prompts repeat all but the last token of earlier ones."""
    assert len(prompt_steps(4, tokens=40)[1]) < len(prompt_steps(0, tokens=40)[1])


def test_prompts_in_chunks_go_on_at_once() -> None:
    """Of 50 tokens, at most 16 per step."""
    assert prompt_steps(4, tokens=50, chunked_prefill_size=16)[1] == prompt_steps(0, tokens=50, chunked_prefill_size=16)[1]


def test_prompts_never_wait_where_requests_decode_beside_them() -> None:
    assert prompt_steps(4, mixed=True)[1] == prompt_steps(0, mixed=True)[1]
