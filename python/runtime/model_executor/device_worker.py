"""DeviceWorker: all of a `Worker` but its steps: the queue in front of the device, a profiler, and what is said of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod

from runtime.batch import Pending, ScheduleBatch, WorkerLimits
from runtime.model_executor.device_queue import DeviceQueue, Finish
from runtime.model_executor.graph_runner import GraphRunner
from runtime.model_executor.profiler import Profiler
from runtime.model_executor.target import Target


class DeviceWorker(ABC):
    """A `Worker` around one target; what a step is and what `reset` forgets is for each kind to say.

    Attributes:
        runners: those of decode steps that may replay graphs, in the order of a step.
    """

    def __init__(self, target: Target, runners: tuple[GraphRunner, ...], limits: WorkerLimits, facts: dict[str, object]) -> None:
        self.runners = runners
        self._target, self._limits, self._facts = target, limits, facts
        self._queue = DeviceQueue(self._step, target.device)
        self._profiler = Profiler("scheduler", target.device)

    @property
    def limits(self) -> WorkerLimits:
        """What the device side can hold."""
        return self._limits

    @property
    def all_runners(self) -> tuple[GraphRunner, ...]:
        """All that may replay graphs: `runners`, and that of short prompts."""
        return (*self.runners, *self._target.prompt_runners)

    def submit(self, batch: ScheduleBatch) -> Pending:
        """Queue one step and return at once."""
        return self._queue.submit(batch)

    def info(self) -> dict[str, object]:
        """What was chosen and measured at start, and how steps ran since."""
        return {**self._facts, "graph_runs": [runner.runs() for runner in self.all_runners]}

    def reset(self) -> None:
        """Forget every request and all that was counted, between steps. For checks before serving."""
        self._queue.run(self._forget)

    def start_profile(self, folder: str) -> None:
        """Begin a torch trace."""
        self._queue.run(lambda: self._profiler.start(folder))

    def stop_profile(self) -> str:
        """End the trace; returns its file."""
        return str(self._queue.run(self._profiler.stop))

    def close(self) -> None:
        """Finish what is under way."""
        self._queue.close()

    # ---- what a kind adds; outside any graph, on the thread that runs steps

    @abstractmethod
    def _step(self, batch: ScheduleBatch) -> Finish:
        """Launch one step; returns how to collect what it emitted."""

    @abstractmethod
    def _forget(self) -> None:
        """Bring all that steps leave behind to where it was at the start."""
