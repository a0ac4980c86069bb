"""The cost of exactness in bfloat16 on a GPU: passes with kernels chosen by size, and with the same kernels for all sizes.

Passes of up to 64 rows run in graphs: with the default choices, with one tiling per GEMM, and additionally with the keys of each request
in one part (no split-KV). The table also counts the tokens whose logits differ in any bit from those of 64 requests decoded token by
token. The second table compares greedy answers of the embedded model with and without drafts.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmark import picture, plots
from benchmark.embedded_speculation import EMBEDDED, OFF, chat_prompts, speculation
from benchmark.lossless import compare, in_groups, options
from benchmark.markdown import Result, change, pick, table, with_provenance
from benchmark.record import Record, Row
from benchmark.shapes import big_model, engine_options, tiny_model
from benchmark.sweep import arguments, numbers
from benchmark.tuning.world import decode_batch, page_table
from runtime import Engine
from runtime.config.device_tuning import DeviceTuning
from runtime.config.flag_parser import parse
from runtime.config.kernel_configs import SplitConfig
from runtime.config.runtime_config import RuntimeConfig
from runtime.entrypoints.prepare import prepare
from runtime.layers.attention.base import plan_pass
from runtime.layers.backend_selection import select_ops
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.gemm.gemm import Gemm
from runtime.layers.gemm.timings import GemmTimings
from runtime.layers.kernels.graph_timer import replay_times
from runtime.mem_cache.kv_pool import PageTable
from runtime.model_executor.context import BuildOptions, make_context
from runtime.model_executor.model_loader import load_model
from runtime.model_executor.model_runner import ModelRunner
from runtime.models.config import ModelConfig
from runtime.models.decoder import DecoderModel

NAME = "exactness"
KEYS = ("model", "setting", "requests", "width", "context")
DEFAULT, ONE_TILING, ONE_PART = SETTINGS = ("default", "one tiling per GEMM", "and one part of keys")
WINDOW, MOST = 4, 64
PASSES = ((1, 1), (4, 1), (16, 1), (64, 1), (1, WINDOW), (4, WINDOW), (16, WINDOW))
"""(requests, tokens of each): decode passes, then windows of three drafts."""
ROWS = (1, 4, 16, 64)
"""Numbers of rows of these passes; each is an m bucket."""
DRAFTS, TOGETHER = "3/1/4", (1, 16)
ON_GPU = {"device": "cuda", "dtype": "bfloat16", "context_length": 1024, "max_running_requests": max(TOGETHER)}
ANY = 1 << 16
WHOLE = SplitConfig(64, num_warps=4, stages=4, programs_per_sm=1, max_partial_rows=1)
"""Split-KV attention in which one program computes all keys of a request, for any batch and width."""
Choice = TypeVar("Choice", bound=Hashable)


@dataclass(frozen=True)
class Passes:
    """Passes of one model with one attention configuration, over random keys and values.

    Attributes:
        tokens: int64 [requests, WINDOW], the tokens after the `context` tokens of each request.
        kernels: one line for each GEMM and m bucket.
    """

    runner: ModelRunner
    table: PageTable
    tokens: torch.Tensor
    context: int
    kernels: Mapping[str, str]

    @classmethod
    def build(cls, config: RuntimeConfig, model: DecoderModel, tuning: DeviceTuning, context: int) -> Passes:
        """Fill the cache and compile the kernels; the model is bound to this cache."""
        device = model.embed.device
        torch.manual_seed(0)
        table = page_table(MOST, context + WINDOW, config.cache.page_size, device)
        runner = ModelRunner(model, config.device.attention_backend, model.dtype, device, tuning=tuning)
        runner.allocate(MOST * table.max_pages, table, MOST, WINDOW)
        for cache in (*runner.kv_pool.k, *runner.kv_pool.v):
            cache.normal_()
        attention = [run for width in (1, WINDOW) for run in runner.backend.warmup_runs(ROWS, width, tree=False)]
        kernels = model.context.ops.autotune(list(model.gemms()), ROWS, attention)
        return cls(runner, table, torch.randint(model.config.vocab_size, (MOST, WINDOW), device=device), context, kernels)

    def plan(self, requests: int, width: int, first: int = 0) -> ForwardBatch:
        """Plan the pass over `width` tokens of each request, from token `first` on."""
        batch = decode_batch(requests, width, self.context + first + width, self.tokens.device)
        batch.input_ids.copy_(self.tokens[:requests, first : first + width].flatten())
        batch.out_cache_loc.copy_(self.table.slots(batch.req_pool_indices.repeat_interleave(width), batch.positions))
        plan_pass(self.runner.backend, batch)
        return batch

    def logits(self, requests: int, width: int) -> torch.Tensor:
        """Float32 [requests, WINDOW, vocab], from passes of `width` tokens of each request."""
        model = self.runner.model
        passes = [model.forward(self.plan(requests, width, first))[0] for first in range(0, WINDOW, width)]
        return torch.cat([model.logits(hidden).unflatten(0, (requests, width)) for hidden in passes], dim=1)

    def milliseconds(self, requests: int, width: int, replays: int) -> float:
        """The median time of a pass with its greedy tokens, in a graph on a GPU."""
        model, batch = self.runner.model, self.plan(requests, width)

        def run() -> None:
            model.greedy(model.forward(batch)[0])

        run()  # compile
        return statistics.median((replay_times if batch.input_ids.is_cuda else _eager_times)(run, replays)) / 1000

    def rows(self, setting: str, replays: int) -> Iterator[Row]:
        """A row for each of `PASSES`."""
        expected = self.logits(MOST, 1)
        for requests, width in PASSES:
            same = (self.logits(requests, width) == expected[:requests]).all(dim=2)
            rows = f" rows {requests * width}"
            kernels = {name.removesuffix(rows): line.partition(" (")[0] for name, line in self.kernels.items() if name.endswith(rows)}
            yield {
                "setting": setting, "requests": requests, "width": width, "context": self.context, "tokens": same.numel(),
                "differ": int((~same).sum()), "ms": self.milliseconds(requests, width, replays),
                "kernels": kernels,
            }  # fmt: skip


def _eager_times(run: Callable[[], object], repeats: int) -> list[float]:
    """Microseconds of each run on a CPU."""
    times = [time.perf_counter()]
    for _ in range(repeats):
        run()
        times.append(time.perf_counter())
    return [1e6 * (after - before) for before, after in pairwise(times)]


# ---- one choice for all sizes


def searched_tuning(tuning: DeviceTuning) -> DeviceTuning:
    """Make every tiling a candidate for any number of rows, if it computes a row in the same order for all of them.

    Without `swap`, rows are the left operand, and 64 rows may use another tensor-core instruction than 16.
    """
    tilings = {
        op: ((ANY, tuple(dict.fromkeys(tiling for _, listed in table for tiling in listed if tiling.swap))),)
        for op, table in tuning.gemm_candidates.items()
    }
    return replace(tuning, gemm_candidates=tilings, fragment_candidates=(), triton_gemm_rows=0, wgmma_only_rows=ANY)


def whole_tuning(tuning: DeviceTuning) -> DeviceTuning:
    """Use split-KV attention for every batch, with all keys of a request in one part."""
    return replace(tuning, split_kv_batches=((1, ANY),), split_kv=((ANY, WHOLE),))


def best_for_all(times: Sequence[Mapping[Choice, float]]) -> Choice:
    """Of the choices timed at all sizes, except cuBLAS (None), the one with the smallest mean ratio to the fastest choice of each size."""
    common = [choice for choice in times[0] if choice is not None and all(choice in one for one in times)]
    return min(common, key=lambda choice: sum(one[choice] / min(one.values()) for one in times))


def one_tiling(gemms: Sequence[Gemm], searched: GemmTimings, tuning: DeviceTuning) -> GemmTimings:
    """Timings with only one choice for all of `ROWS`; empty if torch has no kernels to choose from."""
    found = GemmTimings(tuning)
    for gemm in {gemm.key(0): gemm for gemm in gemms}.values():
        dtype = gemm.linear.weight.dtype
        timed = [one for rows in ROWS if (one := searched.known(dtype, gemm.key(rows))) is not None]
        for rows, one in zip(ROWS, timed, strict=False):
            best = best_for_all([other.micros for other in timed])
            found.keep(dtype, gemm.key(rows), lambda one=one, best=best: replace(one, choice=best))
    return found


def measure(flags: Sequence[str], contexts: Sequence[int], replays: int) -> Iterator[Row]:
    """Measure the passes with each of `SETTINGS` after each context. Call it under `torch.inference_mode()`."""
    config, model_config = prepare(parse([*flags]).args)
    tuning = config.device.tuning

    def rows(model: DecoderModel, setting: str, cut: DeviceTuning) -> Iterator[Row]:
        for context in contexts:
            yield from Passes.build(config, model, cut, context).rows(setting, replays)

    model = load(config, model_config, GemmTimings(tuning))
    yield from rows(model, DEFAULT, tuning)
    searched = GemmTimings(searched_tuning(tuning))
    select_ops(model.embed.device, model.dtype, searched)[0].autotune(list(model.gemms()), ROWS)
    one = one_tiling(list(model.gemms()), searched, tuning)
    del model
    gc.collect()
    model = load(config, model_config, one)
    yield from rows(model, ONE_TILING, tuning)
    yield from rows(model, ONE_PART, whole_tuning(tuning))


def load(config: RuntimeConfig, model_config: ModelConfig, timings: GemmTimings) -> DecoderModel:
    """The model, with the GEMM choices of `timings`."""
    model = config.model
    return load_model(
        make_context(config, BuildOptions(timings=timings)), model_config, model.model_path, model.load_format, model.quantization
    )


# ---- greedy answers


def answer_rows(
    common: Mapping[str, Any], drafts: Mapping[str, Any], prompts: int, new_tokens: int, together: Sequence[int] = TOGETHER
) -> Iterator[Row]:
    """Compare answers with `drafts` to plain ones at the same batch size, and plain ones to those of single requests."""
    found = {}
    for shape in (OFF, DRAFTS):
        with Engine(**common, **speculation(shape, drafts)) as engine:
            asked = chat_prompts(engine)[:prompts]
            found |= {(shape, size): in_groups(engine, asked, size, new_tokens) for size in together}
    alone, *others = together
    for size in others:
        yield {"setting": f"plain, {size} together against {alone}", "requests": size} | compare(found[OFF, alone], found[OFF, size])
    for size in together:
        yield {"setting": f"EAGLE {DRAFTS} against plain", "requests": size} | compare(found[OFF, size], found[DRAFTS, size])


# ---- what is shown


def _name(row: Row) -> str:
    return f"{row['model']}, {row['context']} tokens, {row['requests']} x {row['width']}"


def _passes(result: Result) -> list[tuple[Row, list[Row | None]]]:
    """The rows of each pass: with the default choices, and with each setting."""
    rows = [row for row in result["rows"] if row["setting"] in SETTINGS]
    first = [row for row in rows if row["setting"] == DEFAULT]
    same = ("model", "requests", "width", "context")
    return [(row, [pick(rows, setting=setting, **{key: row[key] for key in same}) for setting in SETTINGS]) for row in first]


def _answers(result: Result) -> list[Row]:
    return [row for row in result["rows"] if row["setting"] not in SETTINGS]


def summary(result: Result) -> str:
    """Times and differing tokens of the passes, then greedy answers that differ."""
    lines = []
    for default, found in _passes(result):
        times = [row and f"{row['ms']:.3f}" + (f" ({change(row['ms'], default['ms'])})" if row is not default else "") for row in found]
        differ = [row and f"{row['differ']} of {row['tokens']}" for row in found]
        lines.append([_name(default), default["requests"] * default["width"], *times, *differ])
    columns = [f"{what}, {name}" for what in ("ms", "tokens that differ") for name in SETTINGS]
    answers = [
        [f"{row['model']}, {row['setting']}", row["requests"], row["prompts"], row["tokens"], row["accept_length"], len(row["differences"])]
        for row in _answers(result)
    ]
    asked = ["greedy answers", "together", "prompts", "tokens", "accept length", "answers that differ"]
    return f"{table(['context, requests x tokens of a pass', 'rows', *columns], lines)}\n\n{table(asked, answers)}"


render = with_provenance(summary)


def plot(result: Result, file: Path) -> None:
    """Times of the passes by setting, and answers that differ."""
    times = {_name(default): {row["setting"]: row["ms"] for row in found if row is not None} for default, found in _passes(result)}
    differ = {
        f"{row['model']}, {row['setting']}, {row['requests']}": {"answers that differ": len(row["differences"])} for row in _answers(result)
    }
    panels = [
        plots.bars(times, "A pass, by context and requests x tokens", "ms"),
        plots.bars(differ, "Greedy answers", "answers that differ"),
    ]
    picture.draw(result, file, "Kernels chosen by the size of a pass, and the same for all sizes", panels)


def main() -> None:
    """Measure, record and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--model", help="file of the embedded model, if it cannot be fetched")
    parser.add_argument("--contexts", type=numbers, default=[1000, 8000], help="tokens of each request before a pass")
    parser.add_argument("--only", choices=("passes", "answers"), help="measure one of the two tables")
    args = parser.parse_args()
    record, quick = Record(NAME, KEYS, args.out, args.quick), args.quick
    if args.only != "answers":
        served = tiny_model() if quick else big_model()
        with torch.inference_mode():
            for row in measure(served.target_flags, [16] if quick else args.contexts, 2 if quick else 9):
                record.add({"model": served.name, **row})
        gc.collect()
        torch.cuda.empty_cache()  # the engines share the GPU with this process
    if args.only != "passes":
        with engine_options(quick, ON_GPU, EMBEDDED) as (model, drafts):
            common = {**model, **(options("cpu", 1) if quick else {}), **({"model_path": args.model} if args.model else {})}
            for row in answer_rows(common, drafts, 2 if quick else 64, 4 if quick else 64, (1, 2) if quick else TOGETHER):
                record.add({"model": "tiny" if quick else "smollm2-135m", **row})
    record.show(render, plot)


if __name__ == "__main__":
    main()
