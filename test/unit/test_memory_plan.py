"""The memory plan: for any sizes, no byte is reserved twice and none stays unused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from runtime.errors import ConfigError
from runtime.model_executor.memory_plan import MIB, SAFETY_FRACTION, Budget, plan_memory

GIB = 1 << 30
budgets = st.builds(
    lambda total, used, activations, graphs, rows, slot: Budget(
        total, int(total * (1 - used)), activations, {"graphs": graphs, "rows": rows}, slot
    ),
    total=st.integers(8 * GIB, 144 * GIB),
    used=st.floats(0.05, 0.8),
    activations=st.integers(0, 2 * GIB),
    graphs=st.integers(0, 2 * GIB),
    rows=st.integers(0, GIB),
    slot=st.integers(1024, 512 * 1024),
)


@given(budget=budgets, page=st.sampled_from([1, 16, 64]))
def test_kv_takes_the_rest_to_the_last_page(budget: Budget, page: int) -> None:
    try:
        plan = plan_memory(budget, page, None, None, 64)
    except ConfigError:
        assume(False)
        raise
    kept = budget.activations + sum(budget.reservations.values()) + int(budget.total * SAFETY_FRACTION)
    page_bytes = page * budget.bytes_per_slot
    assert plan.table["KV cache"] == (plan.num_pages + 1) * page_bytes, "the padding page costs as any other"
    assert plan.table["KV cache"] + kept <= budget.free
    assert plan.table["KV cache"] + page_bytes + kept > budget.free, "one more page would have fitted"
    assert sum(plan.table.values()) == budget.total
    assert plan.table["left free"] <= budget.total * SAFETY_FRACTION + page_bytes + 1


def test_the_table_names_the_weights_of_experts() -> None:
    budget = Budget(100 * GIB, 40 * GIB, GIB, {}, 1024, experts=50 * GIB)
    table = plan_memory(budget, 16, None, None, 64).table
    assert (table["expert weights"], table["weights and context"]) == (50 * GIB, 10 * GIB)
    dense = plan_memory(replace(budget, experts=0), 16, None, None, 64).table
    assert dense.keys() == table.keys() - {"expert weights"}
    assert dense["KV cache"] == table["KV cache"]
    assert sum(table.values()) == budget.total


@given(budget=budgets, fraction=st.floats(0.85, 0.99))
def test_a_given_share_holds_weights_and_kv(budget: Budget, fraction: float) -> None:
    plan = plan_memory(budget, 16, None, fraction, 64)
    used = plan.table["weights and context"] + plan.table["KV cache"]
    assert used <= budget.total * fraction < used + 16 * budget.bytes_per_slot + 1


@given(budget=budgets, wanted=st.integers(1, 1 << 24), page=st.sampled_from([1, 16]))
def test_wanted_tokens_are_given_or_a_valid_number_is_named(budget: Budget, wanted: int, page: int) -> None:
    try:
        plan = plan_memory(budget, page, wanted, None, 1)
        assert plan.num_pages == wanted // page
    except ConfigError as error:
        most = re.search(r"Lower it to (\d+)", str(error))
        if most is None:
            return
        assert plan_memory(budget, page, int(most[1]), None, 1).num_pages == int(most[1]) // page
        assert int(most[1]) < wanted


def test_too_few_wanted_tokens_name_the_whole_pages_of_one_request() -> None:
    budget = Budget(100 * GIB, 40 * GIB, GIB, {}, 1024)
    with pytest.raises(ConfigError, match="is 330; one request needs 384, in pages of 64"):
        plan_memory(budget, 64, 330, None, 322)
    assert plan_memory(budget, 64, 384, None, 322).num_pages == 6


@pytest.mark.parametrize(("fraction", "flag"), [(None, "--chunked-prefill-size"), (0.5, "--mem-fraction-static")])
def test_too_little_memory_names_flag_and_amount(fraction: float | None, flag: str) -> None:
    budget = Budget(8 * GIB, 4 * GIB, 5 * GIB if fraction is None else 0, {}, 1 << 20)
    with pytest.raises(ConfigError, match=flag) as caught:
        plan_memory(budget, 16, None, fraction, 1024)
    assert re.search(r"[\d,]+ MiB short of the 1024 tokens", str(caught.value))


def test_wanted_tokens_are_not_lowered_below_one_request() -> None:
    budget = Budget(8 * GIB, 4 * GIB, 3 * GIB, {}, 1 << 20)
    most = plan_memory(budget, 16, None, None, 1).num_pages * 16
    with pytest.raises(ConfigError, match=f"--max-total-tokens 2048 .* Lower it to {most}"):
        plan_memory(budget, 16, 2048, None, most)
    with pytest.raises(ConfigError, match=f"short of the {most + 1} tokens"):
        plan_memory(budget, 16, 2048, None, most + 1)


@given(budget=budgets, page=st.sampled_from([1, 16, 64]), least=st.integers(1 << 16, 1 << 22))
def test_the_missing_amount_is_exact_to_one_mib(budget: Budget, page: int, least: int) -> None:
    try:
        plan_memory(budget, page, None, None, least)
        assume(False)
    except ConfigError as error:
        found = re.search(r"is ([\d,]+) MiB short", str(error))
    assert found is not None
    short = int(found[1].replace(",", "")) * MIB
    assert plan_memory(replace(budget, free=budget.free + short), page, None, None, least).num_pages * page >= least
    with pytest.raises(ConfigError):
        plan_memory(replace(budget, free=budget.free + short - MIB), page, None, None, least)


@given(budget=budgets, page=st.sampled_from([1, 16, 64]))
def test_refused_tokens_need_more_than_is_left(budget: Budget, page: int) -> None:
    try:
        most = plan_memory(budget, page, None, None, 1).num_pages * page
    except ConfigError:
        reject()  # not a page fits
    with pytest.raises(ConfigError, match="--max-total-tokens") as caught:
        plan_memory(budget, page, most + page, None, 1)
    needed, left = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) MiB", str(caught.value)))
    assert needed > left


def test_the_table_shows_reserved_used_and_unused_mib() -> None:
    plan = plan_memory(Budget(8 * GIB, 6 * GIB, GIB, {"verify": 100 * MIB, "draft": 7 * MIB}, 1 << 14), 16, 1024, None, 64)
    kv = plan.table["KV cache"] // MIB
    rows = [re.split(r"  +", line) for line in plan.lines({"verify": 90 * MIB}, 1500 * MIB)]
    assert rows == [
        ["MiB", "reserved", "used", "unused"],
        ["weights and context", "2,048", "2,048", "0"],
        ["activations", "1,024", "1,024", "0"],
        ["verify", "100", "90", "10"],
        ["draft", "7", "7", "0"],
        ["KV cache", str(kv), str(kv), "0"],
        ["all", f"{2048 + 1024 + 107 + kv:,}", f"{8192 - 476:,}", "476", "5.81% of the device"],
    ]
