"""Which of several failed children a start is reported to have failed for."""

from __future__ import annotations

import asyncio

import msgspec

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


def test_the_rank_that_failed_first_is_named_although_its_report_is_read_last() -> None:
    async def start() -> ServingError:
        scheduler, worker, detokenizer = children()
        scheduler.report(ChildFailed("rank 0 lost rank 1", is_config=False, at=100.002))
        late = asyncio.get_running_loop().call_later(0.05, worker.report, ChildFailed("no memory", is_config=True, at=100.001))
        error = await first_failure([scheduler, worker, detokenizer], FOUND)
        assert late.when() < asyncio.get_running_loop().time()
        return error

    error = asyncio.run(start())
    assert isinstance(error, ConfigError)
    assert error.message == "no memory"


def test_a_killed_rank_comes_before_those_that_lose_it() -> None:
    async def start() -> ServingError:
        scheduler, worker, detokenizer = children()
        scheduler.report(ChildFailed("rank 0 lost rank 1", is_config=False, at=100.0))
        worker.die("signal SIGKILL")
        return await first_failure([scheduler, worker, detokenizer], FOUND)

    assert asyncio.run(start()).message == "the worker-1 process died during its start (signal SIGKILL)"


def test_an_error_that_no_child_reported_stays() -> None:
    async def start() -> ServingError:
        scheduler, _, detokenizer = children()
        return await first_failure([scheduler, detokenizer], FOUND)

    assert asyncio.run(start()) is FOUND
