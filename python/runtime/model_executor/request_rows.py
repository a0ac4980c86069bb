"""Per-request device state in fixed rows: length, last token, sampling parameters, token counts.

Rows are written on admission and read by index; batches are never filtered or merged. Row 0 is padding: its length stays 0, so padding
reads position 0 of page 0, which no request uses.
"""

from __future__ import annotations

import enum

import numpy as np
import torch

from runtime.batch import RowInit
from runtime.layers.sampler import TorchSampling
from runtime.layers.sampling_tables import SamplingNeeds, SamplingOps, SamplingTables
from runtime.model_executor.staging import to_device
from runtime.sampling_params import MAX_DRAFT_STEPS, MAX_LOGIT_BIAS, MAX_STOP_IDS, TOP_K_ALL, SamplingParams

MAX_EOS = MAX_STOP_IDS + 16
GREEDY = SamplingParams(temperature=0.0)
MAX_COUNT = 32767
"""The largest count of one token in the output: the largest int16."""
COMMON = np.dtype([("row", "i8"), ("seed", "i8"), ("least", "i8"), ("floats", "f4", 6), ("top_k", "i4"), ("unused", "i4")])
"""The state that is written for every row, in one copy."""
MIN_TEMPERATURE = 1e-6
"""Lower temperatures are raised to this, which does not change the draw but keeps logits finite."""
MIN_REPETITION = 1e-20
"""Lower repetition penalties are raised to this, which does not change the choice but keeps logits finite."""


class Stage(enum.IntFlag):
    """Sampling stages that a request takes part in."""

    GREEDY = 1
    FILTERED = 2
    PENALISED = 4
    BIASED = 8
    MIN_LENGTH = 16


class RequestRows:
    """Owner of all tensors that are indexed by request row.

    Attributes:
        kv_lens: int32 [R]. Positions whose KV is committed.
        last_tokens: int64 [R]. The next input token.
        tables: sampling parameters by row.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device, ops: SamplingOps | None = None) -> None:
        """`ops`: the sampling operations; torch's by default."""
        self.device = device
        self.kv_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tables = SamplingTables(
            ops=ops or TorchSampling(),
            floats=torch.zeros((rows, 6), dtype=torch.float32, device=device),
            top_k=torch.full((rows,), TOP_K_ALL, dtype=torch.int32, device=device),
            seeds=torch.zeros(rows, dtype=torch.int64, device=device),
            min_positions=torch.zeros(rows, dtype=torch.int64, device=device),
            eos_ids=torch.full((rows, MAX_EOS), -1, dtype=torch.int64, device=device),
            bias_ids=torch.zeros((rows, MAX_LOGIT_BIAS), dtype=torch.int64, device=device),
            bias_values=torch.zeros((rows, MAX_LOGIT_BIAS), dtype=torch.float32, device=device),
            output_counts=torch.zeros((rows, vocab_size), dtype=torch.int16, device=device),
            in_prompt=torch.zeros((rows, vocab_size), dtype=torch.bool, device=device),
        )
        self.tables.floats[:, :] = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 1.0])
        self._stages = np.full(rows, Stage.GREEDY, dtype=np.uint8)
        self._draft_caps = np.full(rows, MAX_DRAFT_STEPS, dtype=np.int32)
        self._known_needs: tuple[bytes, SamplingNeeds] | None = None  # of the latest rows that `needs` was called with

    def admit(self, new_rows: list[RowInit]) -> None:
        """Write the state of newly assigned rows."""
        if not new_rows:
            return
        self._known_needs = None
        packed = self._upload(np.array([_common(init) for init in new_rows], dtype=COMMON).view(np.int64).reshape(len(new_rows), -1))
        rows, seeds, least, floats, top_k = packed.split([1, 1, 1, 3, 1], dim=1)
        t, rows = self.tables, rows[:, 0]
        t.floats[rows] = floats.view(torch.float32)
        t.top_k[rows] = top_k.view(torch.int32)[:, 0]
        t.seeds[rows], t.min_positions[rows] = seeds[:, 0], least[:, 0]
        for init in new_rows:
            self._stages[init.row] = stages_of(init.sampling)
            self._draft_caps[init.row] = init.sampling.draft_limit
            self._admit_rare(init)

    def needs(self, rows: np.ndarray) -> SamplingNeeds:
        """The sampling stages that these rows need. They are known on the host, so a stage that no request needs is skipped."""
        key = rows.tobytes()
        if self._known_needs is None or self._known_needs[0] != key:
            self._known_needs = key, self._find_needs(self._stages[rows])
        return self._known_needs[1]

    def _find_needs(self, stages: np.ndarray) -> SamplingNeeds:
        indices = [np.flatnonzero(stages & stage).tolist() for stage in (Stage.PENALISED, Stage.BIASED, Stage.MIN_LENGTH)]
        greedy = (stages & Stage.GREEDY) > 0
        return SamplingNeeds(bool(greedy.all()), bool(greedy.any()), bool((stages & Stage.FILTERED).any()), *indices)

    def greedy(self, rows: np.ndarray) -> np.ndarray:
        """bool [n]: which of these rows are greedy."""
        return (self._stages[rows] & Stage.GREEDY) > 0

    def draft_caps(self, rows: np.ndarray) -> np.ndarray:
        """int32 [n]: the draft limit of each of these rows."""
        return self._draft_caps[rows]

    def count(self, rows: torch.Tensor, tokens: torch.Tensor, valid: torch.Tensor) -> None:
        """Add committed output tokens to the counts. rows int64 [N], tokens int64 [N, W], valid bool [N, W].

        A count stays at `MAX_COUNT` instead of wrapping to a negative number.
        """
        counts, at = self.tables.output_counts, (rows.repeat_interleave(tokens.shape[1]), tokens.flatten())
        counts.index_put_(at, valid.to(torch.int16).flatten(), accumulate=True)
        held = counts[at]
        counts[at] = torch.where(held < 0, MAX_COUNT, held)

    def _admit_rare(self, init: RowInit) -> None:
        t, p, row = self.tables, init.sampling, init.row
        if p.min_new_tokens:
            ids = np.full(MAX_EOS, -1, dtype=np.int64)
            ids[: len(init.eos_ids)] = init.eos_ids[:MAX_EOS]
            t.eos_ids[row] = self._upload(ids)
        if p.logit_bias:
            ids, values = np.zeros(MAX_LOGIT_BIAS, dtype=np.int64), np.zeros(MAX_LOGIT_BIAS, dtype=np.float32)
            ids[: len(p.logit_bias)] = list(p.logit_bias.keys())
            values[: len(p.logit_bias)] = list(p.logit_bias.values())
            t.bias_ids[row], t.bias_values[row] = self._upload(ids), self._upload(values)
        if p.penalised and init.history is not None:
            vocab = t.output_counts.shape[1]
            output = np.minimum(np.bincount(init.history[init.prompt_len :], minlength=vocab), MAX_COUNT).astype(np.int16)
            prompt = np.zeros(vocab, dtype=np.bool_)
            prompt[init.history[: init.prompt_len]] = True
            t.output_counts[row], t.in_prompt[row] = self._upload(output), self._upload(prompt)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(array), self.device)


def _common(init: RowInit) -> tuple[object, ...]:
    """One item of `COMMON`."""
    p = init.sampling
    least = init.prompt_len + p.min_new_tokens if p.min_new_tokens else 0
    warmth = 0.0 if p.greedy else max(p.temperature, MIN_TEMPERATURE)
    floats = (warmth, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, max(p.repetition_penalty, MIN_REPETITION))
    return init.row, init.seed, least, floats, p.top_k if p.top_k > 0 else TOP_K_ALL, 0


def stages_of(p: SamplingParams) -> Stage:
    """The stages that a request with these parameters needs."""
    wanted = {
        Stage.GREEDY: p.greedy,
        Stage.FILTERED: not p.greedy and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0),
        Stage.PENALISED: p.penalised,
        Stage.BIASED: bool(p.logit_bias),
        Stage.MIN_LENGTH: p.min_new_tokens > 0,
    }
    return Stage(sum(stage for stage, needed in wanted.items() if needed))
