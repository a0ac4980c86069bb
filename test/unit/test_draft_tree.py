"""The draft tree is the one that its plain definition grows."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from runtime.model_executor.draft_window import TreeShape
from runtime.speculative.draft_tree import Beam, ancestor_masks, cut_tree, grow_tree, start_tree, top_log_probs


@dataclass
class Node:
    token: int
    score: float
    parent: Node | None
    number: int
    depth: int
    slot: int | None = None  # place among the draft's own KV
    children: list[Node] = field(default_factory=list)

    def line(self) -> list[Node]:
        """This node and all above it but the root."""
        return [] if self.parent is None else [*self.parent.line(), self]


@dataclass
class SlowTree:
    """EAGLE-2's tree for one request, in lists."""

    shape: TreeShape
    root: Node
    nodes: list[Node]
    beam: list[Node]
    masks: list[list[int]]

    @staticmethod
    def grow(shape: TreeShape, last: int, tokens: list, scores: list, children: list) -> SlowTree:
        root = Node(last, 0.0, None, 0, 0)
        beam = [Node(t, s, root, i + 1, 1) for i, (t, s) in enumerate(zip(tokens, scores, strict=True))]
        tree = SlowTree(shape, root, list(beam), beam, [])
        tree.place(0)
        for step, (child_tokens, child_scores) in enumerate(children):
            level: list[Node] = []
            for j, parent in enumerate(tree.beam):
                for token, score in zip(child_tokens[j], child_scores[j], strict=True):
                    level.append(Node(token, parent.score + score, parent, 1 + len(tree.nodes) + len(level), parent.depth + 1))
            tree.nodes += level
            tree.beam = sorted(level, key=lambda n: (-n.score, n.number))[: shape.topk]
            if step + 1 < shape.num_steps - 1:
                tree.place(step + 1)
        return tree

    def place(self, step: int) -> None:
        for j, node in enumerate(self.beam):
            node.slot = step * self.shape.topk + j
        self.masks.append([sum(1 << n.slot for n in node.line() if n.slot is not None) for node in self.beam])

    def cut(self) -> list[Node]:
        best = sorted(self.nodes, key=lambda n: (-n.score, n.number))[: self.shape.num_draft_tokens - 1]
        return [self.root, *sorted(best, key=lambda n: n.number)]


def signed(mask: int) -> int:
    return mask - (1 << 64) if mask >= 1 << 63 else mask


def random_inputs(shape: TreeShape, batch: int, seed: int, coarse: bool) -> tuple[torch.Tensor, torch.Tensor, list, list]:
    """First guesses and the children of every pass, best first; coarse scores have many ties."""
    g = torch.Generator().manual_seed(seed)

    def scores(*dims: int) -> torch.Tensor:
        raw = torch.randint(-3, 1, dims, generator=g) / 2 if coarse else -torch.rand(dims, generator=g, dtype=torch.float32) * 3
        return raw.float().sort(-1, descending=True).values

    k = shape.topk
    tokens = [torch.rand(batch, k, 50, generator=g).argsort(-1)[..., :k] for _ in range(shape.num_steps - 1)]
    first = torch.rand(batch, 50, generator=g).argsort(-1)[:, :k]
    return first, scores(batch, k), tokens, [scores(batch, k, k) for _ in range(shape.num_steps - 1)]


def grow(shape: TreeShape, first: torch.Tensor, first_scores: torch.Tensor, tokens: list, scores: list) -> list[Beam]:
    beams = [start_tree(first, first_scores)]
    for child_tokens, child_scores in zip(tokens, scores, strict=True):
        beams.append(grow_tree(beams[-1], child_tokens, child_scores))
    return beams


SHAPES = [TreeShape(3, 2, 4), TreeShape(5, 4, 8), TreeShape(2, 8, 20), TreeShape(1, 4, 5), TreeShape(6, 10, 60), TreeShape(17, 4, 64)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("coarse", [False, True])
def test_the_tree_is_the_slow_tree(shape: TreeShape, coarse: bool) -> None:
    for seed in range(4):
        first, first_scores, tokens, scores = random_inputs(shape, 3, seed, coarse)
        last = torch.tensor([7, 8, 9])
        beams = grow(shape, first, first_scores, tokens, scores)
        tree = cut_tree(beams[-1], last, shape)
        for b in range(3):
            # float32 sums, as the device adds them; in Python floats ties could break differently.
            children = [(t[b].tolist(), s[b].numpy()) for t, s in zip(tokens, scores, strict=True)]
            slow = SlowTree.grow(shape, int(last[b]), first[b].tolist(), list(first_scores[b].numpy()), children)
            nodes = slow.cut()
            place = {id(n): i for i, n in enumerate(nodes)}
            assert tree.tokens[b].tolist() == [n.token for n in nodes]
            assert tree.parents[b].tolist() == [-1 if n.parent is None else place[id(n.parent)] for n in nodes]
            assert tree.depths[b].tolist() == [n.depth for n in nodes]
            masks = [signed(1 | sum(1 << place[id(a)] for a in n.line())) for n in nodes]
            assert tree.mask[b].tolist() == masks
            for beam, mask in zip(beams, slow.masks, strict=False):
                assert beam.mask[b].tolist() == [signed(m) for m in mask]


def test_hidden_states_follow_the_beam() -> None:
    """`parents` names the row of the pass before: walking it back spells the path of tokens in `all_parents`."""
    shape = TreeShape(5, 3, 10)
    first, first_scores, tokens, scores = random_inputs(shape, 2, 1, False)
    beams = grow(shape, first, first_scores, tokens, scores)
    path = beams[0].tokens[:, :, None]
    for beam in beams[1:]:
        path = torch.cat([path.gather(1, beam.parents[:, :, None].expand_as(path)), beam.tokens[:, :, None]], 2)
    last = beams[-1]
    for b in range(2):
        for j in range(3):
            spelled, number = [], int(last.ids[b, j])
            while number:
                spelled.append(int(last.all_tokens[b, number - 1]))
                number = int(last.all_parents[b, number - 1])
            assert path[b, j].tolist() == spelled[::-1]


@pytest.mark.parametrize("rounding_up", [0.0, 1e-3])
def test_a_child_never_comes_without_its_parent(rounding_up: float) -> None:
    """Also where a log-probability came out above 0, and where scores are -inf."""
    shape = TreeShape(4, 3, 9)
    first, first_scores, tokens, scores = random_inputs(shape, 8, 2, True)
    scores = [s + rounding_up for s in scores]
    scores[0][0] = -torch.inf
    tree = cut_tree(grow(shape, first, first_scores, tokens, scores)[-1], torch.zeros(8, dtype=torch.int64), shape)
    below = tree.parents[:, 1:]
    assert (below < torch.arange(1, 9)).all()
    assert (below >= 0).all()
    assert (tree.depths[:, 1:] == tree.depths.gather(1, below) + 1).all()


def test_poisoned_rows_give_valid_indices_and_leave_the_others_alone() -> None:
    shape = TreeShape(4, 3, 9)
    first, first_scores, tokens, scores = random_inputs(shape, 4, 3, False)
    clean = cut_tree(grow(shape, first, first_scores, tokens, scores)[-1], torch.arange(4), shape)
    for tensor in (first_scores, *scores):
        tensor[2:] = torch.nan
    for tensor in (first, *tokens):
        tensor[2:] = -1
    tree = cut_tree(grow(shape, first, first_scores, tokens, scores)[-1], torch.arange(4), shape)
    for name in ("tokens", "parents", "depths", "mask"):
        assert torch.equal(getattr(tree, name)[:2], getattr(clean, name)[:2])
    assert ((tree.parents >= -1) & (tree.parents < 9)).all()
    assert ((tree.depths >= 0) & (tree.depths <= 4)).all()


def test_ancestor_masks_of_a_chain_are_causal() -> None:
    masks = ancestor_masks(torch.arange(-1, 63)[None], 63)[0].tolist()
    assert masks == [signed((1 << (i + 1)) - 1) for i in range(64)]


def test_top_log_probs_are_the_log_softmax() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0)) * 9
    ids, values = top_log_probs(logits, 4)
    expected = logits.log_softmax(-1).sort(-1, descending=True)
    assert torch.equal(ids, expected.indices[:, :4])
    torch.testing.assert_close(values, expected.values[:, :4])


@pytest.mark.parametrize(
    ("shape", "field"),
    [((1, 4, 8), "num_draft_tokens"), ((9, 8, 65), "num_draft_tokens"), ((18, 4, 8), "num_steps")],
)
def test_impossible_shapes_are_refused(shape: tuple[int, int, int], field: str) -> None:
    with pytest.raises(AssertionError, match=field):
        TreeShape(*shape)


def test_nothing_reads_from_the_device() -> None:
    """Tensors without values raise where a host would need one."""
    shape = TreeShape(3, 2, 6)
    with FakeTensorMode():
        beam = start_tree(*top_log_probs(torch.zeros(4, 20), 2))
        for _ in range(2):
            ids, scores = top_log_probs(torch.zeros(8, 20), 2)
            beam = grow_tree(beam, ids.view(4, 2, 2), scores.view(4, 2, 2))
        tree = cut_tree(beam, torch.zeros(4, dtype=torch.int64), shape)
        assert tree.mask.shape == (4, 6)
