"""Typed ends of the ZMQ sockets: what goes in comes out, and an invalid frame is harmless."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from event_loop import in_event_loop
from runtime.managers import messages as io
from runtime.managers.ipc import LARGE_FRAME, AsyncInbox, BadFrame, Codec, Inbox, Outbox, address
from runtime.managers.telemetry.decode_stats import DecodeStats
from runtime.managers.telemetry.progress import Progress
from runtime.managers.telemetry.scheduler_stats import SchedulerStats
from runtime.managers.telemetry.spec_stats import SpecStats
from runtime.sampling_params import SamplingParams
from runtime.worker_info import WorkerInfo

GENERATE = io.GenerateReq(rid="a", input_ids=[1, 2, 3], sampling=SamplingParams(stop=("x",), logit_bias={3: 1.5}), seed=-7)
FROM_SCHEDULER = [
    io.RequestInfo(rid="a", stop=("x",), skip_special_tokens=True, stream=False),
    io.TokensOutBatch(
        outs=[
            io.TokensOut(
                rid="a",
                token_ids=[5],
                progress=Progress(3, 0, 1, 0.5, SpecStats(1, 3, 1, [1, 0]), DecodeStats(4, 3, 2, 1)),
                finish=io.Finish(reason="stop", matched=5),
                logprobs=io.TokenLogprobs(chosen=[None, -0.5], top=[[], [(1, -0.5)]]),
            )
        ]
    ),
    io.ControlReply(call_id="c", result=io.CallFailed(message="no")),
    io.ControlReply(call_id="d", result=SchedulerStats(worker=WorkerInfo(startup_seconds={"load": 1.5}))),
    io.Heartbeat(who="scheduler", stats=SchedulerStats(num_running_reqs=1, spec_by_context={"0": SpecStats(1, 3, 1, [1, 0])})),
]


def test_every_message_arrives_as_it_was_sent(tmp_path: Path) -> None:
    inbox: Inbox[io.ToDetokenizer] = Inbox(tmp_path, "detokenizer", io.ToDetokenizer)
    outbox = Outbox(tmp_path, "detokenizer")
    for message in FROM_SCHEDULER:
        outbox.send(message)
    assert [inbox.receive(5.0) for _ in FROM_SCHEDULER] == FROM_SCHEDULER
    assert inbox.receive() is None
    outbox.close()
    inbox.close()


def test_a_sender_may_come_before_its_reader(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, "scheduler")
    outbox.send(GENERATE)
    inbox: Inbox[io.ToScheduler] = Inbox(tmp_path, "scheduler", io.ToScheduler)
    assert inbox.receive(5.0) == GENERATE
    outbox.close()
    inbox.close()


def test_invalid_frames_are_logged_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inbox: Inbox[io.ToScheduler] = Inbox(tmp_path, "scheduler", io.ToScheduler)
    context = zmq.Context()
    raw = context.socket(zmq.PUSH)
    raw.connect(address(tmp_path, "scheduler"))
    wrong_way = msgspec.msgpack.encode(FROM_SCHEDULER[0])
    with caplog.at_level(logging.ERROR):
        for frame in (b"", b"\xc1", b"cos\nsystem\n(S'true'\ntR.", wrong_way, msgspec.msgpack.encode(GENERATE)):
            raw.send(frame)
        assert inbox.receive(5.0) == GENERATE
    assert sum("not a known message" in record.message for record in caplog.records) == 4
    raw.close()
    context.term()
    inbox.close()


def test_many_threads_may_send_through_one_outbox(tmp_path: Path) -> None:
    inbox: Inbox[io.ToScheduler] = Inbox(tmp_path, "scheduler", io.ToScheduler)
    outbox = Outbox(tmp_path, "scheduler")
    threads = [threading.Thread(target=lambda k=k: [outbox.send(io.StopReq(rid=f"{k}.{i}")) for i in range(50)]) for k in range(4)]
    for thread in threads:
        thread.start()
    got = [inbox.receive(5.0) for _ in range(200)]
    for thread in threads:
        thread.join()
    for k in range(4):
        mine = [m.rid for m in got if isinstance(m, io.StopReq) and m.rid.startswith(f"{k}.")]
        assert mine == [f"{k}.{i}" for i in range(50)]
    outbox.close()
    inbox.close()


@in_event_loop
async def test_an_asyncio_loop_reads_while_it_does_other_things(tmp_path: Path) -> None:
    inbox: AsyncInbox[io.ToTokenizer] = AsyncInbox(tmp_path, "tokenizer", io.ToTokenizer)
    outbox = Outbox(tmp_path, "tokenizer")
    waiting = asyncio.ensure_future(inbox.receive())
    for _ in range(3):
        await asyncio.sleep(0.01)
    assert not waiting.done()
    outbox.send(FROM_SCHEDULER[-1])
    assert await asyncio.wait_for(waiting, 5.0) == FROM_SCHEDULER[-1]
    outbox.close()
    inbox.close()


@in_event_loop
async def test_other_tasks_run_between_large_frames(tmp_path: Path) -> None:
    inbox: AsyncInbox[io.ToTokenizer] = AsyncInbox(tmp_path, "tokenizer", io.ToTokenizer)
    outbox, turns = Outbox(tmp_path, "tokenizer"), 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    large = io.ControlReply(call_id="x" * (LARGE_FRAME + 1), result=io.CacheFlushed(pages=0))
    for _ in range(11):
        outbox.send(large)
    await inbox.receive()
    await asyncio.sleep(0.2)  # the others arrive
    task, before = asyncio.create_task(other()), turns
    for _ in range(10):
        await inbox.receive()
    task.cancel()
    outbox.close()
    inbox.close()
    assert turns - before >= 9


def test_an_address_too_long_for_a_socket_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shorter folder"):
        address(tmp_path / ("x" * 120), "scheduler")


CODEC: Codec[io.ToScheduler] = Codec(io.ToScheduler)
GOOD = [
    msgspec.msgpack.encode(m)
    for m in (GENERATE, io.AbortReq(all=True), io.StopReq(rid="é"), io.ControlReq(call_id="1", what="stats"), io.DrainReq())
]


@settings(max_examples=400)
@given(st.sampled_from(GOOD), st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4), st.integers(0, 300))
def test_a_mutated_frame_is_a_message_or_a_typed_error(frame: bytes, edits: list[tuple[int, int]], cut: int) -> None:
    mutated = bytearray(frame)
    for where, value in edits:
        mutated[where % len(mutated)] = value
    try:
        message = CODEC.decode(bytes(mutated[: len(mutated) - cut] if cut < len(mutated) else mutated))
    except BadFrame:
        return
    assert isinstance(message, (io.GenerateReq, io.AbortReq, io.StopReq, io.ControlReq, io.DrainReq))


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_typed_error(frame: bytes) -> None:
    with pytest.raises(BadFrame):
        CODEC.decode(frame)


def test_deep_nesting_is_a_typed_error() -> None:
    bomb = b"\x82\xa4type\xabGenerateReq\xa8sampling" + b"\x91" * 200_000
    with pytest.raises(BadFrame):
        CODEC.decode(bomb)


def test_extension_types_are_refused() -> None:
    frame = msgspec.msgpack.encode({"type": "StopReq", "rid": msgspec.msgpack.Ext(1, b"payload")})
    with pytest.raises(BadFrame):
        CODEC.decode(frame)
