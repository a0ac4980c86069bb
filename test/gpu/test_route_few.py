"""Routing of few tokens in CUDA C++ compared with float64, for all shapes and scorings; rows do not depend on each other."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gpu.moe_layers import masks
from runtime.layers.gemm.deferred_norm import DeferredNorm, RowScale
from runtime.layers.gemm.epilogue import Epilogue
from runtime.layers.gemm.triton_gemm import TritonConfig, triton_gemm
from runtime.layers.moe.kernels.route import new_tickets, route
from runtime.layers.moe.kernels.route_few import MOST_SCORES, MOST_TOKENS, supports
from runtime.layers.moe.router import Router, Routing, RoutingRule

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("route_few"), pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
BF16 = torch.bfloat16
EXPERTS, COLUMNS = (8, 32, 64, 128, 256, 512), (2048, 2880, 4096, 7168)
ODD_SHAPES = ((6, 64), (40, 1040), (60, 528), (160, 5120), (1, 16), (384, 8192))
PARTS = (1, 37, 64, 128, 180, 300)
EPS = 1e-6
NO_ID = 0x7FFFFFFF


@dataclass(frozen=True)
class Rule:
    """A routing rule with its tensors."""

    scoring: Any
    renormalize: bool
    scaling: float = 1.0
    bias: bool = False
    correction: bool = False
    shared: int = 0

    def of(self, top_k: int) -> RoutingRule:
        return RoutingRule(top_k, self.scoring, self.renormalize, self.scaling, shared=self.shared)


RULES = {
    "softmax": Rule("softmax", True),
    "softmax-raw": Rule("softmax", False, 1.5, bias=True),
    "softmax-corrected": Rule("softmax", True, correction=True),
    "topk-softmax": Rule("topk_softmax", False, bias=True),
    "sigmoid": Rule("sigmoid", True, 1.8, correction=True),
    "sigmoid-raw": Rule("sigmoid", False, bias=True, correction=True),
    "sigmoid-shared": Rule("sigmoid", True, 1.8, correction=True, shared=1),
    "softmax-shared": Rule("softmax", False, 1.5, shared=1),
}
CASES = [*itertools.product(EXPERTS, COLUMNS), *ODD_SHAPES]
GRID = [(*shape, [*RULES][i % len(RULES)], bool(i // len(RULES) % 2)) for i, shape in enumerate(CASES)]
SHARED = [(64, 2048, "sigmoid-shared", True), (60, 528, "sigmoid-shared", False), (512, 4096, "softmax-shared", True)]
GRID = list(dict.fromkeys(GRID + SHARED + [(128, 2048, name, norm) for name in RULES for norm in (False, True)]))


class Case:
    """A random router and the definition of its routing."""

    def __init__(self, experts: int, columns: int, name: str) -> None:
        torch.manual_seed(experts + columns)
        self.rule, self.top_k = RULES[name], min(8 if experts > 64 else 4, experts)
        self.weight = (torch.randn((experts, columns), device="cuda") * columns**-0.5).to(BF16)
        self.bias = torch.randn(experts, device="cuda").to(BF16) if self.rule.bias else None
        self.correction = torch.rand(experts, device="cuda") * 0.3 if self.rule.correction else None
        self.tickets = new_tickets(torch.device("cuda"))

    def route(self, x: torch.Tensor, kept: torch.Tensor | None = None, **options: Any) -> Routing:
        router = Router(self.weight, self.rule.of(self.top_k), self.bias, self.correction, kept)
        assert supports(x, router)
        return route(x, router, self.tickets, **options)

    def check(self, x: torch.Tensor, found: Routing) -> None:
        """Compare with float64: ids if no two scores are equal up to rounding, weights always."""
        logits = x.double() @ self.weight.double().t()
        logits = logits if self.bias is None else logits + self.bias.double()
        scores = {"softmax": lambda: logits.softmax(1), "sigmoid": logits.sigmoid, "topk_softmax": lambda: logits}[self.rule.scoring]()
        choice = scores if self.correction is None else scores + self.correction.double()
        best = choice.sort(dim=1, descending=True, stable=True)
        clear = best.values[:, : self.top_k + 1].diff(dim=1).abs().amin(1, keepdim=True) > 1e-5 if len(self.weight) > 1 else True
        ids, weights, experts = found.ids[:, : self.top_k], found.weights[:, : self.top_k], len(self.weight)
        wrong = (ids != best.indices[:, : self.top_k]) & clear
        assert not wrong.any(), f"{ids} instead of {best.indices[:, : self.top_k]}"
        torch.testing.assert_close(choice.gather(1, ids.long()), best.values[:, : self.top_k], rtol=1e-4, atol=1e-5)
        want = scores.gather(1, ids.long())
        if self.rule.scoring == "topk_softmax":
            want = want.softmax(dim=1)
        elif self.rule.renormalize:
            want = want / want.sum(dim=1, keepdim=True)
        torch.testing.assert_close(weights.double(), want * self.rule.scaling, rtol=1e-4, atol=1e-7)
        assert found.ids[:, self.top_k :].tolist() == [[experts] * self.rule.shared] * len(x)
        assert found.weights[:, self.top_k :].tolist() == [[1.0] * self.rule.shared] * len(x)
        assert torch.equal(found.masks, masks(found.ids, experts + self.rule.shared))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile most of the kernels that the tests need, in parallel."""

    def one(case: tuple[int, int, str, bool]) -> None:
        torch.cuda.synchronize()  # gives the thread torch's context
        (x, squares), norm = rows_of(1, case[1]), case[3]
        Case(*case[:3]).route(x, **(normed_options(x, squares) if norm else {}), pdl=norm)

    with torch.inference_mode(), ThreadPoolExecutor(8) as pool:
        list(pool.map(one, GRID))


def rows_of(rows: int, columns: int, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows before a deferred norm, and random sums of squares."""
    x = (torch.randn((rows, columns), device="cuda") * 3).to(BF16)
    return x, torch.rand((rows, parts), device="cuda") * (18 * columns / parts)


def most_rows(experts: int) -> int:
    return min(MOST_TOKENS, MOST_SCORES // experts)


def normed_options(x: torch.Tensor, squares: torch.Tensor) -> dict[str, Any]:
    return {"norm": RowScale(squares, EPS), "normed": torch.full_like(x, float("nan"))}


@pytest.mark.parametrize(("experts", "columns", "name", "norm"), GRID)
def test_routing_matches_float64(experts: int, columns: int, name: str, norm: bool) -> None:
    case, words = Case(experts, columns, name), -(-(experts + RULES[name].shared) // 32)
    for rows in (*range(1, 18), 31, 33, 100, most_rows(experts)):
        x, squares = rows_of(rows, columns, PARTS[rows % len(PARTS)])
        kept = torch.full((rows + 1, words), NO_ID, dtype=torch.int32, device="cuda")
        options = {"kept": kept} if rows % 2 else {}
        if not norm:
            x = (x.float() / 3).to(BF16)
            found = case.route(x, **options)
        else:
            normed = torch.full((rows + 1, columns), float("nan"), dtype=BF16, device="cuda")
            found = case.route(x, norm=RowScale(squares, EPS), normed=normed[:rows], pdl=True, **options)
            want = x.double() * torch.rsqrt(squares.double().sum(1, keepdim=True) / columns + EPS)
            torch.testing.assert_close(normed[:rows].double(), want, rtol=2**-8 * 1.01, atol=1e-30)
            assert normed[rows].isnan().all(), "writes past its rows"
            x = normed[:rows]
        case.check(x, found)
        assert (kept[rows] == NO_ID).all(), "writes past its rows"
        assert found.masks.data_ptr() == kept.data_ptr() or not options


SHAPES = [(128, 2048, "softmax"), (64, 2048, "sigmoid"), (64, 2048, "sigmoid-shared"), (32, 2880, "topk-softmax"), (256, 7168, "softmax")]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_depend_on_themselves_alone(shape: tuple[int, int, str]) -> None:
    most = most_rows(shape[0])
    case, (x, squares) = Case(*shape), rows_of(most, shape[1], 128)

    def run(x: torch.Tensor, squares: torch.Tensor) -> tuple[torch.Tensor, ...]:
        options = normed_options(x, squares)
        found = case.route(x, **options, pdl=True)
        return found.ids, found.weights, found.masks, options["normed"]

    want = run(x, squares)
    for first, last in ((0, 1), (5, 6), (15, 16), (3, 7), (6, 14), (0, 9)):
        parts = run(x[first:last].contiguous(), squares[first:last].contiguous())
        assert all(torch.equal(part, whole[first:last]) for part, whole in zip(parts, want, strict=True))
    x[1::2], kept = torch.nan, list(range(0, most, 2))
    assert all(torch.equal(part[kept], whole[kept]) for part, whole in zip(run(x, squares), want, strict=True))


@pytest.mark.parametrize("experts", [8, 32, 64, 128, 512])
def test_equal_scores_go_to_the_smaller_ids(experts: int) -> None:
    for name in ("softmax", "sigmoid-raw", "topk-softmax"):
        case, x = Case(experts, 2048, name), torch.ones((9, 2048), dtype=BF16, device="cuda")
        for step in (1, 2):
            case.weight.zero_()
            case.weight[::step] = 0.01
            for tensor in (case.bias, case.correction):
                if tensor is not None:
                    tensor.zero_()
            assert case.route(x).ids.tolist() == [list(range(0, step * case.top_k, step))] * 9


@pytest.mark.parametrize("name", RULES)
def test_scores_of_nan_count_as_least(name: str) -> None:
    case, (x, _) = Case(128, 2048, name), rows_of(9, 2048)
    x[1], x[4, 7], x[8, 0] = torch.nan, torch.nan, torch.inf
    found = case.route(x)
    assert found.ids[[1, 4]].tolist() == [[*range(case.top_k), *[128] * case.rule.shared]] * 2
    assert found.weights[[1, 4], : case.top_k].isnan().all()
    assert all(len(set(ids)) == case.top_k + case.rule.shared for ids in found.ids.tolist())
    assert torch.equal(found.masks, masks(found.ids, 128 + case.rule.shared))
    rest = [0, 2, 3, 5, 6, 7]
    case.check(x[rest], Routing(found.ids[rest], found.weights[rest], found.masks[rest]))
    if case.correction is not None:
        case.correction[3:120] = torch.nan
        case.correction[2] = -torch.inf
        assert set(case.route(x[rest]).ids[:, : case.top_k].flatten().tolist()) <= {0, 1, *range(120, 128)}


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_chain_of_kernels_that_start_early_computes_the_same(rows: int) -> None:
    """Each GEMM writes the rows and the squares that the next router must wait for."""
    hidden, layers = 2048, 12
    case, config = Case(128, hidden, "softmax"), TritonConfig(16, 256, 2, 6, prefetch=512)
    gains = [(torch.rand(hidden, device="cuda") + 0.5).to(BF16) for _ in range(layers)]
    projections = [(torch.randn((hidden, 512), device="cuda") * 512**-0.5).to(BF16) for _ in range(layers)]
    y, start = torch.randn((rows, 512), device="cuda").to(BF16), torch.randn((rows, hidden), device="cuda")
    h, squares, scaled = torch.empty_like(start), torch.empty((rows, hidden // 16), device="cuda"), torch.empty_like(start, dtype=BF16)

    def chain(pdl: bool) -> list[torch.Tensor]:
        h.copy_(start)
        outs = []
        for gain, projection in zip(gains, projections, strict=True):
            deferred = DeferredNorm(gain, scaled, squares)
            triton_gemm(y, projection, h, config, Epilogue(add=True, deferred=deferred), pdl=pdl)
            options = normed_options(scaled, squares)
            found = case.route(scaled, **options, pdl=pdl)
            outs += [found.ids, found.weights, found.masks, options["normed"]]
        return outs

    want = [out.clone() for out in chain(False)]
    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(True)
    for _ in range(20):
        for out in found:
            out.fill_(0)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(found, want, strict=True))
