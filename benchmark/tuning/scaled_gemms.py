"""GEMMs with FP8 weights and with bfloat16: the tilings for few rows, and torch's GEMMs for prompts.

    PYTHONPATH=python python -m benchmark.tuning.scaled_gemms --rows 1,4,16,32,64,128,8192

Weights are those of the attention of Qwen3-30B-A3B and of an 8B model's MLP. Up to 512 rows, kernels with bfloat16 activations are timed;
above 128 rows, GEMMs with e4m3 activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from benchmark.expert_layers import ENOUGH_BYTES, microseconds
from benchmark.record import Record
from benchmark.shapes import read_rate
from benchmark.sweep import numbers
from benchmark.tuning.command_line import arguments, parse_on_gpu
from runtime.config.device_tuning import H200
from runtime.config.kernel_configs import FragmentConfig, TritonConfig, WideningConfig

NAME = "tuning/scaled_gemms"
KEYS = ("weight", "rows")
SHAPES = ((5120, 2048), (2048, 4096), (28672, 4096), (4096, 14336))
"""Rows and columns of weights."""
E4M3 = torch.float8_e4m3fn
MAX_ROWS = 128
Call = Callable[[int], object]


def few_rows(x: torch.Tensor, weights: Sequence[torch.Tensor], scale: torch.Tensor | None) -> dict[str, Call]:
    """The kernels for few rows, by tiling."""
    from runtime.layers.gemm.fragment_gemm import fragment_gemm
    from runtime.layers.gemm.triton_gemm import triton_gemm
    from runtime.layers.gemm.widening_gemm import widening_configs, widening_gemm

    out = torch.empty((len(x), len(weights[0])), dtype=x.dtype, device=x.device)

    def run(config: TritonConfig | FragmentConfig | WideningConfig, call: int) -> object:
        weight = weights[call % len(weights)]
        if isinstance(config, FragmentConfig):
            assert scale is not None
            return fragment_gemm(x, weight, out, config, weight_scale=scale, pdl=True)
        if isinstance(config, WideningConfig):
            assert scale is not None
            return widening_gemm(x, weight, out, config, weight_scale=scale, pdl=True)
        return triton_gemm(x, weight, out, config, weight_scale=scale, pdl=True)

    if scale is None:
        return {f"bfloat16 {config}": partial(run, config) for config in H200.gemm_configs("linear", len(x))}
    triton = H200.scaled_configs(len(x)) if len(x) <= MAX_ROWS else ()
    (N, K), num_sms = weights[0].shape, torch.cuda.get_device_properties(x.device).multi_processor_count
    found = *triton, *H200.fragment_configs(len(x)), *widening_configs(len(x), N, K, num_sms, H200)
    return {f"e4m3 {config}": partial(run, config) for config in found}


def many_rows(x: torch.Tensor, weights: Sequence[torch.Tensor], scale: torch.Tensor) -> dict[str, Call]:
    """GEMMs with e4m3 activations, including their quantisation, and GEMMs with weights converted to bfloat16."""
    from runtime.layers.gemm.quantized_rows import quantize_rows, quantized_gemm
    from runtime.layers.gemm.widen import widen

    row_scale = torch.ones(len(weights[0]), device=x.device)

    def weight(call: int) -> torch.Tensor:
        return weights[call % len(weights)]

    return {
        "quantize": lambda _: quantize_rows(x, 128),
        "e4m3 rows": lambda call: quantized_gemm(x, weight(call), row_scale),
        "e4m3 blocks": lambda call: quantized_gemm(x, weight(call), scale),
        "widened": lambda call: torch.mm(x, widen(weight(call), scale, x.dtype).t()),
    }


def timed(calls: Mapping[str, Call], count: int) -> dict[str, float | str]:
    """Microseconds of each call, or why it does not run."""
    found: dict[str, float | str] = {}
    for name, call in calls.items():
        try:
            call(0)
            found[name] = round(microseconds(call, count), 1)
        except Exception as error:  # a refusal by a library is a result
            found[name] = f"{type(error).__name__}: {str(error)[:120]}"
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Time and record."""
    parser = arguments("scaled_gemms", __doc__)
    parser.add_argument("--rows", type=numbers, default=[1, 4, 16, 32, 64, 128, 8192], help="rows of x")
    args = parse_on_gpu(parser, argv)
    record = Record(NAME, KEYS, args.out)
    rate = read_rate(record.data["machine"])
    with torch.inference_mode():
        for out, width in SHAPES:
            copies = max(2, ENOUGH_BYTES // 4 // (out * width))
            wide = [torch.randn((out, width), device="cuda").to(torch.bfloat16) for _ in range(copies // 2)]
            narrow = [weight.to(E4M3) for weight in wide] * 2
            scale = torch.ones((-(-out // 128), -(-width // 128)), device="cuda")
            for rows in args.rows:
                x = torch.randn((rows, width), device="cuda").to(torch.bfloat16)
                torch.mm(x, wide[0].t())
                calls: dict[str, Call] = {"bfloat16": lambda call, x=x, wide=wide: torch.mm(x, wide[call % len(wide)].t())}
                if rows <= MAX_ROWS:
                    calls |= few_rows(x, wide, None) | few_rows(x, narrow, scale)
                else:
                    calls |= few_rows(x, narrow, scale) | many_rows(x, narrow, scale)
                count = 16 if rows <= MAX_ROWS else 4
                roof = {} if rate is None else {"bytes, e4m3": round(out * width / rate * 1e6, 1)}
                figures = {**roof, **timed(calls, count)}
                record.add({"weight": f"{out}x{width}", "rows": rows, "us": figures})
                print(f"{out}x{width}, {rows} rows: {figures}", flush=True)


if __name__ == "__main__":
    main()
