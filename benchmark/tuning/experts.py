"""All promising tilings of the experts' kernels for the sparse layers of public models, timed in graphs.

    PYTHONPATH=python python -m benchmark.tuning.experts --rows 1,4,16,64,128,256,1024,8192

Up to 64 tokens the kernels for few tokens are timed: first the tilings of one kernel, then those of the other. From 32 tokens on the
grouped GEMM is timed. The fastest belong in config/expert_tuning.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from benchmark.expert_layers import SHAPES, ExpertLayers, ExpertShape, microseconds
from benchmark.record import Record
from benchmark.shapes import read_rate
from benchmark.sweep import numbers
from benchmark.tuning.command_line import arguments, parse_on_gpu
from runtime.config.expert_tuning import H200_EXPERTS, WeightFormat
from runtime.config.kernel_configs import GroupedConfig, StepConfig

if TYPE_CHECKING:  # requires Triton, which is installed with a GPU only
    from runtime.layers.moe.router import Routing

NAME = "tuning/experts"
KEYS = ("shape", "rows", "kernel")
TOLERANCE = 0.06
"""Maximum relative error compared with the first tiling; it is large because e4m3 activations differ by more than rounding."""
FEW_ROWS, MANY_ROWS = 64, 32
"""Kernels for few tokens are timed up to the first number of tokens, the grouped GEMM from the second one on."""
STEPS: dict[WeightFormat, tuple[StepConfig, ...]] = {
    "dense": tuple(
        StepConfig(*config)
        for config in (
            (16, 256, 1, 2, 6), (16, 256, 1, 4, 6), (16, 256, 2, 2, 4), (16, 256, 2, 4, 4), (16, 512, 1, 4, 4), (32, 128, 2, 4, 4),
            (32, 256, 1, 2, 4), (32, 256, 1, 4, 4), (32, 256, 2, 4, 3), (64, 128, 1, 4, 4), (64, 128, 2, 4, 3), (64, 256, 1, 4, 3),
            (128, 64, 1, 4, 4), (128, 128, 1, 8, 3),
        )
    ),
    "fp8": tuple(
        StepConfig(*config)
        for config in (
            (16, 128, 2, 2, 6), (16, 128, 4, 2, 4), (16, 128, 4, 4, 4), (16, 128, 8, 4, 3), (32, 128, 2, 2, 4), (32, 128, 2, 4, 4),
            (32, 128, 4, 2, 4), (32, 128, 4, 4, 3), (32, 128, 4, 4, 4), (64, 128, 1, 4, 4), (64, 128, 2, 4, 3), (64, 128, 2, 4, 4),
            (64, 128, 4, 4, 3), (128, 128, 1, 4, 4), (128, 128, 2, 8, 3),
        )
    ),
    "mxfp4": tuple(
        StepConfig(*config)
        for config in (
            (16, 256, 2, 2, 4), (16, 256, 2, 4, 4), (16, 512, 1, 2, 4), (16, 512, 1, 4, 4), (32, 128, 2, 4, 4), (32, 256, 1, 2, 4),
            (32, 256, 1, 4, 4), (32, 256, 2, 2, 4), (32, 256, 2, 4, 3), (64, 128, 2, 4, 4), (64, 256, 1, 4, 4), (64, 256, 2, 4, 3),
            (128, 128, 1, 4, 4), (128, 256, 1, 8, 3),
        )
    ),
    "int4": tuple(
        StepConfig(*config)
        for config in (
            (16, 128, 2, 2, 4), (16, 128, 2, 4, 4), (16, 128, 4, 2, 4), (16, 128, 4, 4, 4), (32, 128, 1, 2, 4), (32, 128, 2, 2, 4),
            (32, 128, 2, 4, 4), (32, 128, 4, 4, 3), (64, 128, 1, 4, 4), (64, 128, 2, 4, 4), (64, 128, 2, 4, 3), (128, 128, 1, 4, 4),
        )
    ),
}  # fmt: skip
GROUPED: dict[WeightFormat, tuple[GroupedConfig, ...]] = {
    "dense": tuple(
        GroupedConfig(*config)
        for config in (
            (16, 64, 128, 4, 4), (16, 128, 128, 4, 3), (32, 128, 64, 4, 4), (64, 128, 64, 8, 4, 4), (64, 256, 64, 8, 4, 4),
            (128, 128, 64, 8, 4, 8), (128, 128, 64, 4, 3, 4), (128, 256, 64, 8, 3, 4), (128, 256, 64, 8, 4, 8), (256, 128, 64, 8, 3, 4),
            (64, 256, 64, 4, 4, 8), (64, 256, 64, 8, 4, 16), (128, 256, 64, 8, 4, 16), (128, 128, 128, 8, 3, 8),
        )
    ),
    "fp8": (
        *(GroupedConfig(*config) for config in ((16, 64, 128, 4, 4), (16, 128, 128, 8, 4))),
        *(
            GroupedConfig(*config, fp8_rows=True)
            for config in (
                (16, 64, 128, 4, 4), (16, 128, 128, 4, 4), (32, 128, 128, 4, 4), (64, 128, 128, 4, 4, 4), (64, 128, 128, 8, 4, 4),
                (128, 64, 128, 4, 4, 4), (128, 128, 128, 8, 4, 4), (128, 128, 128, 8, 3, 8),
                (64, 256, 128, 8, 3, 4), (256, 64, 128, 8, 3, 4), (128, 128, 128, 8, 3, 16), (128, 256, 128, 16, 3, 8),
                (256, 128, 128, 16, 3, 4),
            )
        ),
    ),
    "mxfp4": tuple(
        GroupedConfig(*config)
        for config in (
            (16, 64, 128, 4, 4), (16, 64, 256, 4, 4), (16, 128, 128, 4, 4), (32, 64, 128, 4, 4), (32, 128, 128, 4, 3), (64, 128, 64, 4, 3),
            (64, 128, 128, 4, 3), (128, 128, 64, 8, 3, 4), (128, 128, 64, 4, 3, 4), (256, 128, 64, 8, 3, 2), (128, 128, 128, 8, 3, 4),
        )
    ),
    "int4": tuple(
        GroupedConfig(*config)
        for config in (
            (16, 64, 128, 4, 4), (16, 128, 128, 4, 4), (32, 64, 128, 4, 4), (32, 128, 128, 4, 4), (32, 128, 128, 4, 3), (64, 128, 64, 4, 3),
            (64, 128, 128, 4, 3), (128, 128, 64, 8, 3, 4), (128, 128, 64, 4, 3, 4), (256, 128, 64, 8, 3, 2), (128, 128, 128, 8, 3, 4),
        )
    ),
}  # fmt: skip
Config = tuple[StepConfig, StepConfig] | GroupedConfig


class Bench:
    """The layers of one shape at one number of tokens, and the timing of tilings on them."""

    def __init__(self, layers: ExpertLayers, rows: int) -> None:
        self.layers, self.rows, self.inputs = layers, rows, layers.inputs(rows)
        self.routings = [layers.route(x, call) for call, x in enumerate(self.inputs)]
        self.out = torch.empty((rows, layers.shape.hidden), device="cuda")
        self._want: torch.Tensor | None = None

    def run(self, config: Config, call: int = 0) -> torch.Tensor:
        """One call."""
        from runtime.layers.moe.kernels.expert_pass import ExpertPass
        from runtime.layers.moe.kernels.few_rows import experts_in_triton
        from runtime.layers.moe.kernels.many_rows import experts_many_rows

        routing: Routing = self.routings[call]
        weights = self.layers.layers[call % len(self.layers.layers)]
        experts = ExpertPass(self.inputs[call], *weights, routing, self.layers.act, self.out, pdl=True)
        return experts_many_rows(experts, config) if isinstance(config, GroupedConfig) else experts_in_triton(experts, config)

    def time(self, config: Config) -> float | None:
        """Microseconds of a call; None if the tiling does not compile, does not fit or is wrong."""
        from triton.errors import TritonError

        self.out.fill_(float("nan"))
        try:
            got = self.run(config).clone()
        except TritonError as error:
            print(f"  {_name(config)}: {type(error).__name__}", flush=True)
            return None
        if self._want is None:
            self._want = got
        if not float((got - self._want).norm() / self._want.norm()) < TOLERANCE:
            print(f"WRONG: {self.layers.shape.name}, {self.rows} tokens, {_name(config)}", flush=True)
            return None
        return microseconds(lambda call: self.run(config, call), len(self.inputs))


def _name(config: Config) -> str:
    return str(config) if isinstance(config, GroupedConfig) else " | ".join(str(step) for step in config)


def compile_runs(runs: Iterable[Callable[[], object]]) -> None:
    """Compile the kernels of the runs in parallel; failures are reported when the runs are timed."""
    from triton.errors import TritonError

    from runtime.layers.gemm.autotune import compile_all

    def quietly(run: Callable[[], object]) -> None:
        with suppress(TritonError):
            run()

    compile_all([lambda _, run=run: quietly(run) for run in runs])


def fastest(bench: Bench, kernel: str, configs: Sequence[Config], record: Record) -> Config:
    """Time the tilings, print and record them, and return the fastest."""
    times = {config: spent for config in configs if (spent := bench.time(config)) is not None}
    ordered = sorted(times, key=times.__getitem__)
    shape = bench.layers.shape
    rate = read_rate(record.data["machine"])
    roof = {} if rate is None else {"roof_us": round(bench.layers.distinct(bench.routings) * shape.expert_bytes / rate * 1e6, 2)}
    best = "; ".join(f"{times[config]:.1f} ({_name(config)})" for config in ordered[:4])
    print(f"{shape.name}, {bench.rows} tokens, {kernel}, roof {roof.get('roof_us', '-')}: {best}", flush=True)
    figures = {_name(config): round(times[config], 2) for config in ordered}
    record.add({"shape": shape.name, "rows": bench.rows, "kernel": kernel, **roof, "us": figures})
    return ordered[0]


def copy_rate() -> float:
    """TB/s of a large copy, read and written. Far below 4.2, other work shares the GPU and timings are invalid."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds(lambda _: target.copy_(source), 4) / 1e6


def sweep(shape: ExpertShape, rows: Sequence[int], record: Record) -> None:
    """Time all tilings for one shape."""
    start, layers = time.perf_counter(), ExpertLayers(shape)
    benches = [Bench(layers, count) for count in rows]
    first = H200_EXPERTS.few[shape.format][0][1]
    steps, grouped = STEPS[shape.format], GROUPED[shape.format]
    few = [*((step, first[1]) for step in steps), *((first[0], step) for step in steps)]
    jobs: list[tuple[Bench, Config]] = []
    for bench in benches:
        jobs += [(bench, config) for config in few if bench.rows <= FEW_ROWS]
        jobs += [(bench, config) for config in grouped if bench.rows >= MANY_ROWS]
    compile_runs([lambda bench=bench, config=config: bench.run(config) for bench, config in jobs])
    print(f"{shape.name}: {len(jobs)} kernels compiled, {time.perf_counter() - start:.0f} s", flush=True)
    for bench in benches:
        if bench.rows <= FEW_ROWS:
            up = fastest(bench, "up", [(step, first[1]) for step in steps], record)
            assert isinstance(up, tuple)
            fastest(bench, "down", [(up[0], step) for step in steps], record)
        if bench.rows >= MANY_ROWS:
            fastest(bench, "grouped", grouped, record)
    print(f"{shape.name}: {time.perf_counter() - start:.0f} s; copy: {copy_rate():.2f} TB/s", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Sweep and record."""
    parser = arguments("experts", __doc__)
    parser.add_argument("--rows", type=numbers, default=[1, 4, 16, 32, 64, 128, 256, 1024, 8192], help="numbers of tokens")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES[:3]), help="layers, by name (default %(default)s)")
    args = parse_on_gpu(parser, argv)
    record = Record(NAME, KEYS, args.out)
    with torch.inference_mode():
        print(f"copy: {copy_rate():.2f} TB/s", flush=True)
        for shape in itertools.filterfalse(lambda shape: shape.name not in args.shapes.split(","), SHAPES):
            sweep(shape, args.rows, record)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
