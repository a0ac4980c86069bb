"""Times each kernel that autotuning considered for a GEMM, alone and within a decode pass whose other GEMMs keep their kernels.

    PYTHONPATH=python python -m benchmark.tuning.step_choices --rows 1,4,16

A kernel that is faster alone may leave fewer resources of a multiprocessor for the next kernel. Weights are random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmark.exactness import Passes, load
from benchmark.record import Record, Row
from benchmark.shapes import big_model
from benchmark.sweep import numbers
from benchmark.tuning.command_line import arguments, parse_on_gpu
from runtime.config.flag_parser import parse
from runtime.entrypoints.prepare import prepare
from runtime.layers.gemm.timings import GemmTimings

NAME = "tuning/step_choices"
KEYS = ("gemm",)
REPLAYS, TRIES = 9, 2


def rows_of(passes: Passes, timings: GemmTimings, rows: int) -> Iterator[Row]:
    """A row for each kind of GEMM in a decode pass of `rows` requests."""
    from runtime.layers.cuda_ops import CudaOps
    from runtime.layers.gemm.autotune import group_gemms
    from runtime.layers.gemm.timings import describe

    model = passes.runner.model
    ops = model.context.ops
    assert isinstance(ops, CudaOps), "there is nothing to choose from"
    for group in group_gemms(list(model.gemms()), (rows,)):
        timed = timings.known(group.dtype, group.key)
        assert timed is not None, f"{group} was not timed"
        kept, within = ops.choices[group.key], {}
        for choice in timed.micros:
            ops.choices[group.key] = choice
            within[describe(choice)] = round(min(passes.milliseconds(rows, 1, REPLAYS) for _ in range(TRIES)), 4)
        ops.choices[group.key] = kept
        alone = {describe(choice): round(micros, 2) for choice, micros in timed.micros.items()}
        yield {"gemm": str(group), "layers": len(group.linears), "kept": describe(kept), "alone_us": alone, "pass_ms": within}


def main(argv: Sequence[str] | None = None) -> None:
    """Time and record."""
    parser = arguments("step_choices", __doc__)
    parser.add_argument("--rows", type=numbers, default=[1, 4, 16], help="requests of a pass, each 1, 4, 16 or 64")
    parser.add_argument("--context", type=int, default=1000, help="tokens of each request before the pass")
    args = parse_on_gpu(parser, argv)
    record = Record(NAME, KEYS, args.out)
    config, model_config = prepare(parse([*big_model().target_flags]).args)
    with torch.inference_mode():
        timings = GemmTimings(config.device.tuning)
        model = load(config, model_config, timings)
        passes = Passes.build(config, model, config.device.tuning, args.context)
        for rows in args.rows:
            for row in rows_of(passes, timings, rows):
                record.add(row)
                print(row, flush=True)


if __name__ == "__main__":
    main()
