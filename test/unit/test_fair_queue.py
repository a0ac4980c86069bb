"""The fair queue: no client's flood keeps another client waiting."""

from __future__ import annotations

from msgspec import structs
from test_schedule_policy import req
from test_scheduler import Harness, limits_of

from runtime.managers import schedule_policy as policy
from runtime.managers.fair_queue import MAX_REMEMBERED, FairQueue
from runtime.managers.messages import AbortReq, Sample, TokensOutBatch
from runtime.managers.req import Req


def of(client: str, seq: int, tokens: int = 10, priority: int = 0, ceiling: int = 0) -> Req:
    made = req(seq, [1] * tokens, priority=priority, max_new_tokens=10)
    made.request = structs.replace(made.request, client=client, max_priority=ceiling)
    return made


def filled(*reqs: Req) -> FairQueue:
    queue = FairQueue()
    for one in reqs:
        queue.add(one)
    return queue


def drain(queue: FairQueue) -> list[int]:
    """Admit all, one by one; the announced order is the order of admission."""
    announced, order = [one.seq for one in queue], []
    while queue:
        first = next(iter(queue))
        queue.admit(first)
        order.append(first.seq)
    assert order == announced
    return order


def test_one_client_is_served_in_the_order_of_arrival() -> None:
    assert drain(filled(*(of("a", seq) for seq in (3, 1, 2)))) == [1, 2, 3]


def test_clients_take_turns() -> None:
    assert drain(filled(*(of("flood", seq) for seq in range(1, 7)), of("good", 7), of("good", 8))) == [1, 7, 2, 8, 3, 4, 5, 6]


def test_turns_are_weighted_by_tokens() -> None:
    queue = filled(*(of("long", seq, tokens=50) for seq in (1, 2)), *(of("short", seq) for seq in range(3, 8)))
    assert drain(queue) == [1, 3, 4, 5, 2, 6, 7]


def test_a_client_that_waited_saves_up_no_time_and_pays_for_what_it_had() -> None:
    queue = filled(*(of("flood", seq) for seq in range(1, 5)))
    for _ in range(2):
        queue.admit(next(iter(queue)))
    for seq in (5, 6, 7):
        queue.add(of("good", seq))
    assert drain(queue) == [5, 3, 6, 4, 7]
    queue.add(of("good", 8))
    queue.add(of("new", 9))
    assert drain(queue) == [9, 8]


def test_an_ended_request_is_not_charged() -> None:
    first, second = of("a", 1, tokens=80), of("a", 2)
    queue = filled(first, second, of("b", 3))
    queue.remove(first)
    assert drain(queue) == [2, 3]


def test_retracted_requests_come_first_and_are_charged_once() -> None:
    retracted = of("flood", 1)
    retracted.retracted = retracted.was_admitted = True
    assert drain(filled(of("good", 2), retracted, of("flood", 3))) == [1, 2, 3]


def test_a_priority_counts_against_others_up_to_its_ceiling() -> None:
    assert drain(filled(of("a", 1), of("b", 2, priority=9, ceiling=0))) == [1, 2]
    assert drain(filled(of("a", 1), of("b", 2, priority=9, ceiling=1))) == [2, 1]
    assert drain(filled(of("a", 1, priority=2, ceiling=2), of("b", 2, priority=9, ceiling=1))) == [1, 2]
    assert drain(filled(of("a", 1), of("a", 2, priority=9, ceiling=0))) == [2, 1], "among its own requests it always counts"


def test_only_the_shared_priority_protects_from_retraction() -> None:
    assert policy.youngest([of("a", 1, priority=0), of("b", 2, priority=9)]).seq == 2
    assert policy.youngest([of("a", 1, priority=0), of("b", 2, priority=9, ceiling=9)]).seq == 1
    assert policy.youngest([of("a", 1, priority=0), of("a", 2, priority=9)]).seq == 1


def test_a_flood_does_not_starve_another_client() -> None:
    harness = Harness(limits_of(max_running_requests=2))
    for i in range(40):
        harness.ask(f"flood{i}", [i + 2, 5], client="flood", max_new_tokens=8, ignore_eos=True)
    harness.step(2)
    harness.ask("good", [50, 5], client="good", max_new_tokens=8, ignore_eos=True)
    harness.run_until_idle()
    ended = [out.rid for m in harness.sent if isinstance(m, TokensOutBatch) for out in m.outs if out.finish is not None]
    assert ended.index("good") <= 4


def test_samples_of_a_prompt_share_one_prefill() -> None:
    harness = Harness(limits_of(max_running_requests=8, page_size=4))
    prompt = [2 + i * 7 % 30 for i in range(60)]
    request = harness.ask("s0", prompt, max_new_tokens=4, ignore_eos=True, more=tuple(Sample(f"s{i}", i) for i in range(1, 8)))
    harness.run_until_idle()
    for one in request.samples():
        harness.check_answer(one)
    computed = sum(sum(batch.extend_lens) for batch in harness.worker.batches)
    assert computed <= len(prompt) + 7 * 8


def test_a_bad_prompt_refuses_all_its_samples() -> None:
    harness = Harness(limits_of())
    harness.ask("a", [], more=(Sample("b", 1),))
    harness.run_until_idle()
    assert [harness.finish(rid).status for rid in "ab"] == [400, 400]


def test_a_request_that_waits_too_long_is_answered() -> None:
    harness = Harness(limits_of(max_running_requests=1), queue_timeout=0.5)
    harness.ask("runs", [5, 6], max_new_tokens=200, ignore_eos=True)
    harness.ask("waits", [7, 8], max_new_tokens=4)
    harness.step(40)
    assert harness.outs("waits") == []
    harness.step(20)
    assert (harness.finish("waits").status, "--queue-timeout" in harness.finish("waits").message) == (503, True)
    harness.run_until_idle()
    assert harness.finish("runs").reason == "length"


def test_a_request_that_takes_too_long_is_ended() -> None:
    harness = Harness(limits_of(max_running_requests=1), request_timeout=0.5)
    harness.ask("runs", [5, 6], max_new_tokens=200, ignore_eos=True)
    harness.step(20)
    harness.ask("waits", [7, 8], max_new_tokens=8, ignore_eos=True)
    harness.run_until_idle()
    assert (harness.finish("runs").status, "--request-timeout" in harness.finish("runs").message) == (504, True)
    assert harness.finish("waits").reason == "length"


def ends_of(harness: Harness) -> list[str]:
    return [out.rid for m in harness.sent if isinstance(m, TokensOutBatch) for out in m.outs if out.finish is not None]


def test_a_short_prompt_goes_before_the_long_one_of_another_client() -> None:
    harness = Harness(limits_of(max_context_len=400), chunked_prefill_size=16)
    long = harness.ask("long", [2 + i % 30 for i in range(300)], client="flood", max_new_tokens=2, ignore_eos=True)
    same = harness.ask("same", [9, 8, 7], client="flood", max_new_tokens=2, ignore_eos=True)
    harness.step(2)
    short = harness.ask("short", [2 + i % 20 for i in range(30)], client="good", max_new_tokens=2, ignore_eos=True)
    harness.step(7)
    assert ends_of(harness) == ["short"], "two chunks, two tokens and the steps in flight"
    assert all(len(batch.extend_lens) <= 1 for batch in harness.worker.batches), "it shares no step with the long one"
    harness.run_until_idle()
    assert ends_of(harness) == ["short", "long", "same"]
    for request in (long, same, short):
        harness.check_answer(request)


def test_a_long_prompt_is_overtaken_by_no_more_tokens_than_it_has() -> None:
    harness = Harness(limits_of(max_total_tokens=4096, max_context_len=400), chunked_prefill_size=16)
    harness.ask("long", [2 + i % 30 for i in range(300)], client="flood", max_new_tokens=2, ignore_eos=True)
    harness.step(2)
    for i in range(40):
        harness.ask(f"short{i}", [2 + (i + j) % 20 for j in range(30)], client="good", max_new_tokens=1, ignore_eos=True)
    harness.run_until_idle()
    assert ends_of(harness).index("long") <= 10


def test_a_client_with_many_rows_makes_way_for_one_with_few() -> None:
    harness = Harness(limits_of(max_running_requests=4))
    flood = [harness.ask(f"flood{i}", [i + 2, 5, 7], client="flood", max_new_tokens=100, ignore_eos=True) for i in range(8)]
    harness.step(6)
    good = [harness.ask(f"good{i}", [20 + i, 5, 7], client="good", max_new_tokens=8, ignore_eos=True) for i in range(2)]
    harness.step(30)
    assert ends_of(harness) == ["good0", "good1"]
    harness.run_until_idle()
    assert harness.scheduler.stats.num_retracted_requests_total == 2
    for request in (*flood, *good):
        harness.check_answer(request)


def test_a_resumed_request_can_be_overtaken_again() -> None:
    limits = limits_of(max_total_tokens=4096, max_context_len=400, overlap=False)
    harness = Harness(limits, chunked_prefill_size=16, radix_cache=False)
    harness.ask("long", [2 + i % 30 for i in range(200)], client="flood", max_new_tokens=150, ignore_eos=True)
    harness.step(2)
    harness.ask("resumed", [2 + i % 20 for i in range(60)], client="good", max_new_tokens=100, ignore_eos=True)
    harness.step(30)
    harness.scheduler.groups.only.retract_youngest()
    harness.ask("short", [9, 8, 7], client="other", max_new_tokens=1, ignore_eos=True)
    harness.step(3)
    assert ends_of(harness) == ["short"]


def test_no_request_makes_way_for_pages_that_are_free_by_now() -> None:
    harness = Harness(limits_of(max_total_tokens=128))
    flood = [harness.ask(f"flood{i}", [i + 2, 5, 7], client="flood", max_new_tokens=20, ignore_eos=True) for i in range(3)]
    harness.step(2)
    harness.ask("large", list(range(100)), client="flood", max_new_tokens=20)
    harness.step(2)
    harness.inbox.append(AbortReq(rid="large"))
    good = harness.ask("good", [20, 5, 7], client="good", max_new_tokens=8, ignore_eos=True)
    harness.run_until_idle()
    assert harness.scheduler.stats.num_retracted_requests_total == 0
    for request in (*flood, good):
        harness.check_answer(request)


def test_clients_with_equal_shares_are_not_retracted() -> None:
    harness = Harness(limits_of(max_running_requests=4))
    asked = [harness.ask(f"{i}", [i + 2, 5, 7], client=f"c{i % 2}", max_new_tokens=40, ignore_eos=True) for i in range(12)]
    harness.run_until_idle()
    assert harness.scheduler.stats.num_retracted_requests_total == 0
    for request in asked:
        harness.check_answer(request)


def test_clients_that_come_once_are_not_remembered_for_ever() -> None:
    queue = filled(of("heavy", 0, tokens=50_000))
    queue.admit(next(iter(queue)))
    for seq in range(1, 3 * MAX_REMEMBERED):
        queue.add(of(f"visitor {seq}", seq))
        queue.admit(next(iter(queue)))
    assert queue.remembered <= 2 * MAX_REMEMBERED
    queue.add(of("heavy", seq + 1))
    queue.add(of("new", seq + 2))
    assert drain(queue) == [seq + 2, seq + 1], "what a client was given counts as long as it is more than most others were given"
