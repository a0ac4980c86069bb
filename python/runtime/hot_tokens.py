"""Measures which tokens a model writes most, and saves them as the vocabulary of a draft: a `--speculative-token-map` file.

A draft with the target's whole LM head spends most of its time there. With a map it scores the frequent tokens only; what is
verified, and so the text, stays the same (FR-Spec, Zhao et al. 2025, arXiv:2502.14856).
"""

from __future__ import annotations

import io
import itertools
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from runtime.check_acceptance import PROMPTS, prompt_room, read_prompts, tokenised
from runtime.config.flag_parser import parse_shared, read_own
from runtime.config.refusals import check_output
from runtime.config.server_args import ServerArgs
from runtime.entrypoints.engine import Engine
from runtime.entrypoints.prepare import find_model
from runtime.errors import ConfigError, ServingError, report
from runtime.log import say
from runtime.models.registry import load_hf_config
from runtime.small_file import unreadable, write_whole
from runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SIDE_BY_SIDE = 64
"""Number of answers per call of the engine."""
HELD_OUT = 10
"""One answer in this many is held out to measure the map's coverage."""


@dataclass(frozen=True)
class Options:
    """The command's own flags."""

    size: int = field(metadata=dict(type=int, default=32768, metavar="N", help="Number of token ids in the map; default 32768."))
    tokens: int = field(metadata=dict(type=int, default=200_000, metavar="N", help="Tokens to generate; default 200000."))
    max_new_tokens: int = field(metadata=dict(type=int, default=512, metavar="N", help="Tokens per answer; default 512."))
    temperature: float = field(metadata=dict(type=float, default=1.0, metavar="T", help="Sampling temperature; default 1."))
    output: Path = field(
        metadata=dict(type=Path, default=Path("hot_tokens.pt"), metavar="FILE", help="Output file; default hot_tokens.pt.")
    )
    prompts: Path | None = field(metadata=PROMPTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and save. Exit status: 0, 1 where the engine failed, 2 for wrong flags, 130 on Ctrl-C."""
    try:
        options, rest = read_options(sys.argv[1:] if argv is None else argv)
        args, prompts = parse_shared(rest), read_prompts(options.prompts)
        model = load_hf_config(find_model(args).weights_folder)
        if options.size > model.vocab_size:
            raise ConfigError(f"--size is {options.size}; the model has {model.vocab_size} tokens")
        prompt_room(args.context_length or model.max_context_len, options.max_new_tokens)
        with Engine(**engine_options(args)) as engine:
            answers = list(write(engine, options, prompts))
        held_out = answers[::HELD_OUT] if len(answers) >= HELD_OUT else []
        counted = [answer for i, answer in enumerate(answers) if i % HELD_OUT or not held_out]
        hot = hottest(Counter(itertools.chain.from_iterable(counted)), options.size, model.eos_ids)
        save(hot, options.output)
    except (ServingError, KeyboardInterrupt) as error:
        return report(error)
    say(f"{options.output}: {len(hot)} of {model.vocab_size} tokens, from {sum(map(len, counted))} in {len(counted)} answers", log)
    if held_out:
        say(f"they cover {covered(held_out, hot):.2%} of {sum(map(len, held_out))} tokens in {len(held_out)} other answers", log)
    return 0


def read_options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """This command's options, and the remaining server flags. Raises `ConfigError` for values out of range."""
    about = "Let a model write, and save its most frequent tokens for --speculative-token-map."
    own, rest = read_own(Options, "hot_tokens", about, argv)
    if min(own.size, own.tokens, own.max_new_tokens) < 1 or not 0.0 <= own.temperature <= 2.0:
        raise ConfigError("--size, --tokens and --max-new-tokens must be at least 1, and --temperature between 0 and 2")
    check_output(own.output)
    return own, rest


def engine_options(args: ServerArgs) -> dict[str, Any]:
    """The flags that were given, for `Engine`. Without drafts, unless they were asked for: the text is the same."""
    given = {flag.name: value for flag in fields(args) if (value := getattr(args, flag.name)) != flag.default}
    return {"speculative_algorithm": "none", **given}


def write(engine: Engine, options: Options, texts: Sequence[str]) -> Iterable[list[int]]:
    """Answers to the prompts `texts`, again and again with other seeds, until the model has written enough."""
    config = engine.config.model
    tokenizer = Tokenizer.load(config.tokenizer_path, chat_template=config.chat_template)
    room = prompt_room(config.context_length, options.max_new_tokens)
    prompts = [ids[-room:] for ids in tokenised(tokenizer, texts)]
    written, seeds = 0, itertools.count()
    for start in itertools.count(0, SIDE_BY_SIDE):
        ids = [prompts[(start + i) % len(prompts)] for i in range(SIDE_BY_SIDE)]
        sampling = [{"temperature": options.temperature, "max_new_tokens": options.max_new_tokens, "seed": next(seeds)} for _ in ids]
        for output in engine.generate(input_ids=ids, sampling_params=sampling):
            written += len(output["output_ids"])
            yield output["output_ids"]
            if written >= options.tokens:
                return


def hottest(counts: Counter[int], size: int, always: Iterable[int]) -> list[int]:
    """The `size` most frequent ids including `always`, ascending. Ties go to the smaller id, also among unseen ids: BPE vocabularies list
    common pieces first.
    """
    hot = set(itertools.islice(always, size))
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    tokens = itertools.chain(ranked, itertools.count())
    while len(hot) < size:
        hot.add(next(tokens))
    return sorted(hot)


def covered(answers: Iterable[Sequence[int]], hot: Iterable[int]) -> float:
    """The share of the answers' tokens that are in `hot`."""
    known, tokens = set(hot), list(itertools.chain.from_iterable(answers))
    return sum(token in known for token in tokens) / max(len(tokens), 1)


def save(hot: Sequence[int], path: Path) -> None:
    """Write the map. Raises `ServingError` if the file cannot be written."""
    import torch

    content = io.BytesIO()
    torch.save(torch.tensor(hot, dtype=torch.int64), content)
    try:
        write_whole(path, content.getvalue())
    except OSError as error:
        raise ServingError(f"--output {path} cannot be written: {unreadable(error)}.") from error


if __name__ == "__main__":
    sys.exit(main())
