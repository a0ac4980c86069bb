"""A worker without a model: its next token is a hash of what it finds in its own KV, so that the host's mistakes show in the output."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from runtime.batch import BatchResult, Float32, Int32, Logprobs, RowInit, ScheduleBatch, StepStats, WorkerLimits
from runtime.errors import WrongProfile
from runtime.pooling import Pooling
from runtime.sampling_params import SamplingParams
from runtime.worker_info import WorkerInfo

NOTHING = -7
"""What a slot holds before it is written, and what a rejected draft leaves behind."""


def next_token(history: Sequence[int] | Int32, seed: int, vocab_size: int) -> int:
    """The definition: the token after `history`."""
    return zlib.crc32(np.asarray(history, dtype=np.int32).tobytes(), seed & 0xFFFFFFFF) % vocab_size


def logprob(history: Sequence[int] | Int32, rank: int) -> float:
    """A made-up log-probability after `history`; rank 0 is the chosen token's."""
    return -float(zlib.crc32(np.asarray(history, dtype=np.int32).tobytes()) % 997) - rank


def pooled(pooling: Pooling, history: Sequence[int], start: int = 0) -> Float32:
    """A made-up answer to a pooling request whose tokens from `start` on were computed: one vector of 4, or one number per label."""
    if pooling.kind == "labels":
        return np.array([logprob([*history, label], 0) for label in pooling.label_ids], dtype=np.float32)
    states = np.array([[token, token % 7, i, 1] for i, token in enumerate(history)], dtype=np.float32)
    return states[-1] if pooling.kind == "last" else states[start:].sum(0)


def alone(prompt: list[int], sampling: SamplingParams, seed: int, eos_ids: tuple[int, ...], limits: WorkerLimits) -> list[int]:
    """The definition: the whole output of one request, token by token."""
    ids, stops = list(prompt), set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_ids))
    while len(ids) < min(len(prompt) + sampling.max_new_tokens, limits.max_context_len):
        ids.append(next_token(ids, seed, limits.vocab_size))
        if ids[-1] in stops and len(ids) - len(prompt) > sampling.min_new_tokens:
            break
    return ids[len(prompt) :]


@dataclass
class Emitted:
    """What a step emits, request after request."""

    tokens: list[int] = field(default_factory=list)
    accept_lens: list[int] = field(default_factory=list)
    histories: list[list[int]] = field(default_factory=list)
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    pooled: dict[int, Float32] = field(default_factory=dict)


class FakePending:
    """A step whose result is made when it is asked for."""

    def __init__(self, compute: Callable[[], BatchResult]) -> None:
        self._compute = compute

    def wait(self) -> BatchResult:
        return self._compute()


class FakeWorker:
    """KV by slot, a page table by row, last token and length by row; all written only from what `submit` was given.

    With `lookahead`, a slot also holds the token after its own, as EAGLE's draft KV depends on it. What is wrong in a slot that is read
    raises at `wait`, with the request's row. `fail_submit` and `fail_wait` are asked for each step, and may raise.

    With `state_unit`, a row has a recurrent state too: the tokens that it has seen, in this order. Chunks leave copies of it.
    """

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        pages = limits.max_total_tokens // limits.page_size
        slots = (pages + 1) * limits.page_size
        self.token = np.full(slots, NOTHING, dtype=np.int32)
        self.position = np.full(slots, NOTHING, dtype=np.int32)
        self.follower = np.full(slots, NOTHING, dtype=np.int32)
        columns = -(-(limits.max_context_len + 2 * limits.tokens_per_step) // limits.page_size)
        self.table = np.zeros((limits.max_running_requests + 1, columns), dtype=np.int32)
        self.length = np.zeros(limits.max_running_requests + 1, dtype=np.int64)
        self.last = np.zeros(limits.max_running_requests + 1, dtype=np.int64)
        self.inits: dict[int, RowInit] = {}
        self.states: dict[int, list[int]] = {}  # by row
        self.cached_states: dict[int, list[int]] = {}  # by slot
        self.last_chunk: dict[int, int] = {}  # tokens of the latest chunk of a row, if it was not its first
        self.batches: list[ScheduleBatch] = []
        self.unread = 0
        self.most_unread = 0
        self.fail_submit: Callable[[ScheduleBatch], None] = lambda batch: None
        self.fail_wait: Callable[[ScheduleBatch], None] = lambda batch: None

    @property
    def limits(self) -> WorkerLimits:
        return self._limits

    def info(self) -> WorkerInfo:
        return WorkerInfo(startup_seconds={"load": 1.5})

    def start_profile(self, folder: str) -> None:
        if not folder:
            raise ValueError("no folder")
        if folder == "/running":
            raise WrongProfile("A profile is already running. Stop it first.")

    def stop_profile(self) -> str:
        return "trace.json"

    def close(self) -> None:
        return None

    def submit(self, batch: ScheduleBatch) -> FakePending:
        self.fail_submit(batch)
        self.batches.append(batch)
        self._copy(batch)
        self.most_unread = max(self.most_unread, self.unread)
        self.unread += 1
        self._stage(batch)
        if batch.num_prompts and batch.num_decodes:
            assert self._limits.mixed
            assert len(batch.token_ids) + batch.num_decodes * self._limits.tokens_per_step <= self._limits.max_extend_tokens
        result = self._run(batch)

        def read() -> BatchResult:
            self.unread -= 1
            self.fail_wait(batch)
            return result

        return FakePending(read)

    def _copy(self, batch: ScheduleBatch) -> None:
        """All copies at once: what one of them writes, none may read."""
        size = self._limits.page_size
        sources, targets = batch.copy_sources.tolist(), batch.copy_targets.tolist()
        assert len(set(targets)) == len(targets) <= batch.num_prompts
        assert set(targets) <= set(batch.page_ids.tolist())
        assert not set(sources) & set(targets)
        for source, target, count in zip(sources, targets, batch.copy_counts.tolist(), strict=True):
            assert 0 < count < size
            for kept in (self.token, self.position, self.follower):
                kept[target * size : target * size + count] = kept[source * size : source * size + count]

    def _stage(self, batch: ScheduleBatch) -> None:
        for init in batch.new_rows:
            self.inits[init.row] = init
            self.states[init.row] = []
            self.last_chunk.pop(init.row, None)
        for row, slot, length in batch.restored:
            assert row in {init.row for init in batch.new_rows}
            assert len(self.cached_states[slot]) == length
            self.states[row] = list(self.cached_states[slot])
        assert all(1 <= p <= self._limits.max_total_tokens // self._limits.page_size for p in batch.page_ids)
        assert set(batch.page_rows.tolist()) <= set(batch.rows.tolist())
        self.table[batch.page_rows, batch.page_cols] = batch.page_ids
        assert len(set(batch.rows.tolist())) == len(batch.rows) > 0
        assert all(1 <= r <= self._limits.max_running_requests for r in batch.rows)

    # ---- steps

    def _run(self, batch: ScheduleBatch) -> BatchResult:
        step = Emitted()
        self._extend(batch, step)
        self._decode(batch, step)
        k = int(batch.top_logprobs.max())
        live = batch.num_decodes
        return BatchResult(
            token_ids=np.array(step.tokens, dtype=np.int32),
            accept_lens=np.array(step.accept_lens, dtype=np.int32),
            logprobs=self._logprobs(step.histories, k) if k >= 0 else None,
            prompt_logprobs=step.prompt_logprobs,
            pooled=step.pooled,
            stats=StepStats(
                graph=True, padded_size=live + 1, draft_tokens=self._limits.max_accept_len - 1, depth=self._limits.max_accept_len - 1
            )
            if live
            else StepStats(),
        )

    def _extend(self, batch: ScheduleBatch, step: Emitted) -> None:
        E = batch.num_prompts
        assert batch.extend_lens.sum() == len(batch.token_ids) <= self._limits.max_extend_tokens
        assert (batch.len_bounds[:E] == batch.prefix_lens).all()
        assert len(batch.next_tokens) == len(batch.prompt_logprobs) == E
        at = 0
        for i, row in enumerate(batch.rows[:E].tolist()):
            prefix, count, following = (int(x[i]) for x in (batch.prefix_lens, batch.extend_lens, batch.next_tokens))
            assert count >= 1
            fresh = batch.token_ids[at : at + count].tolist()
            at += count
            history = self._read(row, prefix, fresh[0]) + fresh
            if self._limits.state_unit:
                self._apply(row, prefix, history)
                if len(batch.kept_lens) and (kept := int(batch.kept_lens[i])):
                    self._keep(row, prefix, count, kept, int(batch.kept_slots[i]))
                self.last_chunk[row] = count
            if following < 0:
                following = next_token(history, self.inits[row].seed, self._limits.vocab_size)
                step.tokens.append(following)
                step.histories.append(history)
            step.accept_lens.append(int(batch.next_tokens[i] < 0))
            self._write(row, prefix, [*fresh, following])
            self.length[row], self.last[row] = prefix + count, following
            if (pooling := batch.pooling.get(i)) is not None:
                step.pooled[i] = pooled(pooling, history, prefix)
            if batch.prompt_logprobs[i]:
                most = max(2, int(batch.top_logprobs.max()))
                step.prompt_logprobs[i] = self._logprobs([history[: prefix + t + 1] for t in range(count)], most)

    def _decode(self, batch: ScheduleBatch, step: Emitted) -> None:
        limits, E = self._limits, batch.num_prompts
        for row, bound in zip(batch.rows[E:].tolist(), batch.len_bounds[E:].tolist(), strict=True):
            kv_len, last = int(self.length[row]), int(self.last[row])
            assert kv_len <= bound <= kv_len + limits.max_accept_len
            history = [*self._read(row, kv_len, last), last]
            if self._limits.state_unit:
                self._apply(row, kv_len, history[:-1])
            count = 1 + zlib.crc32(bytes(str(history), "ascii")) % limits.max_accept_len
            run = [last]
            for _ in range(count):
                step.histories.append(list(history))
                run.append(next_token(history, self.inits[row].seed, limits.vocab_size))
                history.append(run[-1])
            for offset in range(limits.tokens_per_step):  # rejected drafts leave their mark as well
                slot = self._slot(row, kv_len + offset)
                self.token[slot] = self.position[slot] = self.follower[slot] = NOTHING
            self._write(row, kv_len, run)
            self.length[row], self.last[row] = kv_len + count, run[-1]
            step.tokens += run[1:]
            step.accept_lens.append(count)

    # ---- recurrent states

    def _apply(self, row: int, start: int, history: list[int]) -> None:
        """Apply all of `history`; what was applied before must be its beginning, up to the tokens of a window."""
        state = self.states[row]
        assert state == history[: len(state)], "a state of another text"
        assert start - len(state) <= self._limits.tokens_per_step
        assert len(state) <= start
        self.states[row] = list(history)

    def _keep(self, row: int, prefix: int, count: int, kept: int, slot: int) -> None:
        unit = self._limits.state_unit
        assert 0 <= slot < self._limits.cached_states
        assert prefix < kept <= prefix + count
        assert prefix % unit == kept % unit == 0
        assert self.last_chunk.get(row, unit) >= unit, "the chunk before is pending"
        self.cached_states[slot] = self.states[row][:kept]

    # ---- KV

    def _slot(self, row: int, position: int) -> int:
        page = int(self.table[row, position // self._limits.page_size])
        assert page != 0, "a position without a page"
        return page * self._limits.page_size + position % self._limits.page_size

    def _read(self, row: int, kv_len: int, following: int) -> list[int]:
        """The tokens of positions 0..kv_len - 1; `following` is the one after them."""
        slots = [self._slot(row, p) for p in range(kv_len)]
        tokens = self.token[slots].tolist()
        assert self.position[slots].tolist() == list(range(kv_len)), "a page of another place or owner is read"
        if self._limits.prefix_lookahead:
            assert self.follower[slots].tolist() == [*tokens[1:], following][:kv_len], "KV that looked ahead at another token is read"
        return tokens

    def _write(self, row: int, start: int, run: list[int]) -> None:
        """KV of `run` but for its last token, which only follows."""
        for offset, (token, follower) in enumerate(pairwise(run)):
            slot = self._slot(row, start + offset)
            self.token[slot], self.position[slot], self.follower[slot] = token, start + offset, follower

    # ---- results

    def _logprobs(self, histories: list[list[int]], k: int) -> Logprobs:
        n = len(histories)
        return Logprobs(
            chosen=np.array([logprob(h, 0) for h in histories], dtype=np.float32),
            top_ids=np.tile(np.arange(k, dtype=np.int32), (n, 1)),
            top=np.array([[logprob(h, rank) for rank in range(k)] for h in histories], dtype=np.float32).reshape(n, k),
        )
