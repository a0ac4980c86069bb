"""Proof that graphs do not change acceptance and that drafts do not change text.

The same prompts run eagerly, through every graph runner, and without drafts.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from runtime import log as logging_setup
from runtime.config.flag_parser import parse_shared, read_own
from runtime.config.graphs import default_graph_sizes
from runtime.config.runtime_config import RuntimeConfig
from runtime.entrypoints.prepare import prepare
from runtime.errors import ConfigError, RequestError, ServingError, report
from runtime.log import say
from runtime.managers.messages import GenerateReq, ToDetokenizer, TokensOutBatch, ToScheduler
from runtime.managers.scheduler import Scheduler
from runtime.models.config import ModelConfig
from runtime.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from runtime.small_file import read_small, unreadable
from runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runtime.model_executor.context import ReplayKind
    from runtime.model_executor.graph_runner import GraphRunner
    from runtime.model_executor.parity import Outcome
    from runtime.model_executor.worker import Worker

log = logging.getLogger(__name__)

EMBEDDED_PROMPTS = Path(__file__).parent / "assets" / "chat_prompts.jsonl"
PROMPTS = {"type": Path, "metavar": "FILE", "help": "JSON or plain lines, one prompt each; default: 80 built-in prompts."}
"""The option of a file of prompts; None for the embedded ones."""
DIFFERENT = 1
TIES = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Largest difference of log-probabilities that rounding explains, by dtype: passes of different widths round differently."""
PREFIX_TOKENS = 1024
"""Tokens of the prefix that prompts share for passes that attend once to it."""
LEFT_OUT = 1.0
"""Added to the difference if a token is not among the top log-probabilities."""


@dataclass(frozen=True)
class Options:
    """The command's own flags. Answers have all `max_new_tokens`, because end-of-text is ignored."""

    prompts: Path | None = field(metadata=PROMPTS)
    num_prompts: int | None = field(metadata=dict(type=int, metavar="N", help="Use only the first N prompts."))
    max_new_tokens: int = field(metadata=dict(type=int, default=64, metavar="N", help="Tokens to generate per prompt; default 64."))


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print the table. Exit status: 0 where nothing differs, 1 where something does, 2 for wrong flags, 130 on Ctrl-C."""
    try:
        options, rest = read_options(sys.argv[1:] if argv is None else argv)
        args = parse_shared(rest)
        logging_setup.setup(args.log_level, "talon::check", args.log_format)
        config, model_config = prepare(args)
        texts = read_prompts(options.prompts, options.num_prompts)
        prompts = prompt_ids(texts, config, model_config, options.max_new_tokens)
        return compare(config, model_config, prompts, options.max_new_tokens)
    except (ServingError, KeyboardInterrupt) as error:
        return report(error)


def read_options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """This command's options, and the remaining server flags."""
    about = "Run prompts eagerly, through every graph runner and without drafts; compare acceptance by position, and text."
    own, rest = read_own(Options, "check_acceptance", about, argv)
    if own.max_new_tokens < 2 or (own.num_prompts is not None and own.num_prompts < 1):
        raise ConfigError("--max-new-tokens must be at least 2 and --num-prompts at least 1")
    return own, rest


def read_prompts(path: Path | None, count: int | None = None) -> list[str]:
    """The first `count` prompts of a file, or else of the embedded ones. Raises `ConfigError` if there are none."""
    path = path or EMBEDDED_PROMPTS
    try:
        # Split at line feeds only: JSON may contain other Unicode line separators unescaped.
        lines = [line for line in read_small(path).split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {unreadable(error)}") from error
    if not lines:
        raise ConfigError(f"--prompts {path}: it is empty")
    return [_prompt_of(line) for line in lines[:count]]


def _prompt_of(line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line
    return value["prompt"] if isinstance(value, dict) and isinstance(value.get("prompt"), str) else line


def prompt_ids(texts: Sequence[str], config: RuntimeConfig, model_config: ModelConfig, max_new_tokens: int) -> list[list[int]]:
    """Token ids of prompts that leave room for the output. Raises `ConfigError` as `tokenised` and `fit`."""
    tokenizer = Tokenizer.load(config.model.tokenizer_path, chat_template=config.model.chat_template)
    return fit(tokenised(tokenizer, texts), config, model_config.vocab_size, max_new_tokens)


def tokenised(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt: as a chat message if the model has a template, else as plain text. Raises `ConfigError` for bad text."""

    def ids(prompt: str) -> list[int]:
        chat = tokenizer.chat_template is not None
        return tokenizer.encode_chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)

    found = []
    for number, prompt in enumerate(prompts, 1):
        try:
            found.append(ids(prompt))
        except RequestError as error:
            raise ConfigError(f"--prompts: prompt {number}: {error}") from error
        if not found[-1]:
            raise ConfigError(f"--prompts: prompt {number} is empty and the tokenizer adds no BOS token. Remove it.")
    return found


def fit(prompts: list[list[int]], config: RuntimeConfig, vocab_size: int, max_new_tokens: int) -> list[list[int]]:
    """Truncate prompts so that the output fits in the context. Raises `ConfigError` if none can fit, or for ids outside the vocabulary."""
    for number, ids in enumerate(prompts, 1):
        if max(ids) >= vocab_size:
            raise ConfigError(f"--prompts: prompt {number} has the token id {max(ids)}, but the model has {vocab_size} tokens")
    room = prompt_room(config.model.context_length, max_new_tokens)
    return [ids[:room] for ids in prompts]


def prompt_room(context_length: int, max_new_tokens: int) -> int:
    """The most tokens of a prompt beside its answer. Raises `ConfigError` if there is no room."""
    if max_new_tokens >= context_length:
        context = f"the context holds {context_length} tokens"
        raise ConfigError(f"--max-new-tokens {max_new_tokens} leaves no room for a prompt: {context}; give a smaller number")
    return context_length - max_new_tokens


def compare(config: RuntimeConfig, model_config: ModelConfig, prompts: list[list[int]], max_new_tokens: int) -> int:
    """Run everything on one worker, so that weights and autotuned kernels are the same; print the result and return the exit status.

    The reference runs eagerly: on CUDA over the same padded inputs as the graphs, so that GEMMs have the same shapes
    and round alike; on a CPU, whose "graphs" are the padded buffers themselves, without padding. Plain decoding is
    depth 0 of the same worker, eagerly.
    """
    speculative = config.speculative
    if speculative is None:
        raise ConfigError("there is no acceptance without speculation; give --speculative-algorithm and its flags")
    from runtime.model_executor.acceptance import side_by_side
    from runtime.model_executor.graph_runner import RunMode, eagerly

    most = max(len(prompts), (speculative.disable_by_batch_size or 0) + 1)  # requests at once, in `run`
    on_cpu = config.device.device == "cpu"
    config = _for_check(config, most)
    running = min(config.scheduler.max_running_requests or most, most)
    sizes = [size for size in default_graph_sizes(running + 1) if size % 2 == 0 or size == 1] if on_cpu else None
    with open_worker(config, model_config, "eager" if on_cpu else None, sizes) as worker:
        any_depth = bool(speculative.depths) or len(set(worker.parts.depths.limits.values())) == 1
        room = min(prompt_room(config.model.context_length, max_new_tokens), worker.limits.max_total_tokens // 2 - max_new_tokens)
        prefixed = with_prefix(prompts, room) if has_graphs(worker.parts.verifier.shared) else []
        session = Session(worker, config, model_config, prompts, max_new_tokens, any_depth, prefixed)
        if not any(runner.sizes for runner in worker.all_runners):
            raise ConfigError("nothing is captured, so there is nothing to compare; leave --disable-cuda-graph out, or use another backend")
        with eagerly(worker.all_runners, RunMode.EAGER if on_cpu else RunMode.EAGER_PADDED):
            eager = session.run()
            plain = None if speculative.synthetic_accept is not None else session.plain_texts()
        before = [runner.replayed for runner in worker.all_runners]
        with eagerly(worker.iteration_runners):
            graphs = session.run()
        whole = session.run() if worker.iteration_runners else graphs
    say(side_by_side(eager.counters, graphs.counters), log)
    if prefixed:
        say(f"prompts {len(prompts) + 1} to {2 * len(prompts)} are the given ones after a common prefix of {PREFIX_TOKENS} tokens", log)
    replays = [runner.replayed - first for runner, first in zip(worker.all_runners, before, strict=True)]
    lossless = plain is None or report_plain(plain, [*eager.tokens, *graphs.tokens], TIES[config.device.dtype])
    status = report_parity(worker, eager, graphs, replays)
    if whole != graphs:
        say("acceptance or text differs where one graph runs a whole iteration", log)
        status = DIFFERENT
    return status if lossless else DIFFERENT


def has_graphs(runners: Mapping[int, GraphRunner]) -> bool:
    """Whether any of these runners has a graph."""
    return any(runner.sizes for runner in runners.values())


def with_prefix(prompts: list[list[int]], room: int) -> list[list[int]]:
    """The prompts after a prefix of `PREFIX_TOKENS` tokens, made of the prompts; [] if one of them is then longer than `room` tokens."""
    prefix = list(itertools.islice(itertools.cycle(itertools.chain.from_iterable(prompts)), PREFIX_TOKENS))
    return [[*prefix, *ids] for ids in prompts] if PREFIX_TOKENS + max(map(len, prompts)) <= room else []


@contextmanager
def open_worker(
    config: RuntimeConfig, model_config: ModelConfig, replay: ReplayKind | None = None, sizes: list[int] | None = None
) -> Iterator[Worker]:
    """A worker in this process that can run plain decoding as well as drafts; rank 0 of several with --tp-size."""
    from runtime.model_executor.build import build_worker
    from runtime.model_executor.context import BuildOptions

    options = BuildOptions(replay, sizes, adaptive=False)
    with ExitStack() as stack:
        if config.parallel.tp_size > 1:
            from runtime.entrypoints.rank import lead
            from runtime.entrypoints.rank_session import other_ranks

            worker = lead(config, model_config, stack.enter_context(other_ranks(config)), options)
        else:
            from runtime.speculative.registry import make_drafter

            worker = build_worker(config, model_config, make_drafter, options)
        stack.callback(worker.close)
        yield worker


def _for_check(config: RuntimeConfig, most: int) -> RuntimeConfig:
    """The configuration with room for `most` queued requests; on a CPU all runners run over padded buffers."""
    speculative = config.speculative
    if config.device.device == "cpu" and speculative is not None:
        speculative = structs.replace(speculative, draft_decode_graph=True, draft_extend_graph=True)
    scheduler = structs.replace(config.scheduler, max_queued_requests=most)
    return structs.replace(config, scheduler=scheduler, speculative=speculative)


@dataclass(frozen=True)
class PlainText:
    """One text of plain decoding: its tokens, and at each position the log-probabilities of the likeliest ones."""

    tokens: list[int]
    top: list[dict[int, float]]

    def gap(self, text: Sequence[int]) -> float:
        """By how much log-probability the first differing token of `text` is less likely than the one here; 0 if none differs."""
        for token, own, top in zip(text, self.tokens, self.top, strict=True):
            if token != own:
                return top[own] - top.get(token, min(top.values()) - LEFT_OUT)
        return 0.0


@dataclass(frozen=True)
class Group:
    """Prompts, by number, of which at most `at_once` run at a time.

    Attributes:
        top_logprobs: as in `GenerateReq`.
        limits: maximum numbers of drafts, which the prompts take in turn; no limits if empty.
    """

    prompts: Sequence[int]
    at_once: int
    top_logprobs: int = -1
    limits: Sequence[int] = ()


@dataclass(frozen=True)
class Session:
    """Runs the prompts at temperature 0, each time through a scheduler of its own.

    Attributes:
        in_turn: whether iterations run at all depths in turn, because the size of the batch does not decide which one runs.
        prefixed: further prompts, which have a common prefix.
    """

    worker: Worker
    config: RuntimeConfig
    model_config: ModelConfig
    prompts: list[list[int]]
    max_new_tokens: int
    in_turn: bool = False
    prefixed: Sequence[list[int]] = ()

    def run(self) -> Outcome:
        """Acceptance, and the text of each prompt, which concatenates those of its runs. Raises `ServingError` if a request fails."""
        from runtime.model_executor.parity import Outcome

        with self.worker.parts.monitor.without_sample(), self.worker.parts.depths.in_turn() if self.in_turn else nullcontext():
            answers = self._serve(self._groups())
        texts = [[token for at, answer in answers if at == i for token in answer.tokens] for i in range(self._count)]
        return Outcome(self.worker.parts.monitor.counted(), texts)

    @property
    def _count(self) -> int:
        return len(self.prompts) + len(self.prefixed)

    def _groups(self) -> list[Group]:
        """What runs one after another, so that all kinds of verify passes run.

        If drafting is disabled above some batch size, the first prompts run in batches small enough to draft, and the last
        ones together. If there are too few prompts for both, some run in both. If verify passes of few rows skip the logits, all run
        again with log-probabilities, which need them. For ragged passes of each mean width, they run with limits of drafts that differ.
        Of the prompts with a common prefix, the first one runs alone before all, which then find its pages.
        """
        limits, count = self.worker.parts.depths.limits, len(self.prompts)
        with_drafts = min(limits.values())
        few, many = 0, count
        if with_drafts < self.worker.limits.max_running_requests:
            many = max(count // 2, with_drafts + 1)
            few = max(count - many, 1)
        if self.in_turn:
            few, many = count, 0
        groups = [Group(range(few), with_drafts), Group([i % count for i in range(count - many, count)], many)]
        verifier = self.worker.parts.verifier
        if has_graphs(verifier.greedy):
            groups += [replace(group, top_logprobs=0) for group in groups]
        if has_graphs(verifier.ragged):
            depth = verifier.ragged_depth
            limits = ([0] * (depth + 1 - width) + [depth] * (width - 1) for width in verifier.ragged)
            groups += [Group(range(count), count, limits=one) for one in limits]
        if self.prefixed:
            groups += [Group([count], 1), Group(range(count, self._count), count)]
        return groups

    def plain_texts(self) -> list[PlainText]:
        """The texts of plain decoding, by prompt."""
        with self.worker.parts.depths.forced(0):
            return [text for _, text in self._serve([Group(range(self._count), len(self.prompts), MAX_TOP_LOGPROBS)])]

    def _serve(self, groups: Sequence[Group]) -> list[tuple[int, PlainText]]:
        """Run the groups one after another; the number and text of each of their prompts."""
        sampling = SamplingParams(temperature=0.0, max_new_tokens=self.max_new_tokens, ignore_eos=True)
        prompts = [*self.prompts, *self.prefixed]
        inbox, alive = list[ToScheduler](), set[str]()
        order = [at for group in groups for at in group.prompts]
        answers = {str(i): PlainText([], []) for i in range(len(order))}
        rids = iter(answers)

        def take(message: ToDetokenizer) -> None:
            for out in message.outs if isinstance(message, TokensOutBatch) else []:
                answers[out.rid].tokens.extend(out.token_ids)
                if out.logprobs is not None:
                    answers[out.rid].top.extend(dict(top) for top in out.logprobs.top)
                if out.finish is not None and out.finish.reason == "abort":
                    raise ServingError(f"prompt {order[int(out.rid)] + 1} failed: {out.finish.message}")
                if out.finish is not None:
                    alive.discard(out.rid)

        self.worker.reset()
        eos_ids = self.model_config.eos_ids
        scheduler = Scheduler(
            self.config.scheduler, self.config.cache, self.worker, eos_ids, lambda wait: inbox.pop(0) if inbox else None, take
        )
        for group in groups:
            waiting = [
                GenerateReq(
                    rid=next(rids),
                    input_ids=prompts[at],
                    sampling=structs.replace(sampling, speculative_num_steps=limit),
                    seed=at,
                    top_logprobs=group.top_logprobs,
                )
                for at, limit in zip(group.prompts, itertools.cycle(group.limits or [None]), strict=False)
            ]
            while waiting or inbox or not scheduler.idle:
                for ask in waiting[: group.at_once - len(alive)]:
                    waiting.remove(ask)
                    alive.add(ask.rid)
                    inbox.append(ask)
                scheduler.step()
        return list(zip(order, answers.values(), strict=True))


def report_plain(plain: list[PlainText], texts: list[list[int]], tie: float) -> bool:
    """Print how texts compare with plain decoding; return whether they differ only at near-ties.

    Args:
        texts: one entry per prompt, repeated for each mode; an entry may concatenate the texts of several runs.
        tie: largest difference in log-probability that counts as a near-tie.
    """
    gaps: dict[int, float] = {}
    for i, text in enumerate(texts):
        own = plain[i % len(plain)]
        for start in range(0, len(text), len(own.tokens)):
            gap = own.gap(text[start : start + len(own.tokens)])
            gaps[i % len(plain)] = max(gaps.get(i % len(plain), 0.0), abs(gap))
    differ = [i for i, gap in gaps.items() if gap > 0]
    wrong = [i for i in differ if gaps[i] > tie]
    if wrong:
        say(
            f"the text of {len(wrong)} of {len(plain)} prompts is not that of plain decoding, first of prompt {min(wrong) + 1}: "
            f"its first other token is less likely by {gaps[min(wrong)]:.3g} in log-probability (a tie is within {tie:g})",
            log,
        )
        return False
    ties = f"; the others differ first at a tie (within {tie:g} in log-probability)" if differ else ""
    say(f"the text is that of plain decoding for {len(plain) - len(differ)} of {len(plain)} prompts{ties}", log)
    return True


def report_parity(worker: Worker, eager: Outcome, graphs: Outcome, replays: list[int]) -> int:
    """Print what differs between eager runs and graphs; return the exit status."""
    from runtime.model_executor.acceptance import not_compared

    counted = list(zip(worker.all_runners, replays, strict=True))
    for runner, count in counted:
        say(f"{runner.spec.name}: {count} replays" if runner.sizes else f"{runner.spec.name}: no graphs", log)
    # Graphs for short prompts need not be replayed: all given prompts may be long.
    unused = [runner.spec.name for runner, count in counted if runner in worker.runners and runner.sizes and not count]
    texts = [i for i, (a, b) in enumerate(zip(eager.tokens, graphs.tokens, strict=True)) if a != b]
    if unused:
        names = ", ".join(unused)
        say(f"not compared: {names} replayed nothing; raise --max-new-tokens or --cuda-graph-max-bs, or lower --max-running-requests", log)
    if unreached := not_compared(eager.counters):
        say(f"{unreached}; give more prompts or a better draft", log)
    if texts:
        say(f"the text of {len(texts)} of {len(eager.tokens)} prompts differs, first of prompt {texts[0] + 1}", log)
    if eager.counters != graphs.counters:
        say("acceptance differs", log)
    if unused or eager != graphs:
        return DIFFERENT
    say("acceptance and text are the same, eager and through graphs", log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
