"""Proof that graphs do not change what is accepted: the same prompts, eager and through every graph runner, position by position."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from runtime import log as logging_setup
from runtime.config.flag_parser import parse
from runtime.config.graphs import default_graph_sizes
from runtime.config.runtime_config import RuntimeConfig
from runtime.entrypoints.prepare import prepare
from runtime.errors import ConfigError, RequestError, ServingError
from runtime.managers.messages import GenerateReq, ToDetokenizer, TokensOutBatch, ToScheduler
from runtime.managers.scheduler import Scheduler
from runtime.model_executor.graph_runner import RunMode
from runtime.models.config import ModelConfig
from runtime.sampling_params import SamplingParams
from runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runtime.speculative.parity import Outcome, SpeculativeWorker

EMBEDDED_PROMPTS = Path(__file__).parent / "assets" / "chat_prompts.jsonl"
DIFFERENT, BAD_USE = 1, 2


@dataclass(frozen=True)
class Options:
    """What is asked beside the server's flags.

    Attributes:
        prompts: JSON lines with a `prompt` each, or plain lines; None for the embedded ones.
        num_prompts: how many of them; None for all.
        max_new_tokens: generated for each, end-of-text or not.
    """

    prompts: Path | None
    num_prompts: int | None
    max_new_tokens: int


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print the table, and return the exit status: 0 where nothing differs, 1 where something does, 2 for impossible flags."""
    try:
        options, rest = read_options(sys.argv[1:] if argv is None else argv)
        command = parse(rest)
        if command.check or command.dump_config:
            raise ConfigError("--check and --dump-config belong to runtime.launch_server; leave them out")
        args = command.args
        logging_setup.setup(args.log_level, "talon::check")
        config, model_config = prepare(args)
        tokenizer = Tokenizer.load(config.model.tokenizer_path, chat_template=config.model.chat_template)
        prompts = fit(tokenised(tokenizer, read_prompts(options)), config, options.max_new_tokens)
        return compare(config, model_config, prompts, options.max_new_tokens)
    except ConfigError as error:
        print(f"talon: {error}", file=sys.stderr)
        return BAD_USE
    except ServingError as error:
        print(f"talon: {error}", file=sys.stderr)
        return DIFFERENT


def read_options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Our own options, and the server's flags that are left."""
    parser = argparse.ArgumentParser(
        prog="python -m runtime.check_acceptance",
        description="Run prompts eagerly and through every graph runner, and compare acceptance by position. Takes the server's flags too.",
        allow_abbrev=False,
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines with a prompt each, or plain lines; default: 80 own ones.")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="Take the first N only.")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="Tokens to generate for each; default 64.")
    own, rest = parser.parse_known_args(list(argv))
    if own.max_new_tokens < 2 or (own.num_prompts is not None and own.num_prompts < 1):
        raise ConfigError("--max-new-tokens must be at least 2 and --num-prompts at least 1")
    return Options(own.prompts, own.num_prompts, own.max_new_tokens), rest


def read_prompts(options: Options) -> list[str]:
    """The prompts asked for. Raises `ConfigError` where there are none."""
    path = options.prompts or EMBEDDED_PROMPTS
    try:
        # By line feeds alone: JSON may hold other separators of Unicode unescaped.
        lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: cannot be read ({type(error).__name__})") from error
    if not lines:
        raise ConfigError(f"--prompts {path}: it is empty")
    return [_prompt_of(line) for line in lines[: options.num_prompts]]


def _prompt_of(line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line
    return value["prompt"] if isinstance(value, dict) and isinstance(value.get("prompt"), str) else line


def tokenised(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """As chat messages where the model has a template, else as they are. Raises `ConfigError` where one is no text that a model reads."""

    def ids(prompt: str) -> list[int]:
        chat = tokenizer.has_chat_template
        return tokenizer.encode_chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)

    found = []
    for number, prompt in enumerate(prompts, 1):
        try:
            found.append(ids(prompt))
        except RequestError as error:
            raise ConfigError(f"--prompts: prompt {number}: {error}") from error
        if not found[-1]:
            raise ConfigError(f"--prompts: prompt {number} is empty, and the model begins no text with a token of its own; leave it out")
    return found


def fit(prompts: list[list[int]], config: RuntimeConfig, max_new_tokens: int) -> list[list[int]]:
    """Prompts cut to what leaves room in the context. Raises `ConfigError` where nothing does."""
    room = config.model.context_length - max_new_tokens
    if room < 1:
        raise ConfigError(f"--max-new-tokens {max_new_tokens} leaves no room for a prompt in a context of {config.model.context_length}")
    return [ids[:room] for ids in prompts]


def compare(config: RuntimeConfig, model_config: ModelConfig, prompts: list[list[int]], max_new_tokens: int) -> int:
    """Both runs on one worker, so that weights and chosen kernels are the same; prints, and returns the exit status.

    The reference runs eagerly: on CUDA over the same padded inputs as the graphs, so that products have the same shapes and round alike; on
    a CPU, whose "graphs" are the padded buffers themselves, without padding.
    """
    if config.speculative is None:
        raise ConfigError("there is no acceptance without speculation; give --speculative-algorithm and its flags")
    from runtime.speculative.acceptance import side_by_side
    from runtime.speculative.build import build_speculative_worker
    from runtime.speculative.parity import eagerly

    most = max(len(prompts), (config.speculative.disable_by_batch_size or 0) + 1)  # at once, in `run`
    on_cpu = config.device.device == "cpu"
    if on_cpu:  # there nothing is captured when serving; here every runner is to run its padded buffers
        config = structs.replace(config, speculative=structs.replace(config.speculative, draft_decode_graph=True, draft_extend_graph=True))
    config = structs.replace(config, scheduler=structs.replace(config.scheduler, max_queued_requests=most))
    running = min(config.scheduler.max_running_requests or most, most)
    sizes = [size for size in default_graph_sizes(running + 1) if size % 2 == 0 or size == 1] if on_cpu else None
    worker = build_speculative_worker(config, model_config, "eager" if on_cpu else None, sizes)
    try:
        if not any(runner.sizes for runner in worker.all_runners):
            raise ConfigError("nothing is captured, so there is nothing to compare; leave --disable-cuda-graph out, or use another backend")
        with eagerly(worker.all_runners, RunMode.EAGER if on_cpu else RunMode.EAGER_PADDED):
            eager = run(worker, config, model_config, prompts, max_new_tokens)
        before = [runner.replayed for runner in worker.all_runners]
        graphs = run(worker, config, model_config, prompts, max_new_tokens)
    finally:
        worker.close()
    print(side_by_side(eager.counters, graphs.counters))
    replays = [runner.replayed - first for runner, first in zip(worker.all_runners, before, strict=True)]
    return verdict(worker, eager, graphs, replays)


def run(
    worker: SpeculativeWorker, config: RuntimeConfig, model_config: ModelConfig, prompts: list[list[int]], max_new_tokens: int
) -> Outcome:
    """All prompts at temperature 0 through a scheduler of their own. Raises `ServingError` where a request fails.

    Where drafting pauses for large batches, the first ones run so few at a time that it does not, and the last ones as many as can. Prompts
    that are too few for both run more than once.
    """
    from runtime.speculative.parity import Outcome

    sampling = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True)
    pause, inbox, alive = worker.verifier.pause, list[ToScheduler](), set[str]()
    count = len(prompts)
    many = count if pause is None else max(count // 2, pause.above + 1)
    few = 0 if pause is None else max(count - many, 1)
    turns = [*range(few), *(i % count for i in range(count - many, count))]
    asks = [GenerateReq(rid=str(i), input_ids=prompts[at], sampling=sampling, seed=at) for i, at in enumerate(turns)]
    texts: dict[str, list[int]] = {ask.rid: [] for ask in asks}

    def take(message: ToDetokenizer) -> None:
        for out in message.outs if isinstance(message, TokensOutBatch) else []:
            texts[out.rid] += out.token_ids
            if out.finish is not None and out.finish.reason == "abort":
                raise ServingError(f"prompt {turns[int(out.rid)] + 1} failed: {out.finish.message}")
            if out.finish is not None:
                alive.discard(out.rid)

    worker.reset()
    eos_ids = model_config.eos_ids
    scheduler = Scheduler(config.scheduler, config.cache, worker, eos_ids, lambda wait: inbox.pop(0) if inbox else None, take)
    for group, most in ((asks[:few], pause.above if pause is not None else 0), (asks[few:], len(asks))):
        waiting = list(group)
        while waiting or inbox or not scheduler.idle:
            for ask in waiting[: most - len(alive)]:
                waiting.remove(ask)
                alive.add(ask.rid)
                inbox.append(ask)
            scheduler.step()
    runs = list(zip(turns, texts.values(), strict=True))
    return Outcome(worker.verifier.counted(), [[token for at, text in runs if at == i for token in text] for i in range(count)])


def verdict(worker: SpeculativeWorker, eager: Outcome, graphs: Outcome, replays: list[int]) -> int:
    """Say what differs; the exit status."""
    from runtime.speculative.acceptance import not_compared

    counted = list(zip(worker.all_runners, replays, strict=True))
    for runner, count in counted:
        print(f"{runner.spec.name}: {count} replays" if runner.sizes else f"{runner.spec.name}: no graphs")
    # Replays of short prompts are no condition: the prompts given may all be long.
    unused = [runner.spec.name for runner, count in counted if runner in worker.runners and runner.sizes and not count]
    texts = [i for i, (a, b) in enumerate(zip(eager.tokens, graphs.tokens, strict=True)) if a != b]
    if unused:
        print(f"not compared: {', '.join(unused)} replayed nothing; lower --max-running-requests or raise --cuda-graph-max-bs")
    if unreached := not_compared(eager.counters):
        print(f"{unreached}; give more prompts or a better draft")
    if texts:
        print(f"the text of {len(texts)} of {len(eager.tokens)} prompts differs, first of prompt {texts[0] + 1}")
    if eager.counters != graphs.counters:
        print("acceptance differs")
    if unused or eager != graphs:
        return DIFFERENT
    print("acceptance and text are the same, eager and through graphs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
