"""The half of a speculative iteration that no draft cares for: run the target over the window, decide what stands, keep the rows.

Every speculative worker is a way to fill a window of D tokens beside one `Verifier`. Nothing here waits for the device.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from runtime.batch import BatchResult, ForwardMode, ScheduleBatch, StepStats
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.logits_processors import LogitsContext, process_logits
from runtime.layers.random_streams import RandomStream
from runtime.layers.sampler import target_probs, top_logprobs
from runtime.layers.sampling_tables import SamplingNeeds
from runtime.model_executor.graph_runner import Forward, GraphRunner, Outputs, RunnerSpec
from runtime.model_executor.input_buffers import BufferSpec, InputBuffers
from runtime.model_executor.staging import HostCopy
from runtime.model_executor.target import Target, Windows, to_logprobs
from runtime.model_executor.window import fill_window
from runtime.models.decoder import DecoderModel
from runtime.sampling_params import MAX_TOP_LOGPROBS
from runtime.speculative.acceptance import AcceptanceCounters, DriftAlarm
from runtime.speculative.draft_tree import NO_DRAFTS, TreeShape
from runtime.speculative.verify import (
    LOSSLESS,
    AcceptThresholds,
    DraftProbs,
    compaction,
    tree_targets_sampled,
    verify_chain_greedy,
    verify_chain_sampled,
    verify_chain_synthetic,
    verify_tree,
)

log = logging.getLogger(__name__)
JUDGED_ROWS = 256
"""Window positions whose distributions are held at once: 256 of 128,256 tokens are 0.13 GiB, the largest window has 4,096."""
ORACLE_EVERY = 512
"""One iteration in so many runs eagerly, and so do the verification and draft-extend before it, whose features and guesses it starts from:
the sample that the drift alarm holds graphs against."""

RAN = ("graph", "eager_sample", "eager")
"""How the verification of an iteration ran: replayed; eagerly in place of a replay, to be compared with those; eagerly as nothing was
captured for it, it ran in the pass of prompts, or the sample started from it."""


def verify_spec(shape: TreeShape, vocab: int, feature: int, dtype: torch.dtype, launches: int) -> RunnerSpec:
    """Outputs over the window: `logits` float32 [B * D, V], argmax `tokens` int64 [B * D], the draft's `features` [B * D, feature]."""
    D = shape.num_draft_tokens
    return RunnerSpec(
        name="verify" if D > 1 else "paused verify",
        mode=ForwardMode.TARGET_VERIFY,
        width=D,
        outputs=(
            BufferSpec("logits", "token", torch.float32, 0, (vocab,)),
            BufferSpec("tokens", "token", torch.int64, 0),
            BufferSpec("features", "token", dtype, 0, (feature,)),
        ),
        tree_tail=0 if shape.topk == 1 else D,
        launches=launches,
    )


def verify_forward(target: Target, aux_layers: tuple[int, ...]) -> Forward:
    """The function that the verify graph records.

    `features` are the aux states, the last hidden states, or nothing where the width is 0.
    """
    model = target.runner.model

    def forward(batch: ForwardBatch, outputs: Outputs, variant: str) -> None:
        keep_window(model, *model.forward(batch, aux_layers), outputs)

    return forward


def keep_window(model: DecoderModel, hidden: torch.Tensor, aux: torch.Tensor | None, outputs: Outputs) -> None:
    """What a pass over windows comes to: its logits, the likeliest token of each and the draft's features, in `outputs`."""
    model.greedy(hidden, outputs["tokens"], outputs["logits"])
    if outputs["features"].shape[1]:
        outputs["features"].copy_(hidden if aux is None else aux)


@dataclass(frozen=True, slots=True)
class Rules:
    """How drafts are judged.

    Attributes:
        shape: of the window.
        thresholds: lossless unless the user asked otherwise.
        synthetic: float32 [K], acceptance of a chain forced by position, or None.
        to_target, to_draft: between the draft's vocabulary and the target's; None where they are one.
    """

    shape: TreeShape
    thresholds: AcceptThresholds
    synthetic: torch.Tensor | None
    to_target: torch.Tensor | None = None
    to_draft: torch.Tensor | None = None


WITHOUT_DRAFTS = Rules(NO_DRAFTS, LOSSLESS, None)
"""With nothing to accept: the target's token after the last one, chosen as plain decoding chooses it."""


@dataclass(frozen=True, slots=True)
class Pause:
    """When drafting costs more than it brings.

    Attributes:
        above: iterations of more requests than this are of windows of one token, without drafts.
        runner: of their verify passes.
    """

    above: int
    runner: GraphRunner


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration under way, of `size` requests with padding.

    Attributes:
        rows_on_host: int32 [live]: rows of its requests.
        top_logprobs: log-probabilities of each token; -1 for none.
        rules: how its windows are judged; D is the width of theirs.
        runner: of its verify pass.
        rows: int64 [size], on the device; padding: row 0.
        bounds: int32 [size], on the host: KV lengths before the iteration are at most this; padding: 0.
        oracle: whether drafts and verification are of the eager sample, in place of a replay.
        feeds_oracle: whether the next iteration's are, which start from what this one's verification and draft-extend leave.
    """

    rows_on_host: npt.NDArray[np.int32]
    top_logprobs: int
    rules: Rules
    runner: GraphRunner
    size: int
    rows: torch.Tensor
    bounds: npt.NDArray[np.int32]
    needs: SamplingNeeds
    oracle: bool
    feeds_oracle: bool

    @property
    def live(self) -> int:
        """Requests without the padding."""
        return len(self.rows_on_host)

    @property
    def width(self) -> int:
        """D."""
        return self.rules.shape.num_draft_tokens

    @property
    def paused(self) -> bool:
        """Whether it runs without drafts."""
        return self.width == 1


@dataclass(frozen=True, slots=True)
class Accepted:
    """What one verification committed. Device tensors, padding included.

    Attributes:
        accept_lens: int32 [size].
        tokens: int64 [size, D]: the committed tokens, then anything valid.
        path: int64 [size, D]: window index of each committed position (trees), or None for 0, 1, 2, …
        window: int64 [size, D]: the tokens that were verified.
        features: [size * D, feature]: the target's states over the window.
        graph: whether the verify graph was replayed.
    """

    accept_lens: torch.Tensor
    tokens: torch.Tensor
    path: torch.Tensor | None
    window: torch.Tensor
    features: torch.Tensor
    graph: bool


Verdict = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""accept_lens, tokens, path."""


@dataclass(frozen=True, slots=True)
class Flight:
    """The tokens of an iteration on their way to the host."""

    tokens: HostCopy
    logprobs: HostCopy | None
    stats: StepStats


class Verifier:
    """Owner of the verify runners and of the acceptance counters, which know nothing of iterations without drafts.

    Attributes:
        runner: of the verify passes over drafts.
        pause: when to do without; None for never. Checks replace it between steps, to choose how one runs.
    """

    def __init__(self, target: Target, runner: GraphRunner, inputs: InputBuffers, rules: Rules, pause: Pause | None = None) -> None:
        assert rules.synthetic is None or rules.shape.topk == 1, "acceptance is forced on a chain only"
        self.pause = pause
        self._target, self.runner, self._inputs, self._rules = target, runner, inputs, rules
        self.forget()

    def forget(self) -> None:
        """Start counting anew."""
        K = self._rules.shape.num_steps
        self._counters = {ran: AcceptanceCounters(K) for ran in RAN}
        self._alarm = DriftAlarm(K)
        self._iterations = 0

    def counted(self) -> AcceptanceCounters:
        """Acceptance since the start, however it ran."""
        total = AcceptanceCounters(self._rules.shape.num_steps)
        for counters in self._counters.values():
            total.merge(counters)
        return total

    def info(self) -> dict[str, object]:
        """Acceptance since the start, by how iterations ran, and where graphs and the eager sample differ."""
        drift = [{"position": d.position, "graph": d.graph, "eager": d.eager, "z": d.z} for d in self._alarm.check()]
        return {**{ran: counters.to_json() for ran, counters in self._counters.items()}, "drift": drift}

    def padded_size(self, count: int) -> int:
        """Requests that an iteration of `count` runs with, padding included."""
        return self._course(count)[1].size_for(count)

    def begin(self, batch: ScheduleBatch, rows: torch.Tensor) -> Iteration:
        """Begin an iteration of the decode rows of a batch, int64 [size] on the device, padded to `padded_size`.

        Rows and KV lengths go into the shared inputs, where every runner of this iteration reads them.
        """
        first, size = batch.num_prompts, len(rows)
        on_host = batch.rows[first:]
        rules, runner = self._course(len(on_host))
        self._inputs.rows(size).copy_(rows)
        torch.index_select(self._target.rows.kv_lens, 0, rows, out=self._inputs.kv_lens(size))
        bounds = np.zeros(size, dtype=np.int32)
        bounds[: len(on_host)] = batch.len_bounds[first:]
        self._iterations += 1
        oracle, feeds_oracle = ((self._iterations + ahead) % ORACLE_EVERY == 0 for ahead in (0, 1))
        replayed = size in runner.sizes and not first  # other traffic may be accepted otherwise, and is on neither side
        compared = oracle and rules is self._rules and replayed
        needs, k = self._target.rows.needs(on_host), int(batch.top_logprobs.max(initial=-1))
        return Iteration(on_host, k, rules, runner, size, rows, bounds, needs, compared, feeds_oracle)

    def _course(self, count: int) -> tuple[Rules, GraphRunner]:
        """How an iteration of `count` requests goes: with drafts, or without."""
        if self.pause is not None and count > self.pause.above:
            return WITHOUT_DRAFTS, self.pause.runner
        return self._rules, self.runner

    def bare_window(self, rows: torch.Tensor) -> Outputs:
        """What a paused iteration verifies, for `judge`: the last token alone of request rows int64 [size]."""
        return {"tokens": self._target.rows.last_tokens[rows][:, None]}

    def judge(self, turn: Iteration, drafted: Outputs) -> tuple[Accepted, Flight]:
        """Verify the window, commit what stands, and send it to the host.

        Args:
            drafted: `tokens` int64 [size, D]; trees also `parents`, `depths`, `mask`; sampled chains also `probs` float32 [size, K, Vd].
        """
        window = self._window(turn, drafted)
        _, graph = turn.runner.run(window, eager=turn.oracle or turn.feeds_oracle)
        return self._accept(turn, drafted, window, graph)

    def windows(self, turn: Iteration, drafted: Outputs) -> Windows:
        """The windows, to be verified in the pass of prompt chunks; `accept` follows. A chain's."""
        assert turn.rules.shape.topk == 1, "a prompt pass is causal"
        live, outputs = turn.live * turn.width, turn.runner.outputs(turn.size)
        model = self._target.runner.model

        def keep(hidden: torch.Tensor, aux: torch.Tensor | None) -> None:
            keep_window(model, hidden, aux, {name: tensor[:live] for name, tensor in outputs.items()})
            for tensor in outputs.values():
                tensor[live:].zero_()  # padding was not in the pass; what is decided there only has to be valid

        return Windows(self._window(turn, drafted), turn.live, keep)

    def accept(self, turn: Iteration, drafted: Outputs, windows: Windows) -> tuple[Accepted, Flight]:
        """As `judge`, after the pass of prompt chunks that the windows were in."""
        return self._accept(turn, drafted, windows.batch, graph=False)

    def _accept(self, turn: Iteration, drafted: Outputs, window: ForwardBatch, graph: bool) -> tuple[Accepted, Flight]:
        """Decide over a window that was verified, commit what stands, and send it to the host."""
        verified = turn.runner.outputs(turn.size)
        fused = self._fusable(turn)
        lens, tokens, path = self._decide_fused(turn, drafted, verified) if fused else self._decide(turn, drafted, verified)
        accepted = Accepted(lens, tokens, path, drafted["tokens"], verified["features"], graph)
        if not fused:
            self._commit(turn, accepted, window)
        return accepted, self._send(turn, accepted, verified["logits"])

    def rehearse(self, drafted: Outputs) -> None:
        """Judge a window of padding with all that requests may ask for, so that the memory it takes is seen. Commits nothing.

        `drafted`: as for `judge`, for as many requests as can ever run.
        """
        size, device = len(drafted["tokens"]), drafted["tokens"].device
        none = np.zeros(size, dtype=np.int32)
        rows, needs = torch.zeros(size, dtype=torch.int64, device=device), SamplingNeeds.every(size)
        turn = Iteration(none, MAX_TOP_LOGPROBS, *self._course(size), size, rows, none, needs, False, False)
        verified = turn.runner.outputs(size)
        lens, tokens, path = self._decide(turn, drafted, verified)
        accepted = Accepted(lens, tokens, path, drafted["tokens"], verified["features"], False)
        self._send(turn, accepted, verified["logits"]).tokens.wait()
        if turn.rows.is_cuda and turn.rules.shape.topk == 1:  # compiled now, and not when the first batch of this kind comes
            self._decide_fused(replace(turn, rows_on_host=none[:0]), drafted, verified)

    def collect(self, flight: Flight) -> BatchResult:
        """On the host, one iteration later: wait, count, and hand over."""
        tokens, lens = flight.tokens.wait()
        keep = np.arange(tokens.shape[1])[None] < lens[:, None]
        if flight.stats.draft_tokens:
            stats = flight.stats
            counters = self._counters["eager_sample" if stats.oracle else "graph" if stats.graph else "eager"]
            counters.add(lens, draft_tokens=stats.draft_tokens)
            if stats.oracle or stats.graph:
                self._alarm.add(lens, stats.oracle)
        if flight.stats.oracle:
            self._warn_of_drift()
        return BatchResult(
            token_ids=tokens[keep].astype(np.int32),
            accept_lens=lens.astype(np.int32),
            logprobs=to_logprobs(flight.logprobs, keep.flatten()) if flight.logprobs is not None else None,
            stats=flight.stats,
        )

    def _warn_of_drift(self) -> None:
        for drift in self._alarm.check():
            log.warning(
                "acceptance of draft %d is %.3f through graphs and %.3f eager (z = %.1f): a graph reads stale inputs; "
                "restart with --disable-cuda-graph",
                drift.position + 1,
                drift.graph,
                drift.eager,
                drift.z,
            )

    # ---- one iteration, step by step

    def _window(self, turn: Iteration, drafted: Outputs) -> ForwardBatch:
        """The inputs of the verify pass, filled."""
        batch = turn.runner.batch(turn.size)
        batch.seq_len_bounds[:] = turn.bounds + turn.width
        fill_window(batch, self._target.page_table, self._inputs.kv_lens(turn.size), drafted["tokens"], drafted.get("depths"))
        if batch.tree_mask is not None:
            batch.tree_mask.copy_(drafted["mask"].flatten())
        return batch

    def _decide(self, turn: Iteration, drafted: Outputs, verified: Outputs) -> Verdict:
        """Which drafts stand. Padding rows come out as valid as any. Distributions are made for so many requests at a time."""
        needs, D = turn.needs, turn.width
        kv_lens, most = self._inputs.kv_lens(turn.size), max(JUDGED_ROWS // D, 1)
        if turn.size <= most or (needs.all_greedy and not needs.adjusts):
            return self._decide_part(turn, drafted, verified, kv_lens)
        parts = []
        for start in range(0, turn.size, most):
            stop = min(start + most, turn.size)
            one, window = slice(start, stop), slice(start * D, stop * D)
            part = replace(turn, size=stop - start, rows=turn.rows[one], bounds=turn.bounds[one], needs=needs.part(start, stop))
            drafts = {name: tensor[one] for name, tensor in drafted.items()}
            results = {name: verified[name][window] for name in ("logits", "tokens")}
            parts.append(self._decide_part(part, drafts, results, kv_lens[one]))
        lens, tokens, paths = zip(*parts, strict=True)
        return torch.cat(lens), torch.cat(tokens), None if paths[0] is None else torch.cat(paths)

    def _decide_part(self, turn: Iteration, drafted: Outputs, verified: Outputs, kv_lens: torch.Tensor) -> Verdict:
        """`_decide` for requests that are together few enough. kv_lens int32 [size], before the iteration."""
        rules, needs, D = turn.rules, turn.needs, turn.width
        target, probs, ops = verified["tokens"].view(-1, D), None, self._target.rows.tables.ops
        positions = self._positions(drafted, kv_lens)
        if needs.adjusts or not needs.all_greedy:
            logits = self._adjusted(turn, drafted, verified["logits"], positions)
            if needs.adjusts:
                target = logits.argmax(-1)
            if not needs.all_greedy:
                rows = turn.rows.repeat_interleave(D)
                tables = self._target.rows.tables
                probs = target_probs(logits.flatten(0, 1), tables, rows, needs.filtered, needs.any_greedy).view_as(logits)
        if rules.shape.topk > 1:
            return self._decide_tree(turn, drafted, target, probs, positions)
        tokens = drafted["tokens"]
        if rules.synthetic is not None:
            forced = self._uniforms(turn, positions[:, :-1], RandomStream.SYNTHETIC)
            return *verify_chain_synthetic(tokens, target, rules.synthetic, forced, self._vocab), None
        if probs is None:
            return *verify_chain_greedy(tokens, target), None
        final = self._uniforms(turn, positions, RandomStream.TARGET)
        if "probs" not in drafted and rules.thresholds.lossless:
            # Drafts that were looked up, not drawn: choose as plain decoding would and see whether the draft is it. A seed keeps its text.
            chosen = ops.draw(probs.flatten(0, 1), final.flatten()).view_as(target)
            return *verify_chain_greedy(tokens, chosen), None
        q = DraftProbs(drafted["probs"], rules.to_target, rules.to_draft) if "probs" in drafted else None
        accept = self._uniforms(turn, positions[:, :-1], RandomStream.ACCEPT)
        return *verify_chain_sampled(tokens, probs, accept, final, q, rules.thresholds, ops.draw), None

    def _decide_tree(
        self, turn: Iteration, drafted: Outputs, target: torch.Tensor, probs: torch.Tensor | None, positions: torch.Tensor
    ) -> Verdict:
        rules, K, D = turn.rules, turn.rules.shape.num_steps, turn.width
        tokens, parents = drafted["tokens"], drafted["parents"]
        if probs is not None:
            accept = self._uniforms(turn, positions, RandomStream.ACCEPT)
            final = self._uniforms(turn, positions, RandomStream.TARGET)
            target = tree_targets_sampled(tokens, parents, probs, final, accept, rules.thresholds, self._target.rows.tables.ops.draw)
        path, lens, out = verify_tree(tokens, parents, target, K + 1)
        return lens, _widen(out, D), _widen(path, D)

    def _fusable(self, turn: Iteration) -> bool:
        """Whether one kernel may decide and commit: a chain on a GPU, greedy with plain logits or forced."""
        forced = turn.rules.synthetic is not None and not turn.needs.penalised
        greedy = turn.needs.all_greedy and not turn.needs.adjusts
        return turn.rows.is_cuda and turn.rules.shape.topk == 1 and (forced or greedy)

    def _decide_fused(self, turn: Iteration, drafted: Outputs, verified: Outputs) -> Verdict:
        from runtime.speculative.accept_kernel import accept_chain

        state = self._target.rows
        target = verified["tokens"].view(-1, turn.width)
        lens, tokens = accept_chain(
            drafted["tokens"],
            target,
            self._inputs.kv_lens(turn.size),
            turn.rows,
            turn.live,
            state.kv_lens,
            state.last_tokens,
            self._vocab,
            turn.rules.synthetic,
            state.tables.seeds,
        )
        return lens, tokens, None

    def _commit(self, turn: Iteration, accepted: Accepted, window: ForwardBatch) -> None:
        """Move accepted KV to the front (trees) and set the rows."""
        state, live, D = self._target.rows, turn.live, turn.width
        rows, lens, tokens = turn.rows[:live], accepted.accept_lens[:live], accepted.tokens[:live]
        if accepted.path is not None:
            slots = window.out_cache_loc.view(-1, D)[:live]
            self._target.runner.kv_pool.move(*compaction(slots, accepted.path[:live], lens), group=D)
        state.kv_lens[rows] = self._inputs.kv_lens(live) + lens
        state.last_tokens[rows] = tokens.gather(1, lens.to(torch.int64)[:, None] - 1)[:, 0]
        if turn.needs.penalised:
            state.count(rows, tokens, torch.arange(D, device=rows.device) < lens[:, None])

    def _send(self, turn: Iteration, accepted: Accepted, logits: torch.Tensor) -> Flight:
        """Start the copies to the host."""
        live, D = turn.live, turn.width
        lens, tokens = accepted.accept_lens[:live], accepted.tokens[:live]
        logprobs = None
        if turn.top_logprobs >= 0:
            index = None
            if accepted.path is not None:
                index = (torch.arange(live, device=tokens.device)[:, None] * D + accepted.path[:live]).flatten()
            logprobs = HostCopy(*top_logprobs(logits[: live * D], tokens.flatten(), turn.top_logprobs, index))
        stats = StepStats(graph=accepted.graph, padded_size=turn.size, draft_tokens=D - 1, oracle=turn.oracle)
        return Flight(HostCopy(tokens, lens), logprobs, stats)

    # ---- small things

    @property
    def _vocab(self) -> int:
        return self._target.runner.config.vocab_size

    def _positions(self, drafted: Outputs, kv_lens: torch.Tensor) -> torch.Tensor:
        """int64 [size, D]: where the token chosen at each window position will stand."""
        tokens, depths = drafted["tokens"], drafted.get("depths")
        if depths is None:
            depths = torch.arange(tokens.shape[1], device=tokens.device)
        return kv_lens.to(torch.int64)[:, None] + depths + 1

    def _uniforms(self, turn: Iteration, positions: torch.Tensor, stream: RandomStream) -> torch.Tensor:
        tables = self._target.rows.tables
        return tables.ops.uniforms(tables.seeds[turn.rows][:, None], positions, stream)

    def _adjusted(self, turn: Iteration, drafted: Outputs, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """float32 [size, D, V]: logits after penalties that count the drafts before each position as if they stood."""
        window = logits.view(turn.size, turn.width, -1)
        path = _ancestor_tokens(drafted["tokens"], drafted.get("mask")) if turn.needs.penalised else None
        return process_logits(window, LogitsContext(self._target.rows.tables, turn.rows, positions, path), turn.needs)


def _widen(path: torch.Tensor, width: int) -> torch.Tensor:
    """[B, N] -> [B, width], cut or padded with column 0: entries past the accepted ones only have to be valid."""
    if path.shape[1] >= width:
        return path[:, :width]
    return torch.cat([path, path[:, :1].expand(-1, width - path.shape[1])], dim=1)


def _ancestor_tokens(tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """int64 [B, D, D]: for each window position the drafts at and before it on its path, -1 elsewhere. The root is committed already."""
    D = tokens.shape[1]
    index = torch.arange(D, device=tokens.device)
    on_path = (index[None] <= index[:, None])[None] if mask is None else ((mask.view(-1, D)[:, :, None] >> index) & 1).bool()
    return torch.where(on_path & (index > 0), tokens[:, None], -1)
