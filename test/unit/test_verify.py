"""Verification commits what its slow definition commits, and keeps the target's distribution."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from runtime.model_executor.accept_rules import (
    BELOW_ONE,
    AcceptThresholds,
    DraftProbs,
    accept_chain_greedy,
    accept_chain_sampled,
    accept_chain_synthetic,
    accept_tree,
    compaction,
    tree_targets_sampled,
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slow_accept_len(draft: list[int], target: list[int]) -> int:
    length = 1
    for guess, truth in zip(draft[1:], target, strict=False):
        if guess != truth:
            break
        length += 1
    return length


def random_probs(g: torch.Generator, *shape: int, zeros: float = 0.3) -> torch.Tensor:
    weights = torch.rand(shape, generator=g) ** 2 * (torch.rand(shape, generator=g) > zeros) + 1e-9 * torch.rand(shape, generator=g)
    weights[weights < 1e-8] = 0.0
    weights[..., 0] += 0.05
    return weights / weights.sum(-1, keepdim=True)


def slow_draw(weights: list[float], u: float) -> int:
    total, running = sum(weights), 0.0
    for token, weight in enumerate(weights):
        running += weight
        if running > u * total:
            return token
    return max(t for t, w in enumerate(weights) if w > 0)


def slow_chain(draft: list[int], q: list[list[float]], p: list[list[float]], coins: list[float], final: float) -> list[int]:
    """Leviathan's algorithm 1 for one request, in its own words."""
    out: list[int] = []
    for i, token in enumerate(draft[1:]):
        if p[i][token] > 0 and coins[i] * q[i][token] <= p[i][token]:
            out.append(token)
            continue
        left = [max(a - b, 0.0) for a, b in zip(p[i], q[i], strict=True)]
        return [*out, slow_draw(left if sum(left) > 0 else p[i], final)]
    return [*out, slow_draw(p[-1], final)]


def committed(accept_lens: torch.Tensor, tokens: torch.Tensor) -> list[list[int]]:
    return [row[:n] for n, row in zip(accept_lens.tolist(), tokens.tolist(), strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_accept_lens_follow_the_definition(seed: int) -> None:
    draft, target = (torch.randint(0, 2, (8, 5), generator=generator(seed + 100 * i)) for i in range(2))
    expected = [slow_accept_len(d, t) for d, t in zip(draft.tolist(), target.tolist(), strict=True)]
    lens, _ = accept_chain_greedy(draft, target)
    assert lens.tolist() == expected
    assert lens.dtype == torch.int32


def test_greedy_commits_the_targets_own_tokens() -> None:
    draft = torch.tensor([[9, 1, 2, 3], [9, 1, 5, 3], [9, 7, 2, 3]])
    target = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    assert committed(*accept_chain_greedy(draft, target)) == [[1, 2, 3, 4], [1, 2], [1]]


@pytest.mark.parametrize("seed", range(15))
def test_sampled_chain_follows_the_definition(seed: int) -> None:
    g = generator(seed)
    p, q = random_probs(g, 16, 4, 7).double(), random_probs(g, 16, 3, 7).double()
    draft = torch.cat([torch.zeros(16, 1, dtype=torch.int64), torch.multinomial(q.flatten(0, 1), 1, generator=g).view(16, 3)], 1)
    coins, final = torch.rand(16, 3, generator=g).double(), torch.rand(16, generator=g).double()
    got = committed(*accept_chain_sampled(draft, p, coins, final, DraftProbs(q)))
    lists = [x.tolist() for x in (draft, q, p, coins, final)]
    assert got == [slow_chain(*row) for row in zip(*lists, strict=True)]


@pytest.mark.parametrize("seed", range(8))
def test_a_reduced_vocabulary_equals_its_full_one(seed: int) -> None:
    g = generator(seed)
    to_target = torch.randperm(11, generator=g)[:5]
    to_draft = torch.full((11,), -1).scatter(0, to_target, torch.arange(5))
    p, q = random_probs(g, 32, 3, 11), random_probs(g, 32, 2, 5)
    wide = torch.zeros(32, 2, 11).index_copy_(2, to_target, q)
    drafted = to_target[torch.multinomial(q.flatten(0, 1), 1, generator=g).view(32, 2)]
    draft = torch.cat([torch.zeros(32, 1, dtype=torch.int64), drafted], 1)
    coins, final = torch.rand(32, 2, generator=g), torch.rand(32, 3, generator=g)
    narrow_out = accept_chain_sampled(draft, p, coins, final, DraftProbs(q, to_target, to_draft))
    assert committed(*narrow_out) == committed(*accept_chain_sampled(draft, p, coins, final, DraftProbs(wide)))


@pytest.mark.parametrize("explicit_q", [True, False])
def test_greedy_rows_of_a_sampled_batch_come_out_as_greedy(explicit_q: bool) -> None:
    g = generator(3)
    draft, target = torch.randint(0, 3, (64, 4), generator=g), torch.randint(0, 3, (64, 4), generator=g)
    p = torch.nn.functional.one_hot(target, 6).float()
    q = DraftProbs(torch.nn.functional.one_hot(draft[:, 1:], 6).float()) if explicit_q else None
    coins, final = torch.rand(64, 3, generator=g), torch.rand(64, generator=g)
    assert committed(*accept_chain_sampled(draft, p, coins, final, q)) == committed(*accept_chain_greedy(draft, target))


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    assert counts[probs == 0].sum() == 0, "a token of probability 0 was committed"
    expected = probs * counts.sum()
    live = expected > 0
    return float(((counts - expected)[live] ** 2 / expected[live]).sum())


@pytest.mark.parametrize("kind", ["own distribution", "argmax drafts", "reduced vocabulary"])
def test_sampled_chains_keep_the_targets_distribution(kind: str) -> None:
    """The first two committed tokens of 40k requests, against p(first) * p(second | first)."""
    n, vocab = 40_000, 5
    g = generator(11)
    p_first, p_then = random_probs(g, vocab), random_probs(g, vocab, vocab)
    to_target = torch.tensor([3, 0, 4])
    width = 3 if kind == "reduced vocabulary" else vocab
    q_first, q_then = random_probs(g, width, zeros=0.0), random_probs(g, vocab, width, zeros=0.0)
    say = to_target if kind == "reduced vocabulary" else torch.arange(vocab)

    def drafted(q: torch.Tensor) -> torch.Tensor:
        return say[q.argmax(-1) if kind == "argmax drafts" else torch.multinomial(q, 1, generator=g)[:, 0]]

    one = drafted(q_first.expand(n, width))
    two = drafted(q_then[one])
    draft_BD = torch.stack([torch.zeros_like(one), one, two], 1)
    p = torch.stack([p_first.expand(n, vocab), p_then[one], p_then[two]], 1)
    q = torch.stack([q_first.expand(n, width), q_then[one]], 1)
    to_draft = torch.full((vocab,), -1).scatter(0, say, torch.arange(width))
    probs = {
        "own distribution": DraftProbs(q),
        "argmax drafts": None,
        "reduced vocabulary": DraftProbs(q, say, to_draft),
    }[kind]
    lens, out = accept_chain_sampled(draft_BD, p, torch.rand(n, 2, generator=g), torch.rand(n, generator=g), probs)
    first = torch.bincount(out[:, 0], minlength=vocab).float()
    assert chi_square(first, p_first) < 30  # 4 degrees of freedom: p < 5e-6
    for token in range(vocab):
        rows = (out[:, 0] == token) & (lens >= 2)
        if rows.any():
            assert chi_square(torch.bincount(out[rows, 1], minlength=vocab).float(), p_then[token]) < 30
    assert 1.0 < lens.float().mean() < 3.0


def test_equal_distributions_accept_everything_even_with_a_uniform_of_one() -> None:
    p = random_probs(generator(0), 4, 3, 9, zeros=0.0)
    draft = torch.cat([torch.zeros(4, 1, dtype=torch.int64), p[:, :2].argmax(-1)], 1)
    lens, out = accept_chain_sampled(draft, p, torch.ones(4, 2), torch.ones(4), DraftProbs(p[:, :2].clone()))
    assert lens.tolist() == [3] * 4
    assert (p[:, 2].gather(1, out[:, 2:]) > 0).all()


def test_an_empty_residual_falls_back_to_the_target() -> None:
    p = torch.tensor([[[0.0, 0.5, 0.5, 0.0], [0.25, 0.25, 0.25, 0.25]]])
    # q claims to have drafted a token that p forbids, though elsewhere q covers p: (p - q)+ is 0.
    q = torch.tensor([[[0.2, 0.5, 0.5, 0.0]]])
    lens, out = accept_chain_sampled(torch.tensor([[0, 0]]), p, torch.zeros(1, 1), torch.tensor([0.99]), DraftProbs(q))
    assert lens.tolist() == [1]
    assert out[0, 0].item() in (1, 2)


def test_a_draft_that_the_draft_cannot_say_has_no_probability_of_its_own() -> None:
    to_target, to_draft = torch.tensor([4, 1]), torch.tensor([-1, 1, -1, -1, 0])
    p = torch.full((1, 2, 5), 0.2)
    q = DraftProbs(torch.tensor([[[1.0, 0.0]]]), to_target, to_draft)
    lens, tokens = accept_chain_sampled(torch.tensor([[0, 3]]), p, torch.tensor([[0.99]]), torch.tensor([0.5]), q)
    assert lens.tolist() == [2], "min(1, p / 0)"
    assert tokens[0, 0] == 3


def test_poisoned_padding_rows_are_inert() -> None:
    g = generator(5)
    p, draft = random_probs(g, 6, 3, 8), torch.randint(0, 8, (6, 3), generator=g)
    coins, final = torch.rand(6, 2, generator=g), torch.rand(6, generator=g)
    clean = accept_chain_sampled(draft[:4], p[:4], coins[:4], final[:4])
    p[4:], draft[4:], coins[4:], final[4:] = torch.nan, -1, torch.nan, torch.nan
    lens, out = accept_chain_sampled(draft, p, coins, final)
    assert committed(lens[:4], out[:4]) == committed(*clean)
    assert ((out >= 0) & (out < 8)).all()
    assert ((lens >= 1) & (lens <= 3)).all()


def test_lower_thresholds_accept_more() -> None:
    p = torch.tensor([[[0.3, 0.7], [0.5, 0.5]]]).expand(4000, 2, 2)
    draft = torch.tensor([[0, 0]]).expand(4000, 2)
    coins, final = torch.rand(4000, 1, generator=generator(1)), torch.rand(4000, generator=generator(2))

    def rate(thresholds: AcceptThresholds) -> float:
        return float((accept_chain_sampled(draft, p, coins, final, None, thresholds)[0] == 2).float().mean())

    assert abs(rate(AcceptThresholds()) - 0.3) < 0.03
    assert abs(rate(AcceptThresholds(acc=0.6)) - 0.5) < 0.03
    assert rate(AcceptThresholds(single=0.3)) == 1.0
    assert rate(AcceptThresholds(single=0.31)) < 0.4


def random_tree(g: torch.Generator, batch: int, nodes: int, topk: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and parents [B, D]; siblings carry different tokens."""
    tokens, parents = torch.zeros(batch, nodes, dtype=torch.int64), torch.full((batch, nodes), -1)
    for row in range(batch):
        used: dict[int, set[int]] = {}
        for node in range(1, nodes):
            while True:
                parent, token = (int(torch.randint(0, high, (), generator=g)) for high in (node, vocab))
                if len(used.get(parent, set())) < topk and token not in used.get(parent, set()):
                    break
            used.setdefault(parent, set()).add(token)
            tokens[row, node], parents[row, node] = token, parent
    return tokens, parents


def slow_tree_walk(tokens: list[int], parents: list[int], target: list[int], max_path: int) -> tuple[list[int], list[int]]:
    path, node = [0], 0
    while len(path) < max_path:
        below = [n for n in range(1, len(tokens)) if parents[n] == node and tokens[n] == target[node]]
        if not below:
            break
        node = below[0]
        path.append(node)
    return path, [target[n] for n in path]


@pytest.mark.parametrize("seed", range(10))
def test_tree_verification_follows_the_definition(seed: int) -> None:
    g = generator(seed)
    tokens, parents = random_tree(g, 12, 9, 3, 4)
    target = torch.randint(0, 4, (12, 9), generator=g)
    path, lens, out = accept_tree(tokens, parents, target, 5)
    assert ((path >= 0) & (path < 9)).all()
    got = list(zip(committed(lens, path), committed(lens, out), strict=True))
    lists = (tokens.tolist(), parents.tolist(), target.tolist())
    assert got == [slow_tree_walk(*row, 5) for row in zip(*lists, strict=True)]


def test_a_chain_is_a_tree() -> None:
    g = generator(4)
    draft, target = torch.randint(0, 2, (32, 5), generator=g), torch.randint(0, 2, (32, 5), generator=g)
    parents = torch.arange(-1, 4).expand(32, 5)
    path, lens, out = accept_tree(draft, parents, target, 5)
    assert committed(lens, out) == committed(*accept_chain_greedy(draft, target))
    assert committed(lens, path) == [list(range(n)) for n in lens.tolist()]


@pytest.mark.parametrize("lossless", [True, False])
def test_sampled_trees_keep_the_distribution_unless_told_otherwise(lossless: bool) -> None:
    n, vocab = 40_000, 5
    g = generator(8)
    p = random_probs(g, 4, vocab, zeros=0.0)
    tokens = torch.tensor([0, 1, 2, 3]).expand(n, 4)
    parents = torch.tensor([-1, 0, 0, 1]).expand(n, 4)
    thresholds = AcceptThresholds() if lossless else AcceptThresholds(acc=0.5)
    coins = torch.rand(n, 4, generator=g)
    targets = tree_targets_sampled(tokens, parents, p.expand(n, 4, vocab), torch.rand(n, 4, generator=g), coins, thresholds)
    _, lens, out = accept_tree(tokens, parents, targets, 3)
    first = torch.bincount(out[:, 0], minlength=vocab).float()
    if lossless:
        assert chi_square(first, p[0]) < 30
        then = out[(lens >= 2) & (out[:, 0] == 1), 1]
        assert chi_square(torch.bincount(then, minlength=vocab).float(), p[1]) < 30
    else:
        expected = min(1.0, float(p[0, 1] + p[0, 2]) / 0.5)
        assert abs(float((lens >= 2).float().mean()) - expected) < 0.02
        # What is not accepted is drawn from p without the children.
        others = first.clone()
        others[[1, 2]] = 0
        rest = p[0].clone()
        rest[[1, 2]] = 0
        assert expected == 1.0 or chi_square(others, rest / rest.sum()) < 30


def test_threshold_rule_at_exactly_one_has_the_lossless_distribution() -> None:
    """SGLang's coin rule with both thresholds just below 1 is the draw from p, in distribution."""
    n, vocab = 40_000, 4
    p = random_probs(generator(1), 3, vocab, zeros=0.0)
    tokens, parents = torch.tensor([0, 1, 2]).expand(n, 3), torch.tensor([-1, 0, 0]).expand(n, 3)
    g = generator(2)
    thresholds = AcceptThresholds(single=1.0, acc=1.0 - 1e-7)
    targets = tree_targets_sampled(
        tokens, parents, p.expand(n, 3, vocab), torch.rand(n, 3, generator=g), torch.rand(n, 3, generator=g), thresholds
    )
    assert chi_square(torch.bincount(targets[:, 0], minlength=vocab).float(), p[0]) < 30


@pytest.mark.parametrize("thresholds", [AcceptThresholds(), AcceptThresholds(0.9, 0.9)])
def test_numbers_of_one_are_drawn_with_as_numbers_below_it(thresholds: AcceptThresholds) -> None:
    """At 1 an inverse cumulative distribution ends on whatever rounding left at its end."""
    asked: list[float] = []

    def draw(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        asked.extend(numbers.tolist())
        return weights.argmax(-1)

    p, ones, tokens = random_probs(generator(0), 2, 3, 9), torch.ones(2, 3), torch.tensor([[0, 1, 2]]).expand(2, 3)
    accept_chain_sampled(tokens, p, ones[:, 1:], ones, DraftProbs(p[:, 1:]), thresholds, draw)
    tree_targets_sampled(tokens, torch.tensor([[-1, 0, 0]]).expand(2, 3), p, ones, ones, thresholds, draw)
    assert len(asked) == 8
    assert max(asked) < 1.0


def test_compaction_brings_the_path_to_the_front_and_touches_nothing_else() -> None:
    slots = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    path, lens = torch.tensor([[0, 2, 4], [0, 0, 0]]), torch.tensor([3, 1], dtype=torch.int32)
    source, target = compaction(slots, path, lens)
    assert list(zip(source.tolist(), target.tolist(), strict=True)) == [(10, 10), (12, 11), (14, 12), (20, 20), (0, 0), (0, 0)]


def test_synthetic_acceptance_ignores_the_tokens() -> None:
    g = generator(6)
    uniforms = torch.rand(20_000, 3, generator=g)
    probabilities = torch.tensor([0.9, 0.5, 0.2])
    draft, target = torch.randint(-5, 50, (20_000, 4), generator=g), torch.randint(0, 10, (20_000, 4), generator=g)
    lens, out = accept_chain_synthetic(draft, target, probabilities, uniforms, 10)
    assert abs(float(lens.float().mean()) - (1 + 0.9 + 0.45 + 0.09)) < 0.03
    rows = zip(lens.tolist(), out.tolist(), draft.clamp(0, 9).tolist(), target.tolist(), strict=True)
    assert all(row[:n] == [*d[1:n], t[n - 1]] for n, row, d, t in itertools.islice(rows, 500))
    none, every = torch.zeros(3), torch.ones(3)
    for ends, length in ((none, 1), (every, 4)):
        for uniform in (0.0, BELOW_ONE):
            lens, _ = accept_chain_synthetic(draft[:1], target[:1], ends, torch.full((1, 3), uniform), 10)
            assert lens.tolist() == [length]


def test_nothing_reads_from_the_device() -> None:
    """Tensors without values raise where a host would need one."""
    with FakeTensorMode():
        ids, floats = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4)
        probs, q = torch.zeros(3, 4, 9), torch.zeros(3, 3, 5)
        to_target, to_draft = torch.zeros(5, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
        accept_chain_greedy(ids, ids)
        for draft in (None, DraftProbs(torch.zeros(3, 3, 9)), DraftProbs(q, to_target, to_draft)):
            accept_chain_sampled(ids, probs, floats[:, 1:], floats, draft, AcceptThresholds(0.5, 0.5))
        accept_chain_synthetic(ids, ids, torch.zeros(3), floats[:, 1:], 9)
        for thresholds in (AcceptThresholds(), AcceptThresholds(0.5, 0.5)):
            targets = tree_targets_sampled(ids, ids, probs, floats, floats, thresholds)
            path, lens, _ = accept_tree(ids, ids, targets, 4)
            source, target = compaction(ids, path, lens)
            assert source.shape == target.shape == (12,)
