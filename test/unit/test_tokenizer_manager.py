"""The tokenizer manager: what it checks, what it sends, and how every request ends."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import msgspec
import pytest

from event_loop import in_event_loop
from runtime.batch import WorkerLimits
from runtime.config.machine import MachineFacts
from runtime.config.model_facts import ModelFacts
from runtime.config.resolve import resolve
from runtime.config.runtime_config import RuntimeConfig
from runtime.config.server_args import ServerArgs
from runtime.errors import (
    ContextTooLong,
    InvalidField,
    QueueFull,
    RequestError,
    ServerDraining,
    ServingError,
    SlowReader,
    WorkerDied,
)
from runtime.managers.generation import Generation, RequestOptions
from runtime.managers.messages import (
    AbortReq,
    CallFailed,
    ControlReply,
    ControlReq,
    DrainReq,
    Finish,
    GenerateReq,
    Heartbeat,
    TextOut,
    TextOutBatch,
)
from runtime.managers.observers.request_end import RequestEnd
from runtime.managers.prompt_encoder import LONG_TEXT
from runtime.managers.schedule_policy import check_memory
from runtime.managers.telemetry.progress import Progress
from runtime.managers.telemetry.scheduler_stats import SchedulerStats
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.models.config import ModelConfig
from runtime.pooling import Pooling
from runtime.sampling_params import MAX_GRAMMAR_CHARS, SamplingParams
from runtime.text.bounded_encoding import BoundedEncoding

CONTEXT = 256
VOCAB = 100


def config(**asked: Any) -> RuntimeConfig:
    facts = ModelFacts(
        path="m",
        load_format="dummy",
        tokenizer_path="m",
        name="m",
        dtype="float32",
        max_context_len=CONTEXT,
        head_dim=16,
    )
    return resolve(ServerArgs(device="cpu", **asked), MachineFacts(cores=1, memory=1 << 30, gpus=(), packages=frozenset()), facts)


def model_config() -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=16,
        rms_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        max_context_len=CONTEXT,
        tie_embeddings=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        window=(-1,),
        eos_ids=(0,),
        bos_id=None,
        dtype="float32",
    )


class Letters:
    """A tokenizer with one token a letter, which remembers the thread it ran in."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    longest_token = 64

    def encode(self, text: str, add_special_tokens: bool = True, bound: BoundedEncoding | None = None) -> list[int]:
        self.threads.append(threading.get_ident())
        return [1] * add_special_tokens + [ord(letter) % VOCAB for letter in text[:CONTEXT]]


class Watcher:
    """An observer that records its events."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def started(self, prompt_tokens: int) -> None:
        self.told.append(("started", prompt_tokens))

    def first_token(self, seconds: float) -> None:
        self.told.append("first")

    def next_tokens(self, seconds: float, tokens: int) -> None:
        self.told.append(("next", tokens))

    def ended(self, seconds: float, finish: Finish | None, progress: Progress) -> None:
        self.told.append(("ended", finish.reason if finish is not None else None))


class Desk:
    """A manager whose messages to the scheduler are recorded; the test writes the replies."""

    def __init__(self, running: int = 4, slots: int = 1024, **asked: Any) -> None:
        self.sent: list[Any] = []
        limits = WorkerLimits(
            max_total_tokens=slots,
            max_running_requests=running,
            max_context_len=CONTEXT,
            max_extend_tokens=64,
            page_size=16,
            vocab_size=VOCAB,
        )
        self.tokenizer = Letters()
        self.manager = TokenizerManager(config(**asked), self.tokenizer, model_config(), limits, self.sent.append)

    @property
    def requests(self) -> list[GenerateReq]:
        return [request for message in self.sent if isinstance(message, GenerateReq) for request in message.samples()]

    @property
    def aborted(self) -> list[str]:
        return [message.rid for message in self.sent if isinstance(message, AbortReq)]

    def reply(self, rid: str, text: str = "", tokens: int = 1, finish: Finish | None = None) -> None:
        out = TextOut(rid=rid, text=text, token_ids=[5] * tokens, progress=Progress(3, 0, tokens), finish=finish)
        self.manager.handle(TextOutBatch(outs=[out]))


LENGTH = Finish(reason="length")
pytestmark = pytest.mark.timeout(10)


async def collect(generation: Generation) -> list[TextOut]:
    return [update async for update in generation]


@in_event_loop
async def test_a_request_is_sent_and_its_updates_arrive_in_order() -> None:
    desk = Desk()
    options = RequestOptions(stream=True, priority=2, cache_salt="s")
    generation = await desk.manager.generate("abc", SamplingParams(max_new_tokens=5), options)
    (request,) = desk.requests
    assert request.input_ids == generation.prompt_ids == [1, 97, 98, 99]
    assert (request.stream, request.priority, request.cache_salt, request.top_logprobs) == (True, 2, "s", -1)
    desk.reply(request.rid, "he")
    desk.reply(request.rid, "llo", 3, LENGTH)
    updates = await collect(generation)
    assert "".join(update.text for update in updates) == "hello"
    assert updates[-1].finish == LENGTH
    assert desk.manager.open_requests == 0
    assert desk.aborted == []


@in_event_loop
async def test_n_choices_are_n_requests_with_their_own_seeds_and_indices() -> None:
    desk = Desk()
    generation = await desk.manager.generate([1, 2], SamplingParams(seed=7), RequestOptions(n=3))
    seeds = [request.seed for request in desk.requests]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    for request in reversed(desk.requests):
        desk.reply(request.rid, finish=LENGTH)
    assert sorted(update.index for update in await collect(generation)) == [0, 1, 2]


@in_event_loop
async def test_drawn_seeds_differ_and_repeat_with_the_server_seed() -> None:
    async def seeds() -> list[int]:
        desk = Desk(random_seed=3)
        for _ in range(3):
            await desk.manager.generate([1], SamplingParams())
        return [request.seed for request in desk.requests]

    first, second = await seeds(), await seeds()
    assert first == second
    assert len(set(first)) == 3
    assert all(0 <= seed < 1 << 63 for seed in first)


@pytest.mark.parametrize(
    ("prompt", "sampling", "options", "field"),
    [
        ([], {}, {}, "prompt"),
        ([VOCAB], {}, {}, "input_ids"),
        ([-1], {}, {}, "input_ids"),
        ([1], {"max_new_tokens": CONTEXT + 1}, {}, "max_new_tokens"),
        ([1] * 250, {"min_new_tokens": 10}, {"fill_context": True}, "min_new_tokens"),
        ([1], {"stop_token_ids": (VOCAB,)}, {}, "stop_token_ids"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, {}, "logit_bias"),
        ([1], {"shown_token_ids": (VOCAB,)}, {}, "shown_token_ids"),
        ([1], {"grammar_after": (VOCAB,)}, {}, "grammar_after"),
        ([1], {"regex": "x" * (MAX_GRAMMAR_CHARS + 1)}, {}, "regex"),
        ([1], {}, {"pooling": Pooling(kind="labels", label_ids=(0, VOCAB))}, "label_token_ids"),
    ],
)
@in_event_loop
async def test_a_value_that_the_model_cannot_take_is_refused_by_name_and_nothing_is_sent(
    prompt: list[int], sampling: dict[str, Any], options: dict[str, Any], field: str
) -> None:
    desk = Desk()
    with pytest.raises(InvalidField) as caught:
        await desk.manager.generate(prompt, SamplingParams(**{"max_new_tokens": 4, **sampling}), RequestOptions(**options))
    assert caught.value.param == field
    assert desk.sent == []
    assert desk.manager.open_requests == 0


@in_event_loop
async def test_a_prompt_must_leave_room_for_one_token() -> None:
    desk = Desk()
    with pytest.raises(ContextTooLong, match=str(CONTEXT - 1)):
        await desk.manager.generate([1] * CONTEXT, SamplingParams())
    await desk.manager.generate([1] * (CONTEXT - 1), SamplingParams(max_new_tokens=1))


@in_event_loop
async def test_lengths_are_cut_to_the_room_that_the_context_leaves() -> None:
    desk = Desk()
    await desk.manager.generate([1] * (CONTEXT - 4), SamplingParams(max_new_tokens=10, min_new_tokens=8))
    await desk.manager.generate([1] * 10, SamplingParams(max_new_tokens=1 << 30), RequestOptions(fill_context=True))
    lengths = [(request.sampling.max_new_tokens, request.sampling.min_new_tokens) for request in desk.requests]
    assert lengths == [(4, 4), (CONTEXT - 10, 0)]


@in_event_loop
async def test_requests_are_cut_to_a_kv_cache_smaller_than_the_context() -> None:
    desk = Desk(slots=64)
    for prompt_len in (1, 40, 64):
        await desk.manager.generate([1] * prompt_len, SamplingParams(), RequestOptions(fill_context=True))
        await desk.manager.generate([1] * prompt_len, SamplingParams(max_new_tokens=50))
    for request in desk.requests:
        check_memory(request, desk.manager.limits)  # the scheduler agrees that it fits
    filling = desk.requests[::2]
    assert [len(r.input_ids) + r.sampling.max_new_tokens for r in filling] == [65, 65, 65]
    with pytest.raises(ContextTooLong, match="64"):
        await desk.manager.generate([1] * 65, SamplingParams())
    with pytest.raises(InvalidField, match="65"):
        await desk.manager.generate([1], SamplingParams(max_new_tokens=66))


@in_event_loop
async def test_long_texts_are_tokenised_off_the_event_loop() -> None:
    desk = Desk()
    await desk.manager.encoder.encode("a")
    await desk.manager.encoder.encode("a" * LONG_TEXT)
    assert desk.tokenizer.threads[0] == threading.get_ident() != desk.tokenizer.threads[1]


@in_event_loop
async def test_the_queue_has_a_bound_and_room_comes_back() -> None:
    desk = Desk(running=2, max_queued_requests=3)
    open_ones = [await desk.manager.generate([1], SamplingParams()) for _ in range(4)]
    with pytest.raises(QueueFull) as caught:
        await desk.manager.generate([1], SamplingParams(), RequestOptions(n=2))
    assert caught.value.retry_after is not None
    open_ones.append(await desk.manager.generate([1], SamplingParams()))
    with pytest.raises(QueueFull):
        await desk.manager.generate([1], SamplingParams())
    open_ones[0].close()
    open_ones.append(await desk.manager.generate([1], SamplingParams()))
    assert desk.manager.open_requests == 5


@in_event_loop
async def test_a_disconnecting_client_ends_the_request_once() -> None:
    desk = Desk()
    async with await desk.manager.generate([1], SamplingParams(), RequestOptions(n=2, stream=True)) as generation:
        desk.reply(desk.requests[0].rid, "x")
        await generation.__anext__()
    assert sorted(desk.aborted) == [request.rid for request in desk.requests]
    generation.close()
    assert len(desk.aborted) == 2
    desk.reply(desk.requests[0].rid, "late", finish=LENGTH)
    assert desk.manager.open_requests == 0


@in_event_loop
async def test_what_a_client_got_before_it_left_is_charged_and_told() -> None:
    desk = Desk()
    charged: list[int] = []
    ends: list[RequestEnd] = []
    desk.manager.charge = lambda client, tokens: charged.append(tokens)
    desk.manager.on_end.append(ends.append)
    async with await desk.manager.generate([1, 2, 3], SamplingParams(), RequestOptions(n=2, stream=True)) as generation:
        progress = Progress(3, completion_tokens=7, queue_seconds=1.0, prefill_seconds=2.0)
        out = TextOut(rid=desk.requests[0].rid, text="x", token_ids=[5] * 7, progress=progress)
        desk.manager.handle(TextOutBatch(outs=[out]))
        await generation.__anext__()
    assert sorted(charged) == [0, 3, 7]
    assert sorted(end.progress.completion_tokens for end in ends) == [0, 7]
    assert ["queue", "prefill", "decode"] in [list(end.phases()) for end in ends]


@in_event_loop
async def test_what_was_generated_for_a_client_that_left_is_charged() -> None:
    desk = Desk()
    charged: list[int] = []
    desk.manager.charge = lambda client, tokens: charged.append(tokens)
    generation = await desk.manager.generate([1, 2, 3], SamplingParams(), RequestOptions(n=2, stream=True))
    first, second = desk.requests
    desk.reply(first.rid, "x", tokens=7)
    generation.close()
    assert sum(charged) == 3 + 7
    desk.reply(first.rid, "y", tokens=9)
    for _ in range(2):
        desk.reply(first.rid, tokens=9, finish=Finish(reason="abort"))
        desk.reply(second.rid, tokens=5, finish=Finish(reason="abort"))
    assert sum(charged) == 3 + 9 + 5


@in_event_loop
async def test_no_name_that_a_client_chose_is_taken_by_the_server() -> None:
    desk = Desk()
    for number in range(10, 30):
        await desk.manager.generate([1], SamplingParams(), rid=f"talon-{number}")
    assert len({(await desk.manager.generate([1], SamplingParams())).rid for _ in range(9)}) == 9


@in_event_loop
async def test_a_cancelled_reader_ends_the_request() -> None:
    desk = Desk()

    async def read() -> None:
        async with await desk.manager.generate([1], SamplingParams(), RequestOptions(stream=True)) as generation:
            await collect(generation)

    reader = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert desk.aborted == [desk.requests[0].rid]


@in_event_loop
async def test_abort_by_name_asks_the_scheduler_and_its_last_update_arrives() -> None:
    desk = Desk()
    generation = await desk.manager.generate([1], SamplingParams(), RequestOptions(n=2), rid="mine")
    with pytest.raises(InvalidField) as caught:
        await desk.manager.generate([1], SamplingParams(), rid="mine")
    assert caught.value.param == "rid"
    desk.manager.abort("someone-else")
    assert desk.aborted == []
    desk.manager.abort("mine")
    assert sorted(desk.aborted) == sorted(request.rid for request in desk.requests)
    await desk.manager.generate([1], SamplingParams(), rid="mine")  # the name is free before the last updates
    *aborted, successor = desk.requests
    for request in aborted:
        desk.reply(request.rid, finish=Finish(reason="abort"))
    assert [update.finish.reason for update in await collect(generation) if update.finish] == ["abort", "abort"]
    desk.manager.abort("mine")
    assert desk.aborted[2:] == [successor.rid]
    await desk.manager.generate([1], SamplingParams(), rid="mine")
    desk.manager.abort(all=True)
    await desk.manager.generate([1], SamplingParams(), rid="mine")


@in_event_loop
async def test_a_request_name_cannot_forge_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(log_requests=True)
    with caplog.at_level("INFO"):
        generation = await desk.manager.generate([1], SamplingParams(), rid="a\nE forged \x1b[31m")
        desk.reply(desk.requests[0].rid, finish=LENGTH)
        await collect(generation)
    (line,) = [message for message in caplog.messages if "forged" in message]
    assert line.startswith("a\\nE forged \\x1b[31m[0]: ")


@pytest.mark.parametrize(("status", "retry"), [(400, None), (429, 1), (500, None)])
@in_event_loop
async def test_a_refusal_by_the_scheduler_is_raised_with_its_status(status: int, retry: int | None) -> None:
    desk = Desk()
    generation = await desk.manager.generate([1], SamplingParams(), RequestOptions(n=2))
    desk.reply(desk.requests[0].rid, finish=Finish(reason="abort", message="no", status=status))
    with pytest.raises(ServingError, match="no") as caught:
        await collect(generation)
    assert (caught.value.status, caught.value.retry_after) == (status, retry)
    assert desk.aborted == [desk.requests[1].rid]
    assert desk.manager.open_requests == 0


@in_event_loop
async def test_updates_before_a_failure_are_still_delivered() -> None:
    desk = Desk()
    generation = await desk.manager.generate([1], SamplingParams(), RequestOptions(stream=True))
    desk.reply(desk.requests[0].rid, "half")
    desk.manager.process_died("scheduler")
    assert (await generation.__anext__()).text == "half"
    with pytest.raises(WorkerDied, match="scheduler"):
        await generation.__anext__()


@in_event_loop
async def test_a_dead_process_fails_open_and_new_requests() -> None:
    desk = Desk()
    generation = await desk.manager.generate([1], SamplingParams())
    reader = asyncio.create_task(collect(generation))
    call = asyncio.create_task(desk.manager.fetch_stats())
    await asyncio.sleep(0.01)
    desk.manager.process_died("detokenizer")
    for waiting in (reader, call):
        with pytest.raises(WorkerDied):
            await waiting
    assert not desk.manager.health.alive()
    for late in (desk.manager.generate([1], SamplingParams()), desk.manager.fetch_stats()):
        with pytest.raises(WorkerDied):
            await late


@in_event_loop
async def test_an_error_in_the_message_loop_fails_open_requests_and_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    generation = await desk.manager.generate([1], SamplingParams())
    call = asyncio.create_task(desk.manager.fetch_stats())
    await asyncio.sleep(0)
    broken: Any = TextOutBatch(outs=[None])  # type: ignore[list-item]

    async def receive() -> Any:
        return broken

    with pytest.raises(AttributeError):
        await desk.manager.serve(receive)
    for waiting in (collect(generation), call):
        with pytest.raises(WorkerDied, match="tokenizer"):
            await waiting
    assert not desk.manager.health.alive()
    assert "Traceback" in caplog.text


@in_event_loop
async def test_a_slow_reader_loses_only_its_own_stream() -> None:
    desk = Desk()
    desk.manager.max_unread = 10
    slow = await desk.manager.generate([1], SamplingParams(), RequestOptions(stream=True))
    other = await desk.manager.generate([1], SamplingParams(), RequestOptions(stream=True))
    for _ in range(11):
        desk.reply(desk.requests[0].rid, "x")
    assert desk.aborted == [desk.requests[0].rid]
    desk.reply(desk.requests[1].rid, "fine", finish=LENGTH)
    assert [update.text for update in await collect(other)] == ["fine"]
    with pytest.raises(SlowReader):
        await collect(slow)


@in_event_loop
async def test_a_reader_that_is_behind_gets_what_waits_as_one_update_per_choice() -> None:
    desk = Desk()
    generation = await desk.manager.generate([1], SamplingParams(), RequestOptions(stream=True, n=2))
    first, second = (request.rid for request in desk.requests)
    desk.reply(first, "a")
    assert await generation.__anext__() == TextOut(rid=first, index=0, text="a", token_ids=[5], progress=Progress(3, 0, 1))
    desk.reply(first, "b", tokens=2)
    desk.reply(second, "x")
    desk.reply(first, "c", tokens=3, finish=LENGTH)
    desk.reply(second, "y", finish=LENGTH)
    assert desk.manager.unread_messages == 0, "all choices have ended, so the manager knows the generation no longer"
    assert generation.unread == 4
    assert await collect(generation) == [
        TextOut(rid=first, index=0, text="bc", token_ids=[5] * 5, progress=Progress(3, 0, 3), finish=LENGTH),
        TextOut(rid=second, index=1, text="xy", token_ids=[5] * 2, progress=Progress(3, 0, 1), finish=LENGTH),
    ]
    assert generation.unread == 0


@in_event_loop
async def test_draining_refuses_new_work_and_waits_for_the_old() -> None:
    desk = Desk()
    desk.manager.health.warm = True
    generation = await desk.manager.generate([1], SamplingParams())
    assert not await desk.manager.drain(0.01)
    assert desk.manager.health.alive()
    assert not desk.manager.health.ready()
    with pytest.raises(ServerDraining):
        await desk.manager.generate([1], SamplingParams())
    desk.reply(desk.requests[0].rid, "done", finish=LENGTH)
    assert await desk.manager.drain(1.0)
    assert [update.text for update in await collect(generation)] == ["done"]
    desk.manager.drain_scheduler()
    assert isinstance(desk.sent[-1], DrainReq)


@in_event_loop
async def test_control_calls_get_their_own_answers() -> None:
    desk = Desk()
    stats, flush = asyncio.create_task(desk.manager.fetch_stats()), asyncio.create_task(desk.manager.flush_cache())
    await asyncio.sleep(0)
    ids = {message.what: message.call_id for message in desk.sent if isinstance(message, ControlReq)}
    desk.manager.handle(ControlReply(call_id=ids["flush_cache"], result=CallFailed(message="requests are running", status=409)))
    desk.manager.handle(ControlReply(call_id=ids["stats"], result=SchedulerStats(num_running_reqs=1)))
    assert await stats == SchedulerStats(num_running_reqs=1)
    with pytest.raises(RequestError, match="running") as failed:
        await flush
    assert failed.value.status == 409
    again = asyncio.create_task(desk.manager.stop_profile())
    await asyncio.sleep(0)
    call = next(m for m in reversed(desk.sent) if isinstance(m, ControlReq))
    desk.manager.handle(ControlReply(call_id=call.call_id, result=CallFailed(message="no profile is running", status=400)))
    with pytest.raises(ServingError, match="no profile") as refused:
        await again
    assert refused.value.status == 400


@in_event_loop
async def test_the_latest_scheduler_statistics_are_kept() -> None:
    desk = Desk()
    desk.manager.handle(Heartbeat(who="scheduler", stats=SchedulerStats(num_running_reqs=2)))
    desk.manager.handle(Heartbeat(who="detokenizer"))
    assert desk.manager.stats == SchedulerStats(num_running_reqs=2)
    assert desk.manager.beats == {"scheduler": 1, "detokenizer": 1}


@in_event_loop
async def test_the_observer_receives_every_event_of_a_choice() -> None:
    desk = Desk()
    watcher = desk.manager.observer = Watcher()
    generation = await desk.manager.generate([1, 2], SamplingParams(), RequestOptions(stream=True))
    rid = desk.requests[0].rid
    desk.reply(rid, "a")
    desk.reply(rid, "", 0)
    desk.reply(rid, "bc", 2, LENGTH)
    await collect(generation)
    (await desk.manager.generate([1], SamplingParams())).close()
    assert watcher.told == [("started", 2), "first", ("next", 2), ("ended", "length"), ("started", 1), ("ended", None)]


@in_event_loop
async def test_the_first_token_of_an_answer_in_one_piece_came_before_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    times: list[float] = []
    gaps: list[tuple[float, int]] = []
    watcher = desk.manager.observer = Watcher()
    watcher.first_token = times.append  # type: ignore[method-assign]
    watcher.next_tokens = lambda seconds, tokens: gaps.append((seconds, tokens))  # type: ignore[method-assign]
    await desk.manager.generate([1], SamplingParams())
    progress = Progress(1, completion_tokens=3, queue_seconds=100.0, prefill_seconds=25.0)
    out = TextOut(rid=desk.requests[0].rid, text="abc", token_ids=[5] * 3, progress=progress, finish=LENGTH)
    later = time.monotonic() + 127.0
    with monkeypatch.context() as clock:
        clock.setattr(time, "monotonic", lambda: later)
        desk.manager.handle(TextOutBatch(outs=[out]))
    assert times == [125.0]
    assert gaps == [(pytest.approx(2.0, abs=0.9), 2)]


@in_event_loop
async def test_a_request_that_cannot_be_sent_leaves_nothing_behind() -> None:
    desk = Desk()
    encoder = msgspec.msgpack.Encoder()
    desk.manager._send = lambda message: desk.sent.append(encoder.encode(message))  # as a socket does
    options = RequestOptions(cache_salt="\ud800", n=2)
    with pytest.raises(UnicodeEncodeError):
        await desk.manager.generate([1, 2], SamplingParams(max_new_tokens=3), options, rid="a")
    assert desk.manager.open_requests == 0
    assert await desk.manager.drain(5.0)
    desk.manager.health.draining = False
    await desk.manager.generate([1, 2], SamplingParams(max_new_tokens=3), rid="a")
    assert desk.manager.open_requests == 1
