"""The gated delta rule over recurrent states: windows of drafts, prompts in chunks, and what is pending."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from runtime.layers.delta.definition import delta_rule, gated_norm
from runtime.layers.delta.heads import DeltaHeads
from runtime.mem_cache.state_pool import StatePool, StateSpec
from unit.delta_passes import Request, pass_over

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH = 8, 16, 16, 8, 4
ROWS, WINDOW, CACHED = 6, 4, 3
CPU = torch.device("cpu")


class Model:
    """One layer and its state pool, with one sequence of inputs for every request row."""

    def __init__(self, length: int) -> None:
        channels = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        self.heads = DeltaHeads(
            KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, torch.randn(channels, WIDTH) / 2, torch.randn(VALUE_HEADS), torch.randn(VALUE_HEADS)
        )
        spec = StateSpec(VALUE_HEADS, KEY_DIM, VALUE_DIM, channels, WIDTH, torch.float32)
        self.pool = StatePool([spec], ROWS, WINDOW, CPU, CACHED)
        self.rows, self.gates = torch.randn(ROWS, length, channels), torch.randn(ROWS, length, 2 * VALUE_HEADS)

    def run(self, requests: list[Request], wrong_from: dict[int, int] | None = None) -> torch.Tensor:
        """Run (row, first position, tokens) of each request in one pass; from position `wrong_from[row]` on with other inputs."""
        rows, gates = [], []
        for row, start, count in requests:
            own, own_gates = self.rows[row, start : start + count].clone(), self.gates[row, start : start + count].clone()
            wrong = (wrong_from or {}).get(row, start + count) - start
            own[wrong:], own_gates[wrong:] = torch.randn_like(own[wrong:]), torch.randn_like(own_gates[wrong:])
            rows.append(own)
            gates.append(own_gates)
        batch = pass_over(requests, WINDOW, CPU)
        states = self.pool.begin(batch.req_pool_indices, batch.seq_lens, batch.qo_indptr)
        return delta_rule(torch.cat(rows), torch.cat(gates), self.heads, 0, states, batch)

    def expected(self, row: int) -> torch.Tensor:
        """The outputs of a row's whole sequence, by transformers' operations."""
        channels = self.rows.shape[2]
        padded = F.pad(self.rows[row].T, (WIDTH - 1, 0))[None]
        qkv = F.silu(F.conv1d(padded, self.heads.conv_weight[:, None], groups=channels))[0].T
        q, k, v = qkv[None].split([KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM], dim=2)
        rate, decay = self.gates[row][None].chunk(2, dim=2)
        out, _ = torch_recurrent_gated_delta_rule(
            q.unflatten(2, (KEY_HEADS, KEY_DIM)), k.unflatten(2, (KEY_HEADS, KEY_DIM)), v.unflatten(2, (VALUE_HEADS, VALUE_DIM)),
            -self.heads.decay_log.exp() * F.softplus(decay + self.heads.decay_bias), rate.sigmoid(), use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return out[0].flatten(1)


def test_prompt_follows_transformers() -> None:
    model = Model(150)
    out = model.run([(1, 0, 150), (2, 0, 65), (3, 0, 3)])
    torch.testing.assert_close(out[:150], model.expected(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[150:215], model.expected(2)[:65], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[215:], model.expected(3)[:3], rtol=1e-4, atol=1e-5)


def test_equal_keys_stay_exact() -> None:
    model = Model(130)
    model.rows[1] = model.rows[1, :1]
    model.gates[1, :, :VALUE_HEADS], model.gates[1, :, VALUE_HEADS:] = 6.0, -9.0  # full updates, hardly any decay
    torch.testing.assert_close(model.run([(1, 0, 130)]), model.expected(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunks", [(40, 3, 2, 30, 1, 74), (1, 1, 4, 144), (64, 64, 22)])
def test_chunks_of_any_length_give_the_outputs_of_the_whole(chunks: tuple[int, ...]) -> None:
    model, start, parts = Model(150), 0, []
    for count in chunks:
        parts.append(model.run([(2, start, count), (1, 0, 9)])[:count])
        start += count
    torch.testing.assert_close(torch.cat(parts), model.expected(2), rtol=1e-4, atol=1e-5)


def test_rejected_drafts_leave_no_trace() -> None:
    """Windows of any width of which any number of tokens is accepted, of requests of different lengths."""
    model, generator = Model(90), np.random.default_rng(3)
    rows, lens = [1, 3, 5], [11, 2, 30]
    expected = {row: model.expected(row) for row in rows}
    model.run([(row, 0, length) for row, length in zip(rows, lens, strict=True)])
    for _ in range(12):
        width = int(generator.integers(1, WINDOW + 1))
        accepted = generator.integers(1, width + 1, len(rows)).tolist()
        wrong = {row: length + count for row, length, count in zip(rows, lens, accepted, strict=True)}
        out = model.run([(row, length, width) for row, length in zip(rows, lens, strict=True)], wrong).unflatten(0, (-1, width))
        for i, row in enumerate(rows):
            own = expected[row][lens[i] : lens[i] + accepted[i]]
            torch.testing.assert_close(out[i, : accepted[i]], own, rtol=1e-4, atol=1e-5)
            lens[i] += accepted[i]


def test_a_pass_runs_again_with_equal_bits() -> None:
    model = Model(40)
    model.run([(1, 0, 20), (2, 0, 7)])
    model.run([(1, 20, 3), (2, 7, 3)])
    first = model.run([(1, 22, 4), (2, 10, 4)])
    stored = [tensor.clone() for tensor in (model.pool.layers[0].matrices, model.pool.layers[0].tail, model.pool.applied)]
    assert torch.equal(model.run([(1, 22, 4), (2, 10, 4)]), first)
    for before, after in zip(stored, (model.pool.layers[0].matrices, model.pool.layers[0].tail, model.pool.applied), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("chunks", [(128,), (150,), (70, 58), (192, 8)])
def test_a_request_begins_with_the_state_that_another_left(chunks: tuple[int, ...]) -> None:
    """The same bits as if it had computed the tokens itself; the other goes on as if it had left nothing."""
    model = Model(200)
    model.rows[2], model.gates[2] = model.rows[1], model.gates[1]
    start = 0
    for count in chunks:  # the state after 64 tokens is left in slot 2; another request leaves none
        model.pool.keep(torch.tensor([1, 3]), torch.tensor([64, 0], dtype=torch.int32), torch.tensor([2, 2]))
        model.run([(1, start, count), (3, start, count)])
        start += count
    model.pool.restore(5, 2, 64)
    model.rows[5], model.gates[5] = model.rows[1], model.gates[1]
    behind = model.run([(5, 64, 100)])
    whole = model.run([(2, 0, 164)])
    assert torch.equal(behind, whole[64:])
    for stored in (model.pool.layers[0].matrices, model.pool.layers[0].tail):
        assert torch.equal(stored[5], stored[2])
    if start < 200:
        torch.testing.assert_close(model.run([(1, start, 200 - start)]), model.expected(1)[start:], rtol=1e-4, atol=1e-5)
    assert torch.equal(model.run([(5, 164, 3)]), model.run([(2, 164, 3)]))
    assert not model.pool.layers[0].matrices[ROWS : ROWS + 2].any()  # no other slot was written


def test_a_state_is_left_only_by_the_chunk_that_has_its_token() -> None:
    model = Model(200)
    model.pool.keep(torch.tensor([1]), torch.tensor([128], dtype=torch.int32), torch.tensor([0]))
    model.run([(1, 0, 64)])
    assert not model.pool.layers[0].matrices[ROWS].any()
    model.run([(1, 64, 64)])  # at the end of a chunk
    kept = model.pool.layers[0].matrices[ROWS].clone()
    assert torch.equal(kept, model.pool.layers[0].matrices[1])
    model.run([(1, 128, 3)])
    model.run([(1, 131, 65)])
    assert torch.equal(model.pool.layers[0].matrices[ROWS], kept)


def test_decoding_has_the_bits_of_windows_and_of_any_batch() -> None:
    """Rows of a request do not depend on the window's width or on other requests."""
    model = Model(40)
    model.run([(row, 0, 9) for row in (1, 2, 3)])
    alone = [model.run([(1, 9 + i, 1)]) for i in range(6)]
    again = Model(40)
    again.heads, again.rows, again.gates = model.heads, model.rows, model.gates
    again.run([(row, 0, 9) for row in (1, 2, 3)])
    together = [again.run([(row, 9 + start, 3) for row in (3, 1, 2)]).unflatten(0, (3, 3))[1] for start in (0, 3)]
    assert torch.equal(torch.cat(alone), torch.cat(together))


def test_a_row_starts_anew_for_its_next_request() -> None:
    model = Model(30)
    model.run([(4, 0, 30)])
    model.run([(4, 29, 1)])
    torch.testing.assert_close(model.run([(4, 0, 30)]), model.expected(4), rtol=1e-4, atol=1e-5)


def test_a_pass_over_padding_of_any_length_applies_no_more_than_a_window() -> None:
    model = Model(30)
    pool, ids = model.pool, torch.zeros(2, dtype=torch.int64)
    for length in (1024, 3):
        states = pool.begin(ids, torch.tensor([length, length], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32))
        assert states.pending.tolist() == [WINDOW if length > 3 else 0] * 2


def test_gated_norm() -> None:
    x, gate, weight = torch.randn(5, VALUE_HEADS * VALUE_DIM), torch.randn(5, VALUE_HEADS * VALUE_DIM), torch.randn(VALUE_DIM)
    heads = x.unflatten(1, (-1, VALUE_DIM))
    expected = F.rms_norm(heads, (VALUE_DIM,), weight, 1e-6) * F.silu(gate.unflatten(1, (-1, VALUE_DIM)))
    torch.testing.assert_close(gated_norm(x, gate, weight, 1e-6), expected.flatten(1), rtol=1e-5, atol=1e-6)
