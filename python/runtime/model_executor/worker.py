"""The worker: runs every step of the scheduler on the device, with one path for plain decoding and all drafting."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from msgspec import structs

from runtime.batch import BatchResult, Int32, Pending, ScheduleBatch, SpeculationChange, WorkerLimits, no_ints
from runtime.distributed.parallel_group import ParallelGroup
from runtime.errors import RanksDiffer, RequestError
from runtime.layers.moe.token_exchange import TokenExchange
from runtime.mem_cache.kv_pool import KVPool
from runtime.model_executor.acceptance_monitor import AcceptanceMonitor
from runtime.model_executor.decodes_pending import DecodesPending, send_to_host
from runtime.model_executor.depth import DepthControl
from runtime.model_executor.depth_controller import Observed
from runtime.model_executor.device_queue import DeviceQueue, Wait
from runtime.model_executor.eager_drafts import EagerDrafts, verified_chain
from runtime.model_executor.expert_counter import ExpertCounter
from runtime.model_executor.followers import Followers, GroupsPending, SharedPending
from runtime.model_executor.grammar_rows import GrammarRows, GrammarStep
from runtime.model_executor.graph_runner import GraphRunner, RunMode
from runtime.model_executor.iteration import CommittedWindow, DraftCaps, Iteration
from runtime.model_executor.iteration_graph import IterationGraphs, IterationStages
from runtime.model_executor.profiler import Profiler
from runtime.model_executor.ragged_windows import RaggedWindows
from runtime.model_executor.results import join
from runtime.model_executor.staging import HostCopy
from runtime.model_executor.target_model import Chunks, ExtendPass, PromptsPending
from runtime.model_executor.window import load_rows
from runtime.models.decoder import States
from runtime.worker_info import WorkerInfo

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerParts(IterationStages):
    """All parts of a worker.

    Attributes:
        depths: chooses the depth of each iteration.
        monitor: counts acceptance.
        grammars: computes grammar masks.
        iterations: runs whole iterations as one graph.
        experts: counts the distinct experts of decode passes.
    """

    depths: DepthControl
    monitor: AcceptanceMonitor
    grammars: GrammarRows
    iterations: IterationGraphs
    experts: ExpertCounter

    @property
    def kv_pools(self) -> list[KVPool]:
        """The KV pools of the target and of each of the drafter's models; a request has the same pages in all of them."""
        return [self.target.runner.kv_pool, *(model.runner.kv_pool for model in self.drafter.models())]


class Worker:
    """The device side: `runtime.batch.Worker`.

    Attributes:
        parts: for checks and tests that look inside; read only.
        limits: the limits that the scheduler must respect; read only.
        eager_drafts: takes eager samples; read only.
        runners: the graph runners of decode steps, deepest first.
        iteration_runners: the graph runners of whole iterations; they replay only if all `runners` of their depth do.
    """

    def __init__(
        self,
        parts: WorkerParts,
        limits: WorkerLimits,
        info: WorkerInfo,
        group: ParallelGroup,
        exchange: TokenExchange | None = None,
        followers: Followers | None = None,
    ) -> None:
        """
        Args:
            group: the ranks that share the model.
            exchange: exchanges tokens between attention groups; None if there is one group.
            followers: the other ranks of the model; only on rank 0 of several.
        """
        self.parts, self.limits, self._info, self._followers = parts, limits, info, followers
        self._group, self._exchange = group, exchange
        self.runners = tuple(runner for depth in parts.verifier.runners for runner in parts.runners(depth))
        self.iteration_runners = tuple(parts.iterations.runners.values())
        self._queue = DeviceQueue(self._step if followers is None else self._timed_step, parts.target.device)
        self.eager_drafts = EagerDrafts(parts.target, parts.inputs, parts.drafter, parts.verifier)
        self._step_seconds, self._token_checks = 0.0, 0
        self._read_at, self._prompts_read = 0.0, False  # when the last step was read, and whether it had prompts
        self._samples_read = 0  # samples that had been launched then
        self._profiler = Profiler(parts.target.device)

    @property
    def all_runners(self) -> tuple[GraphRunner, ...]:
        """All graph runners: those of the attributes, of special verify passes, and of short prompts."""
        return (*self.runners, *self.parts.verifier.special, *self.iteration_runners, *self.parts.target.prompt_runners)

    def submit(self, batch: ScheduleBatch) -> Pending:
        """Queue one step and return immediately."""
        if self._group.rank == 0:
            self.parts.depths.choose(batch)
            possible = batch.depth > 0 and not batch.has_prompts and batch.longest + batch.depth < self.limits.max_context_len
            batch.sample = self.parts.monitor.choose_sample(batch.depth, possible)
            for section in batch.sections:
                section.depth, section.sample = batch.depth, batch.sample
        # A batch without sections runs identically in all attention groups.
        own = batch.sections[self._exchange.group.rank] if self._exchange is not None and batch.sections else batch
        if self._followers is None:
            return self._queue.submit(own)
        with self._followers.start.of(batch.step):
            self._followers.run(batch, tuple(runner.mode.value for runner in self.all_runners))
            shared = SharedPending(self._queue.submit(own), batch.step, self._followers)
        return GroupsPending(shared, self.parts.depths.observer_of_groups(batch)) if batch.sections else shared

    @property
    def answering_group(self) -> int | None:
        """The attention group whose results this rank sends to rank 0; None if it sends none."""
        leads = self._exchange is not None and self._group.rank > 0 and self.parts.target.runner.model.context.group.rank == 0
        return self._exchange.group.rank if self._exchange is not None and leads else None

    def set_run(self, modes: Sequence[str]) -> None:
        """Set the run mode of each of `all_runners` for the following steps, on a follower."""
        for runner, mode in zip(self.all_runners, modes, strict=True):
            runner.mode = RunMode(mode)

    def info(self) -> WorkerInfo:
        """The choices and measurements of the start-up, and counts of the steps since."""
        runs, experts = [runner.runs() for runner in self.all_runners], self.parts.experts
        info = structs.replace(self._info, graph_runs=runs, acceptance=self.parts.monitor.stats())
        info.distinct_experts, info.distinct_experts_by_layer = experts.mean, experts.by_layer
        if (controller := self.parts.depths.controller) is not None:
            info.depth = controller.info()
        if self._followers is not None:
            exchanges = self.parts.target.runner.model.context.group.exchange_seconds
            exchanges += 0.0 if self._exchange is None else self._exchange.group.exchange_seconds
            info.exchange_share = round(exchanges / max(self._step_seconds, exchanges), 4) if exchanges else None
            info.token_checks = self._token_checks
        return info

    def reset(self) -> None:
        """Forget every request and all counts, between steps. For checks before serving."""
        if self._followers is not None:
            self._followers.reset()
        self._queue.run(self._reset)

    def run_between_steps(self, function: Callable[[], T]) -> T:
        """Call `function` on the thread that runs steps, after all steps that were submitted. For checks and tests."""
        return self._queue.run(function)

    def change_speculation(self, change: SpeculationChange) -> None:
        """Change the depth or synthetic acceptance, after all steps that were submitted."""
        if change.acceptance is not None and self._followers is not None:
            name = "speculative_synthetic_accept_length"
            raise RequestError(f"{name} cannot change if several ranks share the model.", name)
        self._queue.run(lambda: self._change_speculation(change))

    def _change_speculation(self, change: SpeculationChange) -> None:
        if change.depth is not None:
            self.parts.depths.fix(change.depth)
        if change.acceptance is not None:
            self.parts.accepter.set_synthetic(change.acceptance)
            self.parts.monitor.reset_alarm()  # pairs before and after the change are not comparable

    def start_profile(self, folder: str) -> None:
        """Start a torch trace."""
        self._queue.run(lambda: self._profiler.start(folder))

    def stop_profile(self) -> str:
        """End the trace; returns its file."""
        with nullcontext() if self._followers is None else self._followers.watch.pause():
            return self._queue.run(self._profiler.stop)

    def close(self) -> None:
        """Finish the submitted steps, and end the threads."""
        self._queue.close()
        self.parts.grammars.close()
        if self._followers is not None:
            self._followers.close()

    def _reset(self) -> None:
        self.parts.target.reset()
        self.parts.drafter.reset()
        self.parts.monitor.reset()
        self.parts.grammars.reset()
        self.parts.experts.reset()
        self.parts.target.agreement.reset()

    def _timed_step(self, batch: ScheduleBatch) -> Wait:
        started = time.perf_counter()
        finish = self._step(batch)
        self._step_seconds += time.perf_counter() - started
        return finish

    # ---- a step: launches work and returns a function that waits for its result; outside graphs, except the runners' functions

    def _step(self, batch: ScheduleBatch) -> Wait:
        try:
            return self._launch(batch)
        except Exception:
            self.parts.target.forget(batch.rows)
            raise

    def _launch(self, batch: ScheduleBatch) -> Wait:
        target, depth = self.parts.target, batch.depth
        most = max(batch.num_decodes, batch.pad_decodes)
        verifier = self.parts.verifier
        shared = 0 if len(batch.widths) else verifier.shared_size(depth, most, batch.shared_tokens)
        size = len(batch.widths) or shared or (verifier.padded_size(depth, most) if most else 0)
        if self._exchange is not None:
            self._exchange.rows = batch.pad_tokens
        if len(batch.copy_counts):
            target.copy_pages(batch, self.parts.kv_pools)
        chunk_rows, rows = target.stage_rows(batch, size)
        self.parts.drafter.admit(batch.new_rows)
        self.eager_drafts.admit(batch.new_rows)
        self.parts.grammars.admit(batch.new_rows)
        if batch.num_prompts:
            target.stage_states(batch, chunk_rows)
        chunks = target.stage_chunks(batch, chunk_rows) if batch.num_prompts else None
        prompt_grammar = self.parts.grammars.step(batch.prompt_rows, batch.num_prompts, wanted=batch.next_tokens < 0)
        prompts, decodes, grammar = None, None, None
        if most:
            iteration = self._begin(batch, rows, depth, batch.shared_tokens if shared else 0)
            grammar, guesses = iteration.grammar, self._guesses(iteration)
            if chunks is None and self.parts.iterations.serves(iteration):
                decodes = self._replay(iteration)
            else:
                prompts, decodes = self._iterate(batch, chunks, prompt_grammar, iteration)
            if guesses is not None:
                decodes = replace(decodes, guessed=HostCopy(self.parts.accepter.agrees(iteration, guesses)))
        elif chunks is not None:
            extend, prompts = self._sample_next(batch, chunks, prompt_grammar, target.run(chunks)[0])
            self.parts.drafter.follow_prompt(extend)
        return (lambda: self._read(batch, prompts, decodes, (prompt_grammar, grammar))) if target.reads_results else _read_nothing

    def _sample_next(
        self, batch: ScheduleBatch, chunks: Chunks, grammar: GrammarStep | None, states: States
    ) -> tuple[ExtendPass, PromptsPending]:
        """Sample for chunks that end a prompt; `grammar`: the constrained requests among them."""
        mask = None if grammar is None else grammar.first()
        extend, prompts = self.parts.target.sample_next(batch, chunks, states, mask)
        if grammar is not None:
            self.parts.grammars.record(grammar, extend.next_tokens[:, None])
        return extend, prompts

    def _begin(self, batch: ScheduleBatch, rows: torch.Tensor, depth: int, shared_tokens: int) -> Iteration:
        """An iteration of the decode rows, int64 [size], over a prefix of `shared_tokens`. Their state is not in its inputs yet."""
        started, parts, size = time.perf_counter(), self.parts, len(rows)
        host_rows, len_bounds = batch.decode_rows, batch.decode_len_bounds
        bounds = np.zeros(size, dtype=np.int32)
        bounds[: len(host_rows)] = len_bounds
        needs = parts.target.rows.needs(host_rows)
        grammar = parts.grammars.step(host_rows, size, parts.drafter.spec.shape.at_depth(depth).num_draft_tokens)
        unfollowed = parts.drafter.before_iteration(host_rows, len_bounds, depth, needs)
        iteration = Iteration(
            depth=depth,
            host_rows=host_rows,
            rows=rows,
            kv_lens=parts.inputs.kv_lens(size),
            last_tokens=parts.inputs.last_tokens(size),
            bounds=bounds,
            needs=needs,
            top_logprobs=int(batch.top_logprobs.max(initial=-1)),
            sample=batch.sample,
            grammar=grammar,
            caps=self._caps(host_rows, depth, size, batch.widths),
            ragged=RaggedWindows.of(batch.widths, depth + 1, parts.target.staging.upload) if len(batch.widths) else None,
            greedy=None if parts.depths.controller is None else parts.target.rows.greedy(host_rows),
            started=started,
            shared_tokens=shared_tokens,
            unfollowed=unfollowed,
        )
        return self.eager_drafts.begin(iteration)

    def _guesses(self, iteration: Iteration) -> torch.Tensor | None:
        """int64 [live]: the guesses to compare with an iteration that is about to run without drafts; None if there are none."""
        plain = iteration.depth == 0 < iteration.live and iteration.grammar is None
        wanted = plain and iteration.needs.any_greedy and self.parts.depths.controller is not None
        return self.parts.drafter.guesses(iteration.rows[: iteration.live]) if wanted else None

    def _caps(self, host_rows: Int32, depth: int, size: int, widths: Int32) -> DraftCaps | None:
        """The draft limits of these rows, lowered to their window `widths`; None if none is below `depth`."""
        caps = self.parts.target.rows.draft_caps(host_rows)
        if len(widths):
            caps = np.minimum(caps, widths[: len(caps)] - 1)
        if not depth or caps.min(initial=depth) >= depth:
            return None
        padded = np.zeros(size, dtype=np.int64)
        padded[: len(caps)] = caps
        (on_device,) = self.parts.target.staging.upload(padded)
        return DraftCaps(caps, on_device)

    def _replay(self, iteration: Iteration) -> DecodesPending:
        """As `_iterate`, by one graph."""
        with self._profiler.span("iteration"):
            emitted, verified = self.parts.iterations.run(iteration)
            experts = self.parts.experts.sample(iteration.live * (iteration.depth + 1))
            compared = self.eager_drafts.compare(iteration, emitted)
            decodes = send_to_host(self.parts.target, iteration, emitted, verified, None, experts, compared)
            if iteration.sample.taken:
                self.eager_drafts.draft(iteration, verified_chain(iteration, emitted, verified))
            return decodes

    def _iterate(
        self, batch: ScheduleBatch, chunks: Chunks | None, prompt_grammar: GrammarStep | None, iteration: Iteration
    ) -> tuple[PromptsPending | None, DecodesPending]:
        """Load the rows, propose, verify, accept, commit, follow. Prompt chunks run in the verify pass."""
        target, drafter, verifier = self.parts.target, self.parts.drafter, self.parts.verifier
        load_rows(self.parts.inputs, iteration.rows, target.rows)
        extend, prompts = None, None
        with self._profiler.span("draft_decode"):
            window = drafter.propose(iteration)
        if iteration.grammar is not None:
            iteration.grammar.start_masks(window)
        with self._profiler.span("verify"):
            verify_batch, experts = verifier.fill(iteration, window), None
            if chunks is None:
                verified = verifier.run(iteration, verify_batch)
                experts = self.parts.experts.sample(iteration.live * window.width if iteration.ragged is None else None)
            else:
                states, window_states = target.run(chunks, verify_batch, iteration.live)
                verified = verifier.result_of(iteration, window_states)
                extend, prompts = self._sample_next(batch, chunks, prompt_grammar, states)
            if iteration.grammar is not None and (mask := iteration.grammar.window_mask()) is not None:  # waits for its thread
                iteration = replace(iteration, mask=mask, needs=replace(iteration.needs, constrained=mask.selected))
            result = self.parts.accepter.accept(iteration, window, verified, verify_batch)
            compared = self.eager_drafts.compare(iteration, result.tokens)
            decodes = send_to_host(target, iteration, result.emitted(), verified, result.path, experts, compared)
            if iteration.grammar is not None:
                self.parts.grammars.record(iteration.grammar, result.tokens[: iteration.live], result.accept_lens[: iteration.live])
            target.agreement.commit(result.tokens[: iteration.live], result.accept_lens[: iteration.live])
        if extend is not None:
            drafter.follow_prompt(extend)
        with self._profiler.span("draft_extend"):
            committed = CommittedWindow(window, result, verified.features)
            drafter.follow(iteration, committed)
        if iteration.sample.taken:
            self.eager_drafts.draft(iteration, committed)
        return prompts, decodes

    def _read(
        self,
        batch: ScheduleBatch,
        prompts: PromptsPending | None,
        decodes: DecodesPending | None,
        grammars: tuple[GrammarStep | None, GrammarStep | None],
    ) -> BatchResult:
        """On the host, possibly one step later: wait, count, and return the results. `grammars`: of prompts, of decode rows."""
        if decodes is not None and decodes.checked:
            if decodes.emitted.wait()[-1].any():
                raise RanksDiffer(batch.step)
            self._token_checks += 1
        decoded, prompted = None if decodes is None else decodes.wait(), None if prompts is None else prompts.wait()
        now = time.perf_counter()  # before work on the host: an iteration takes the time between the results of two
        result = join(prompted, decoded)
        alive = self.parts.depths.read(batch, result)[batch.num_prompts :]
        if decodes is not None and decoded is not None:
            self._observe(decodes, decoded, alive, now, prompts is not None, batch)
        if decodes is not None and decodes.experts is not None:
            self.parts.experts.add(decodes.iteration.live * (decodes.stats.draft_tokens + 1), decodes.experts.wait()[0].astype(np.int64))
            if (controller := self.parts.depths.controller) is not None and (independence := self.parts.experts.independence) is not None:
                controller.correct(independence)
        self._read_at, self._prompts_read, self._samples_read = now, prompts is not None, self.eager_drafts.samples
        self.parts.drafter.observe(batch.rows, result)
        for grammar, offset in zip(grammars, (0, batch.num_prompts), strict=True):
            if grammar is not None:
                result.grammar_failures.update(grammar.failures(offset, result))
        return result

    def _observe(
        self, decodes: DecodesPending, decoded: BatchResult, alive: np.ndarray, now: float, with_prompts: bool, batch: ScheduleBatch
    ) -> None:
        """Count acceptance of the requests that are `alive`, bool [n], and pass accepted tokens and time of the iteration on to the depth
        controller.

        Steps run one after another on the device, so an iteration took the time from the results of the previous step, or from
        its own start if that was later, until `now`, when its results had arrived.
        """
        iteration, lens, controller = decodes.iteration, decoded.accept_lens, self.parts.depths.controller
        caps = iteration.caps
        whole = alive if caps is None else alive & (caps.host >= iteration.depth)
        self.parts.monitor.add(iteration, lens[whole], decoded.stats, decodes.pairs(whole))
        # Draft extend over prompts runs after their results are read.
        usual = not (with_prompts or self._prompts_read or iteration.grammar)
        seconds = now - max(self._read_at, iteration.started) if usual else None
        # A sample occupies the host while it is launched, before the previous iteration is read, and then the device.
        disturbed = iteration.sample.taken or iteration.delay.taken or self.eager_drafts.samples > self._samples_read
        self.parts.monitor.observe_time(iteration, decoded.stats.graph, seconds, disturbed)
        if controller is None:
            return
        assert iteration.greedy is not None
        drafts = np.full(iteration.live, iteration.depth) if caps is None else caps.host
        greedy, copied = iteration.greedy[alive], batch.copied[alive]
        controller.observe(
            Observed(
                depth=iteration.depth,
                accept_lens=lens[alive],
                caps=drafts[alive],
                greedy=greedy,
                copied=copied,
                size=iteration.size,
                kv_tokens=batch.pad_kv or int(iteration.bounds.sum()),
                seconds=None if disturbed else seconds,
                width=0 if iteration.ragged is None else iteration.ragged.tokens // iteration.size,
                rows=iteration.host_rows[alive] if self.parts.depths.tracks(iteration.live) else no_ints(),
                step=batch.step,
                shared=iteration.shared_tokens > 0,
            )
        )
        if decodes.guessed is not None:
            controller.observe_guesses(greedy, decodes.guessed.wait()[0].astype(np.bool_)[alive], copied)


def _read_nothing() -> BatchResult:
    """The result of a step on a rank that reads no results."""
    return BatchResult(no_ints(), no_ints())
