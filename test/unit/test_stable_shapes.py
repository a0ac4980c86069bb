from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime.config import machine
from runtime.layers.attention import stable_shapes
from runtime.layers.attention.stable_shapes import HeadKind, StableShapes, any_shapes, find_stable_shapes

HALVES = StableShapes(4, (0, *(16 * n if n <= 12 else max(384, 16 * n) for n in range(1, 33))))
"""Of a processor whose GEMMs over 193 to 383 keys sum in halves."""


@pytest.mark.parametrize(
    ("keys", "attended"), [(1, 16), (16, 16), (17, 32), (192, 192), (193, 384), (400, 400), (512, 512), (513, 528), (705, 896)]
)
def test_keys_are_rounded_up_to_a_stable_number(keys: int, attended: int) -> None:
    assert HALVES.key_count(keys) == attended


@pytest.mark.parametrize(("rows", "missing"), [(1, 3), (3, 1), (4, 0), (32, 0), (33, 3), (36, 0)])
def test_each_block_of_queries_gets_the_least_number(rows: int, missing: int) -> None:
    assert HALVES.missing_rows(rows) == missing


def test_without_a_rule_only_vectors_are_filled() -> None:
    shapes = any_shapes()
    assert [shapes.key_count(n) for n in (1, 200, 300, 1000)] == [16, 208, 304, 1008]
    assert [shapes.missing_rows(n) for n in (1, 33)] == [0, 0]


def test_shapes_found_for_two_kinds_of_heads_hold_for_each() -> None:
    kinds = [HeadKind(64, 64, torch.float32), HeadKind(128, 64, torch.float32)]
    both = find_stable_shapes(frozenset(kinds))
    for kind in kinds:
        one = find_stable_shapes(frozenset({kind}))
        assert both.min_rows >= one.min_rows
        assert set(both.last_keys) <= set(one.last_keys)


def test_keys_fill_pairs_of_vectors_if_prompts_sum_others_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with AMX."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor) -> torch.Tensor:
        return torch.full(q.shape, float(q.shape[2] >= 64 and k.shape[2] % 32 > 0))

    monkeypatch.setattr(stable_shapes.F, "scaled_dot_product_attention", attend)
    shapes = find_stable_shapes.__wrapped__(frozenset({HeadKind(64, 64, torch.bfloat16)}))
    assert [shapes.key_count(keys) for keys in (1, 32, 33, 512, 513, 600)] == [32, 32, 64, 512, 544, 608]
    assert shapes.min_rows == 1


def test_without_stable_shapes_only_vectors_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with AVX2 alone, if long prompts, whose blocks have more queries, are summed in another order."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor) -> torch.Tensor:
        return torch.full(q.shape, float(q.shape[2] >= 192))

    monkeypatch.setattr(stable_shapes.F, "scaled_dot_product_attention", attend)
    assert find_stable_shapes.__wrapped__(frozenset({HeadKind(64, 64, torch.float32)})) == any_shapes()


@pytest.mark.parametrize(
    ("cpu", "asked"),
    [
        ("vendor_id : GenuineIntel\nflags : avx2 fma", "AUTO,STRICT"),
        ("vendor_id : GenuineIntel\nflags : avx2 avx512f", None),
        ("vendor_id : AuthenticAMD\nflags : avx2", None),
        ("", None),
    ],
)
def test_mkl_is_asked_for_steady_sums_where_it_has_no_others(monkeypatch: pytest.MonkeyPatch, cpu: str, asked: str | None) -> None:
    variables = dict[str, str]()
    monkeypatch.setattr(machine, "text_of", lambda path: cpu)
    monkeypatch.setattr(machine.os, "environ", variables)
    machine.ask_for_steady_sums()
    assert variables.get("MKL_CBWR") == asked
    variables["MKL_CBWR"] = "COMPATIBLE"
    machine.ask_for_steady_sums()
    assert variables["MKL_CBWR"] == "COMPATIBLE"


AVX2_ALONE = """
import torch
from runtime.config import machine
from runtime.layers.attention.stable_shapes import HeadKind, find_stable_shapes
machine.text_of = lambda path: "GenuineIntel avx2"
machine.ask_for_steady_sums()
print(find_stable_shapes(frozenset({HeadKind(64, 64, torch.float32)})).min_rows)
weight, x = torch.randn(64, 512), torch.randn(300, 512)
print(all(torch.equal(x[:rows] @ weight.T, (x @ weight.T)[:rows]) for rows in (1, 2, 3, 5, 8, 24, 33)))
"""


@pytest.mark.skipif("GenuineIntel" not in Path("/proc/cpuinfo").read_text(), reason="needs a processor whose AVX-512 MKL can leave unused")
def test_steady_sums_give_a_query_the_same_bits_with_avx2_alone() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "MKL_CBWR"} | {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    found = subprocess.run([sys.executable, "-c", AVX2_ALONE], env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split() == ["1", "True"]
