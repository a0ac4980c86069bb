from __future__ import annotations

import pytest
import torch

from runtime.layers.linear import INT8_DIRECT_ROWS, Int8Linear, Linear, quantize_rows


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokens", [1, 5, INT8_DIRECT_ROWS, INT8_DIRECT_ROWS + 1, 40])
@pytest.mark.parametrize(("out_features", "in_features"), [(48, 64), (36, 36), (7, 64), (8, 40)])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_linear_multiplies_by_its_dequantized_weight(tokens: int, out_features: int, in_features: int, bias: bool) -> None:
    layer = Int8Linear.quantize(random(out_features, in_features), random(out_features, seed=1) if bias else None)
    x = random(tokens, in_features, seed=2)
    expected = Linear(layer.dequantized(), layer.bias)(x.bfloat16().float())
    torch.testing.assert_close(layer(x), expected, rtol=2e-2, atol=0.1)
    assert layer(x).dtype == x.dtype


def test_an_int8_row_does_not_depend_on_the_other_tokens() -> None:
    layer, x = Int8Linear.quantize(random(64, 64)), random(8, 64, seed=3)
    assert torch.equal(layer(x)[3], layer(x[3:4])[0])


@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (576, 1536)])
def test_an_int8_prompt_row_is_the_same_in_every_pass(out_features: int, in_features: int) -> None:
    layer, x = Int8Linear.quantize(random(out_features, in_features)), random(300, in_features, seed=3)
    whole = layer(x, in_prompt=True)
    for start, stop in ((0, 1), (0, 16), (0, 17), (0, 40), (3, 131), (100, 300), (299, 300)):
        assert torch.equal(layer(x[start:stop], in_prompt=True), whole[start:stop]), (start, stop)


def test_quantization_is_off_by_at_most_half_a_step() -> None:
    rows = random(50, 64) * torch.logspace(-6, 3, 50)[:, None]
    values, scale = quantize_rows(rows)
    error = (values.float() * scale.float()[:, None] - rows).abs().amax(dim=1)
    assert torch.all(error <= 0.5001 * scale.float())
    assert torch.all(scale.float() <= rows.abs().amax(dim=1) / 127 * 1.01), "the scale is no wider than rounding needs"


def test_a_row_of_zeros_stays_zero() -> None:
    layer = Int8Linear.quantize(torch.zeros(4, 32))
    assert torch.equal(layer(random(2, 32)), torch.zeros(2, 4))


@pytest.mark.parametrize("kind", [Linear, Int8Linear])
def test_parts_put_one_after_another_are_the_fused_layer(kind: type[Linear]) -> None:
    first, second, x = random(8, 32), random(4, 32, seed=1), random(3, 32, seed=2)
    layer = kind.empty(12, 32, False, torch.float32, torch.device("cpu"))
    layer.put(8, second)
    layer.put(0, first)
    whole = torch.cat((first, second))
    expected = Int8Linear.quantize(whole)(x) if kind is Int8Linear else Linear(whole)(x)
    assert torch.equal(layer(x), expected)
