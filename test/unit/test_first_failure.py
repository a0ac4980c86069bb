"""Which of several failed children a start is reported to have failed for."""

from __future__ import annotations

import asyncio

import msgspec

from event_loop import in_event_loop
from runtime.entrypoints.child import ChildFailed, ChildReady, ChildStatus
from runtime.entrypoints.child_process import Child, first_failure
from runtime.errors import ConfigError, ServingError

FOUND = ServingError("what was read first")


class ReportingChild(Child):
    """A child that reports what it is told to."""

    end = "exit status 1"

    def describe_end(self) -> str:
        return self.end

    def dump_stacks(self) -> None: ...

    def kill(self) -> None: ...

    def report(self, status: ChildStatus) -> None:
        self._take_status(msgspec.json.encode(status))

    def die(self, end: str) -> None:
        self.end = end
        self._is_gone()


def children() -> tuple[ReportingChild, ReportingChild, ReportingChild]:
    scheduler, worker, detokenizer = map(ReportingChild, ("scheduler", "worker-1", "detokenizer"))
    detokenizer.report(ChildReady())
    return scheduler, worker, detokenizer


@in_event_loop
async def test_the_rank_that_failed_first_is_named_although_its_report_is_read_last() -> None:
    scheduler, worker, detokenizer = children()
    scheduler.report(ChildFailed("rank 0 lost rank 1", is_config=False, at=100.002))
    late = asyncio.get_running_loop().call_later(0.05, worker.report, ChildFailed("no memory", is_config=True, at=100.001))
    error = await first_failure([scheduler, worker, detokenizer], FOUND)
    assert late.when() < asyncio.get_running_loop().time()
    assert isinstance(error, ConfigError)
    assert error.message == "no memory"


@in_event_loop
async def test_a_killed_rank_comes_before_those_that_lose_it() -> None:
    scheduler, worker, detokenizer = children()
    scheduler.report(ChildFailed("rank 0 lost rank 1", is_config=False, at=100.0))
    worker.die("signal SIGKILL")
    error = await first_failure([scheduler, worker, detokenizer], FOUND)
    assert error.message == "the worker-1 process died during its start (signal SIGKILL)"


@in_event_loop
async def test_an_error_that_no_child_reported_stays() -> None:
    scheduler, _, detokenizer = children()
    assert await first_failure([scheduler, detokenizer], FOUND) is FOUND
