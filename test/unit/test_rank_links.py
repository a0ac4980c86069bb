"""What travels between ranks: steps through the ring of shared memory, and signs of life."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from ipv6 import needs_ipv6
from runtime.batch import BatchResult, RowInit, ScheduleBatch, StateCopy
from runtime.distributed import rank_watch, ring
from runtime.distributed.rank_sockets import ResultPusher, ResultSocket, StepPublisher, StepSubscriber
from runtime.distributed.rank_watch import RankBeat, RankWatch
from runtime.distributed.rendezvous import Rendezvous
from runtime.distributed.ring import RingFds, RingFull, RingReader, RingWriter
from runtime.distributed.step_messages import Close, GroupResult, RankCodec, Reset, RunStep, SetRun
from runtime.errors import ConfigError
from runtime.model_executor.followers import Followers
from runtime.sampling_params import SamplingParams

PATIENCE = 30.0


@pytest.fixture
def fds() -> Iterator[RingFds]:
    fds = RingFds.create(2)
    yield fds
    fds.close()


def test_all_readers_get_all_messages_in_order_past_the_end_of_the_ring(fds: RingFds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "CAPACITY", 1 << 12)
    rng = np.random.default_rng(0)
    messages = [rng.bytes(int(size)) for size in rng.integers(0, 3000, 300)] + [b"", rng.bytes(50_000)]
    writer = RingWriter(fds, PATIENCE)
    readers = [RingReader(fds, index) for index in range(2)]

    def read(reader: RingReader) -> list[bytes]:
        return [reader.receive() for _ in messages]

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(read, reader) for reader in readers]
        for message in messages:
            writer.send(message)
        assert [one.result(PATIENCE) for one in found] == [messages, messages]


def test_a_reader_does_not_take_a_frame_of_an_earlier_round(fds: RingFds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processors may see the position of a frame before its bytes: until then the old ones are there, and they are whole."""
    monkeypatch.setattr(ring, "CAPACITY", 1 << 12)
    writer, reader = RingWriter(fds, PATIENCE), RingReader(fds, 0)
    RingReader(fds, 1)._memory.move(2, 1 << 30)  # this one reads nothing
    whole = writer._memory.bytes[: ring.CAPACITY]
    for number in range(4):
        writer.send(bytes([number]) * 1008)
        reader.receive()
    old = bytes(whole)
    writer.send(b"new" * 336)
    new = bytes(whole)
    whole[:] = old
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(reader.receive)
        time.sleep(0.1)
        whole[:] = new
        assert found.result(PATIENCE) == b"new" * 336


def test_a_reader_that_does_not_read_is_named(fds: RingFds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "CAPACITY", 1 << 12)
    writer, reader = RingWriter(fds, 0.05), RingReader(fds, 0)
    for _ in range(4):
        writer.send(bytes(900))
        reader.receive()
    with pytest.raises(RingFull, match=r"^rank 2 read no step"):
        writer.send(bytes(900))


def test_steps_arrive_as_they_were_sent() -> None:
    codec, ints = RankCodec(), np.arange(5, dtype=np.int32)
    init = RowInit(3, 7, SamplingParams(temperature=0.5, logit_bias={4: -1.5}, stop=("a",)), -(1 << 62), ints, ints[::2])
    batch = ScheduleBatch(
        9, ints, ints + 1, ints - 1, [init], ints, ints, ints, ints[:3], ints[1:4], ints[2:],
        ints[:2], ints[:2], ints, ints[:2], np.array([True, False]),
        restored=[StateCopy(3, 5, 64)], kept_lens=ints[1:3], kept_slots=ints[:2],
    )  # fmt: skip
    found = codec.decode(codec.encode(RunStep(batch)))
    assert isinstance(found, RunStep)
    for name in ScheduleBatch.__slots__:
        mine, its = getattr(found.batch, name), getattr(batch, name)
        if isinstance(its, np.ndarray):
            assert mine.dtype == its.dtype
            assert np.array_equal(mine, its)
    assert found.batch.restored == [StateCopy(3, 5, 64)]
    (row,) = found.batch.new_rows
    assert (row.row, row.prompt_len, row.sampling, row.seed) == (3, 7, init.sampling, -(1 << 62))
    assert row.history is not None
    assert row.history.tolist() == [0, 2, 4]
    for message in (SetRun(("eager",)), SetRun(()), Reset(), Close()):
        assert codec.decode(codec.encode(message)) == message


def test_steps_leave_out_what_only_rank_0_reads() -> None:
    frames = list[bytes]()

    class Sender:
        def send(self, frame: bytes) -> None:
            frames.append(frame)

    ints = np.arange(5, dtype=np.int32)

    def step() -> ScheduleBatch:
        return ScheduleBatch(1, ints, ints, ints, [RowInit(3, 5, SamplingParams(), 0, ints, ints, tokens=ints)])

    batch, sender, watch = step(), Sender(), None
    followers: Any = Followers([sender], watch, None)  # type: ignore[list-item, arg-type]
    for each in (batch, ScheduleBatch(2, ints[:0], ints[:0], ints[:0], sections=[batch, step()])):
        followers.run(each, ())
        message = RankCodec().decode(frames[-1])
        assert isinstance(message, RunStep)
        for section in message.batch.parts:
            (row,) = section.new_rows
            assert row.history is not None
            assert (row.history.tolist(), row.tokens.tolist()) == (ints.tolist(), [])
    assert batch.new_rows[0].tokens is ints


class Heard:
    """Waits for what `lost` is called with."""

    def __init__(self) -> None:
        self.words, self._event = "", threading.Event()

    def __call__(self, words: str) -> None:
        self.words = words
        self._event.set()

    def wait(self) -> str:
        assert self._event.wait(PATIENCE)
        return self.words


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "PERIOD", 0.02)


def watched_rank(folder: Path, lost: Heard, alone: Heard) -> tuple[RankWatch, RankBeat]:
    """Rank 0's end, which says whom it lost, and the end of rank 1, which says why it ends by itself; both have begun."""
    watch = RankWatch(f"ipc://{folder}/w", range(1, 2), lost)
    watch.start()
    beat = RankBeat(watch.address, 1, alone)
    beat.start()
    return watch, beat


@pytest.mark.usefixtures("quick")
def test_ranks_that_are_alive_are_not_lost_and_silent_ones_are(tmp_path: Path) -> None:
    lost, never = Heard(), Heard()
    watch = RankWatch(f"ipc://{tmp_path}/w", range(1, 3), lost)
    told = Heard()
    first, second = (RankBeat(watch.address, rank, heard) for rank, heard in ((1, told), (2, never)))
    first.start()
    second.start()
    watch.start()
    assert not lost._event.wait(1.0)
    second.close()
    assert lost.wait().startswith("rank 2 hangs or is gone")
    assert told.wait().startswith("rank 0 ends: rank 2 hangs or is gone")
    first.close()
    watch.close()
    assert never.words == ""


@pytest.mark.usefixtures("quick")
def test_a_stranger_that_speaks_otherwise_does_not_stop_the_watch(tmp_path: Path) -> None:
    lost = Heard()
    watch, beat = watched_rank(tmp_path, lost, Heard())
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(watch.address)
        for frames in ([b"", b"hello"], [b"hello"], [b"\x91\xa1a"]):
            stranger.send_multipart(frames)
        assert not lost._event.wait(0.5)
    beat.close()
    assert lost.wait().startswith("rank 1 hangs or is gone")
    watch.close()


@needs_ipv6
def test_ranks_of_several_hosts_meet_over_ipv6() -> None:
    assert Rendezvous.at_address("[::1]:5000") == Rendezvous("tcp://[::1]:5000", "lo", "tcp://[::1]:*")


@needs_ipv6
def test_steps_and_results_travel_over_ipv6() -> None:
    publisher, results = StepPublisher("tcp://[::1]:*"), ResultSocket("tcp://[::1]:*", 1)
    subscriber, pusher = StepSubscriber(publisher.address), ResultPusher(results.address)
    publisher.await_readers(1, PATIENCE)
    publisher.send(b"a step")
    assert subscriber.receive() == b"a step"
    tokens = np.array([7, 8], dtype=np.int32)
    pusher.send(GroupResult(4, 1, BatchResult(tokens, tokens[:1])))
    assert results.receive(4)[0].token_ids.tolist() == [7, 8]
    for end in (subscriber, pusher, publisher, results):
        end.close()


@needs_ipv6
@pytest.mark.usefixtures("quick")
def test_signs_of_life_travel_over_ipv6() -> None:
    lost = Heard()
    watch = RankWatch("tcp://[::1]:*", range(1, 2), lost)
    watch.start()
    beat = RankBeat(watch.address, 1, Heard())
    beat.start()
    beat.close("rank 1 failed in step 4: no memory")
    assert lost.wait() == "rank 1 failed in step 4: no memory"
    watch.close()


V4, V6 = (socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.0.1", 5000)), (socket.AF_INET6, socket.SOCK_DGRAM, 0, "", ("::1", 5000, 0, 0))


@needs_ipv6
@pytest.mark.parametrize(("found", "url"), [([V6], "tcp://[::1]:5000"), ([V6, V4], "tcp://127.0.0.1:5000")])
def test_a_name_may_have_ipv6_addresses_only(found: list[Any], url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert Rendezvous.at_address("node-0:5000").url == url


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "no.such.host.invalid"])
def test_a_node_that_has_no_address_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"--dist-init-addr {host}:5000 cannot be reached"):
        Rendezvous.at_address(f"{host}:5000")


def test_node_0_listens_only_at_a_free_port_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"Node 0 cannot listen at .* 192\.0\.2\.1:5000: cannot assign requested address"):
        Rendezvous.at_address("192.0.2.1:5000", listens=True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{address}: address already in use"):
            Rendezvous.at_address(address, listens=True)
        assert Rendezvous.at_address(address).url == f"tcp://{address}"
    assert Rendezvous.at_address(address, listens=True).url == f"tcp://{address}"


@pytest.mark.usefixtures("quick")
def test_a_rank_tells_why_it_ends_and_notices_that_rank_0_is_gone(tmp_path: Path) -> None:
    lost, alone = Heard(), Heard()
    watch, beat = watched_rank(tmp_path, lost, alone)
    beat.close("rank 1 failed in step 4: no memory")
    assert lost.wait() == "rank 1 failed in step 4: no memory"
    watch.close()
    beat = RankBeat(f"ipc://{tmp_path}/w", 1, alone)
    beat.start()
    assert alone.wait().startswith("rank 0 does not answer")
    beat.close()


@pytest.mark.usefixtures("quick")
def test_a_pause_of_rank_0_is_excused_until_it_answers_again(tmp_path: Path) -> None:
    alone = Heard()
    watch, beat = watched_rank(tmp_path, Heard(), alone)
    with watch.pause():
        watch.close()
    assert not alone._event.wait(1.0), "rank 0 said that it would be silent"
    watch = RankWatch(f"ipc://{tmp_path}/w", range(1, 2), Heard())
    watch.start()
    assert not alone._event.wait(0.5)
    watch.close()
    assert alone.wait().startswith("rank 0 does not answer")
    beat.close()


@pytest.mark.usefixtures("quick")
def test_other_ranks_hear_that_rank_0_ends(tmp_path: Path) -> None:
    lost, told = Heard(), Heard()
    watch, beat = watched_rank(tmp_path, lost, told)
    while not watch._senders:
        time.sleep(0.01)
    watch.end("step 4 failed")
    assert told.wait() == "rank 0 ends: step 4 failed"
    assert lost.words == ""
    watch.close()
    beat.close()
