"""Finds the shape of the drafts and the best depth for each batch, for a model, a draft and a device: a `--speculative-tuning` file.

The model answers prompts at every depth in turn, for growing batches; then trees of drafts run if there is time.
"""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from runtime import log as logging_setup
from runtime.check_acceptance import PROMPTS, open_worker, prompt_ids, read_prompts
from runtime.config.attention_caps import MAX_TREE_BITS
from runtime.config.draft_algorithms import ALGORITHM_CAPS
from runtime.config.flag_parser import parse_shared, read_own
from runtime.config.machine import probe
from runtime.config.refusals import check_output, flag_of
from runtime.config.resolve import check
from runtime.config.runtime_config import RuntimeConfig
from runtime.config.server_args import ServerArgs
from runtime.config.speculative_tuning import FLAG, Measurement, SpeculativeTuning, StepTime, write_tuning
from runtime.entrypoints.prepare import made_for, prepare
from runtime.errors import ConfigError, ServingError, report
from runtime.log import say
from runtime.managers.messages import AbortReq, GenerateReq, ToDetokenizer, TokensOutBatch, ToScheduler
from runtime.managers.scheduler import Scheduler
from runtime.model_executor.depth_trial import DepthTrial
from runtime.model_executor.iteration_cost import CostPoint, IterationCost
from runtime.models.config import ModelConfig
from runtime.models.draft_config import draft_block_size
from runtime.sampling_params import SamplingParams
from runtime.speculative.shape_search import Plan, best_plan, chain_plan, tree_plan
from runtime.version import __version__

if TYPE_CHECKING:
    from runtime.model_executor.worker import Worker

log = logging.getLogger(__name__)

FOUND_HERE = (
    *("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_disable_by_batch_size"),
    *("speculative_tuning", "speculative_check_parity"),
)
"""Server flags whose values this command determines."""
TREES = ((2, 2, 4), (3, 2, 6), (3, 4, 8), (5, 4, 16))
"""Steps, branches and draft tokens of the trees that are tried, the narrowest first."""
ANY_BATCH = 1 << 16
"""A batch size that no server reaches."""
CHAIN_SHARE = 0.65
"""Share of `--seconds` that chains get if trees are also measured."""
SWEEPS, MAX_ROUNDS, TREE_ROUNDS = 2, 4, 6
"""Sweeps over all batch sizes, rounds per chain batch size in each sweep, and rounds per tree batch size; fewer if time is short. Several
sweeps spread the effect of other load over all batch sizes.
"""
WORTH_MORE = 0.9
"""A tree with less than this share of the best chain's tokens per second is not tried with more requests."""


@dataclass(frozen=True)
class Options:
    """The command's own flags."""

    output: Path = field(metadata=dict(type=Path, default=Path("tuning.json"), metavar="FILE", help="Output file; default tuning.json."))
    prompts: Path | None = field(metadata=PROMPTS)
    seconds: float = field(
        metadata=dict(type=float, default=55.0, metavar="S", help="Time for all measurements after loading; default 55.")
    )
    batch_sizes: list[int] | None = field(
        metadata=dict(type=int, nargs="+", metavar="N", help="Default: powers of two up to the most running requests.")
    )
    max_new_tokens: int = field(metadata=dict(type=int, default=256, metavar="N", help="Tokens per answer; default 256."))
    temperature: float = field(metadata=dict(type=float, default=0.0, metavar="T", help="Sampling temperature; default 0."))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save. Exit status: 0, 1 where the model failed, 2 for wrong flags, 130 on Ctrl-C."""
    try:
        options, rest = read_options(sys.argv[1:] if argv is None else argv)
        args = parse_shared(rest)
        logging_setup.setup("warning" if args.log_level == "info" else args.log_level, "talon::tune", args.log_format)
        tuning = tune(options, args)
        write_tuning(tuning, options.output)
    except (ServingError, KeyboardInterrupt) as error:
        return report(error)
    shape = f"{tuning.num_steps}/{tuning.topk}/{tuning.num_draft_tokens}"
    say(f"chosen: {shape} (steps, topk, draft tokens); {tuning.lines()}; measured in {tuning.measurement.seconds:.1f} s", log)
    say(f"start the server with the same flags and {FLAG} {options.output}", log)
    return 0


def read_options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """This command's options, and the remaining server flags. Raises `ConfigError` for values out of range."""
    about = "Find steps, branches and draft tokens of speculative decoding, and the best depth for each batch size."
    own, rest = read_own(Options, "tune", about, argv)
    if min(own.max_new_tokens, *(own.batch_sizes or (1,))) < 1 or not own.seconds > 0 or not 0.0 <= own.temperature <= 2.0:
        raise ConfigError("--batch-sizes and --max-new-tokens must be at least 1, --seconds above 0, and --temperature between 0 and 2.")
    check_output(own.output)
    return own, rest


def tune(options: Options, args: ServerArgs) -> SpeculativeTuning:
    """Measure chains, then trees, print both, and choose. Raises `ConfigError` if there is nothing to choose."""
    config, model_config = chain_config(args)
    sizes = batch_sizes(config, options)
    prompts = prompt_ids(read_prompts(options.prompts), config, model_config, options.max_new_tokens)
    opening = time.perf_counter()
    with _opened(config, model_config, sizes) as worker:
        bench = Bench.start(options, config, model_config, prompts, opening)
        trees = TREES if may_branch(config) else ()
        chains = bench.chains(worker, sizes, CHAIN_SHARE if trees else 1.0)
    chain = chain_plan(chains.rates())
    say(chains.grid(), log)
    if left_out := [str(size) for size in sizes if size not in chains.measured]:
        say(f"{', '.join(left_out)} requests: not measured, the time is over; raise --seconds", log)
    plans = [plan for shape in trees if (plan := bench.tree(args, shape, chains, chain)) is not None]
    best = best_plan(chain, plans, chains.measured)
    depths = tuple(sorted({0, best.shape[0], *best.depths.values()})) if best.shape[1] == 1 else ()
    prompts = "own" if options.prompts is None else options.prompts.name
    facts = {"version": __version__, "at": datetime.now(timezone.utc).isoformat(timespec="minutes"), "prompts": prompts}
    return SpeculativeTuning(
        made_for=made_for(config, probe()),
        measurement=Measurement(**facts, temperature=options.temperature, seconds=round(bench.elapsed, 1)),
        num_steps=best.shape[0],
        topk=best.shape[1],
        num_draft_tokens=best.shape[2],
        depths=depths,
        table=best.table,
        acceptance=tuple(round(rate, 4) for rate in chains.trial.acceptance.rates()) if depths else (),
        steps=tuple(StepTime(p.size, p.depth, round(p.seconds, 7)) for p in chains.points if p.depth in depths),
    )


# ---- configurations


def chain_config(args: ServerArgs) -> tuple[RuntimeConfig, ModelConfig]:
    """The configuration of a server that chooses among all depths. Raises `ConfigError` for the flags that this command determines."""
    for name in FOUND_HERE:
        if getattr(args, name):
            raise ConfigError(f"{flag_of(name)} has no effect: python -m runtime.tune finds the shape of the drafts. Leave it out.")
    if args.enable_dp_attention:
        raise ConfigError("python -m runtime.tune does not measure attention groups. Leave --enable-dp-attention out.")
    check(args)
    if args.speculative_algorithm == "none" or (args.speculative_algorithm is None and args.model_path is not None):
        raise ConfigError("There are no drafts to tune. Give --speculative-algorithm and its flags.")
    config, model_config = prepare(replace(args, speculative_num_steps="auto"))
    speculative = config.speculative
    assert speculative is not None, "the embedded model drafts by default"
    path = speculative.draft_model_path
    if path is not None and (block_size := draft_block_size(path, speculative.algorithm)) is not None:
        whole = min(block_size, MAX_TREE_BITS) - 1
        depths = tuple(sorted({*(depth for depth in speculative.depths if depth < whole), whole}))
        speculative = structs.replace(speculative, depths=depths, num_steps=whole, num_draft_tokens=whole + 1)
    return structs.replace(config, speculative=speculative), model_config


def tree_config(args: ServerArgs, shape: tuple[int, int, int]) -> RuntimeConfig:
    """The configuration of a server that drafts trees for any batch."""
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    given = dict(zip(names, shape, strict=True))
    return prepare(replace(args, **given, speculative_disable_by_batch_size=ANY_BATCH))[0]


def may_branch(config: RuntimeConfig) -> bool:
    """Whether the draft can grow trees that can be measured here: not with several ranks, nor with synthetic acceptance."""
    speculative = config.speculative
    assert speculative is not None
    trees = ALGORITHM_CAPS[speculative.algorithm].trees
    return trees and speculative.synthetic_accept is None and config.parallel.tp_size == 1


def batch_sizes(config: RuntimeConfig, options: Options) -> list[int]:
    """Batch sizes to measure. Raises `ConfigError` for more requests than run together."""
    most = config.scheduler.max_running_requests or max(config.graphs.cuda_graph_bs, default=16)
    sizes = options.batch_sizes or [*(1 << i for i in range(most.bit_length())), most]
    if max(sizes) > most:
        raise ConfigError(f"--batch-sizes must be at most {most}, the requests that run together. Raise --max-running-requests.")
    return sorted(set(sizes))


@contextmanager
def _opened(config: RuntimeConfig, model_config: ModelConfig, sizes: Sequence[int]) -> Iterator[Worker]:
    """A worker whose graphs have these batch sizes alone; its memory is free again afterwards."""
    if config.graphs.cuda_graph_bs:
        config = structs.replace(config, graphs=structs.replace(config.graphs, cuda_graph_bs=tuple(sizes)))
    try:
        with open_worker(config, model_config) as worker, worker.parts.monitor.without_sample():
            yield worker
    finally:
        gc.collect()
        if config.device.device == "cuda":
            import torch

            torch.cuda.empty_cache()


# ---- measurements


@dataclass(frozen=True)
class Chains:
    """The depth trial of chains. `most`: the largest batch size of each depth."""

    trial: DepthTrial
    most: Mapping[int, int]

    @property
    def measured(self) -> list[int]:
        """Batch sizes that were measured, ascending."""
        return sorted({requests for requests, _ in self.trial.cells})

    @property
    def points(self) -> list[CostPoint]:
        """Measured times, one for each padded batch size and depth.

        Fewer drafts never take longer, and other load only adds time: each time is at most those of deeper iterations of the same batch.
        """
        found = {(cell.size, depth): self.trial.seconds(requests, depth) for (requests, depth), cell in sorted(self.trial.cells.items())}

        def least(size: int, depth: int) -> float:
            return min(seconds for (rows, drafts), seconds in found.items() if rows == size and drafts >= depth)

        return [CostPoint(size, depth, least(size, depth)) for size, depth in found]

    def rates(self) -> dict[int, dict[int, float]]:
        """Tokens per second by number of requests (up to the largest measured) and depth; interpolated between measured batch sizes."""
        cost = IterationCost(self.points)
        return {
            count: {d: count * self.trial.tokens(d) / cost.seconds(count, d) for d, most in sorted(self.most.items()) if count <= most}
            for count in range(1, max(self.measured) + 1)
        }

    def grid(self) -> str:
        """Tokens per second as a table; `*` marks the best depth of each batch size, `~` an estimate that was not measured."""
        rates, depths = self.rates(), sorted(self.most)
        head = "".join(f"{f'K={depth}':>10}" for depth in depths)
        lines = [f"tokens/s of chains\n{'requests':>10}{head}"]
        for count in self.measured:
            row = rates[count]
            marks = {d: ("" if (count, d) in self.trial.cells else "~", "*" if row[d] == max(row.values()) else " ") for d in row}
            cells = [f"{marks[d][0]}{row[d]:.1f}{marks[d][1]}" if d in row else "- " for d in depths]
            lines.append(f"{count:>10}" + "".join(f"{cell:>10}" for cell in cells))
        lengths = "".join(f"{self.trial.tokens(depth):>9.2f} " for depth in depths)
        return "\n".join([*lines, f"{'accepted':>10}{lengths}  ({self.trial.acceptance.iterations} windows)"])


@dataclass(frozen=True)
class Bench:
    """What all measurements share. `started`: when the worker was ready; `loading`: seconds to load it, which each tree takes again."""

    options: Options
    config: RuntimeConfig
    model_config: ModelConfig
    prompts: list[list[int]]
    sampling: SamplingParams
    started: float
    loading: float

    @classmethod
    def start(cls, options: Options, config: RuntimeConfig, model_config: ModelConfig, prompts: list[list[int]], opening: float) -> Bench:
        """The time counts from here. `opening`: when the worker began to load."""
        started = time.perf_counter()
        random_text = config.model.load_format == "dummy"
        sampling = SamplingParams(temperature=options.temperature, max_new_tokens=options.max_new_tokens, ignore_eos=random_text)
        return cls(options, config, model_config, prompts, sampling, started, started - opening)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def chains(self, worker: Worker, sizes: Sequence[int], share: float) -> Chains:
        """Measure all depths at all batch sizes within a share of the time; the largest batch sizes are left out if time is short."""
        limits = worker.parts.depths.limits
        trial = worker.parts.depths.controller = DepthTrial(list(limits))
        turns = list(sizes) * SWEEPS
        for i, size in enumerate(turns):
            left = share * self.options.seconds - self.elapsed
            if left <= 0 and i:
                break
            until = self.elapsed + left / (len(turns) - i)
            self._answer(worker, trial, size, MAX_ROUNDS, until)
        if not trial.cells:
            raise ConfigError("--seconds is too short, or --max-new-tokens too small, to measure anything. Raise one of them.")
        return Chains(trial, limits)

    def tree(self, args: ServerArgs, shape: tuple[int, int, int], chains: Chains, chain: Plan) -> Plan | None:
        """Measure a tree at growing batch sizes while it is nearly as fast as the best chain; None if it was not measured."""
        steps, name = shape[0], "tree {}/{}/{}".format(*shape)
        if self.elapsed + self.loading >= self.options.seconds:
            say(f"{name}: not measured, the time is over", log)
            return None
        rates = dict[int, float]()
        try:
            config = tree_config(args, shape)
            with _opened(config, self.model_config, chains.measured) as worker:
                trial = worker.parts.depths.controller = DepthTrial([steps])
                for size in chains.measured:
                    self._answer(worker, trial, size, TREE_ROUNDS, self.options.seconds)
                    if (size, steps) not in trial.cells:
                        break
                    rates[size] = size * trial.acceptance.mean_accept_len / trial.seconds(size, steps)
                    if rates[size] < WORTH_MORE * chain.rates[size]:
                        break
        except ConfigError as error:
            say(f"{name}: not measured, {error}", log)
            return None
        shown = ", ".join(f"{size} requests {rate:.1f} tokens/s" for size, rate in rates.items())
        say(f"{name}: {shown or 'not measured, the time is over'}; {trial.acceptance.mean_accept_len:.2f} accepted", log)
        measured = {count: chains.rates()[count] for count in chains.measured}
        return tree_plan(shape, rates, measured)

    def _answer(self, worker: Worker, trial: DepthTrial, requests: int, rounds: int, until: float) -> None:
        """Run `requests` requests together for `rounds` rounds of the trial; for one round if `until`, in seconds, is near."""

        def done() -> bool:
            return trial.rounds >= rounds or self.elapsed >= (until if trial.rounds else max(until, self.options.seconds))

        trial.begin(requests)
        worker.reset()
        inbox, alive, asked = list[ToScheduler](), set[str](), itertools.count()

        def take(message: ToDetokenizer) -> None:
            for out in message.outs if isinstance(message, TokensOutBatch) else []:
                if out.finish is not None:
                    alive.discard(out.rid)
                    if out.finish.reason == "abort" and not done():
                        raise ServingError(f"A prompt failed: {out.finish.message}")

        receive = lambda wait: inbox.pop(0) if inbox else None  # noqa: E731
        scheduler = Scheduler(self.config.scheduler, self.config.cache, worker, self.model_config.eos_ids, receive, take)
        while not done():
            while len(alive) < requests:
                number = next(asked)
                alive.add(str(number))
                ids = self.prompts[number % len(self.prompts)]
                inbox.append(GenerateReq(rid=str(number), input_ids=ids, sampling=self.sampling, seed=number))
            scheduler.step()
        inbox.append(AbortReq(all=True))
        while inbox or not scheduler.idle:
            scheduler.step()


if __name__ == "__main__":
    sys.exit(main())
