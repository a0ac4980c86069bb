"""The prompts of a run: generated from a seed, read from a file, or shipped with the package. Nothing is downloaded."""

from __future__ import annotations

import json
import math
import os
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.bench.output import why
from runtime.bench.records import BenchRequest
from runtime.bench.vocabulary import Vocabulary

ASSETS = Path(__file__).resolve().parent.parent / "assets"
EMBEDDED_OUTPUT_LEN = 128
ASSISTANT_SUFFIX = "Assistant:"
_FIT_ROUNDS = 8
MAX_TOKENS = 1 << 26
"""Maximum number of tokens in all generated prompts: as lists of ids they take about 2.4 GB."""
LONGEST = 8
"""The maximum of log-normal lengths, as a multiple of their mean."""

DATASETS = ("random", "random-ids", "sharegpt", "generated-shared-prefix", "custom", "embedded")

Template = Callable[[str], str]
_SURROGATE = re.compile("[\ud800-\udfff]")
"""What JSON may escape, but UTF-8 cannot store."""


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Which prompts to create; the fields are the flags of the same names."""

    dataset_name: str
    dataset_path: str = ""
    num_prompts: int = 1000
    seed: int = 42
    sharegpt_output_len: int | None = None
    sharegpt_context_len: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 1024
    random_range_ratio: float = 0.0
    random_length_sigma: float | None = None
    tokenize_prompt: bool = False
    prompt_suffix: str = ""
    gsp_num_groups: int = 64
    gsp_prompts_per_group: int = 16
    gsp_system_prompt_len: int = 2048
    gsp_question_len: int = 128
    gsp_output_len: int = 256


async def load(options: DatasetOptions, vocabulary: Vocabulary, template: Template | None = None) -> list[BenchRequest]:
    """Create the requests of one run. The same options and seed give the same requests.

    Args:
        options: which prompts to create.
        vocabulary: encodes and decodes text.
        template: converts a user message to a chat prompt; used for datasets of real text.

    Raises:
        ValueError: a file is missing or has no usable prompt, or the prompts have more than `MAX_TOKENS` tokens.
    """
    if (tokens := _max_tokens(options)) > MAX_TOKENS:
        raise ValueError(f"the prompts may have up to {tokens:,} tokens; the limit is {MAX_TOKENS:,}: ask for fewer or shorter prompts")
    if options.dataset_name == "random-ids":
        return _random_ids(options, vocabulary)
    if options.dataset_name == "random":
        return await _random_text(options, vocabulary)
    if options.dataset_name == "generated-shared-prefix":
        return await _shared_prefix(options, vocabulary)
    pairs = {"sharegpt": _sharegpt, "custom": _custom, "embedded": _embedded}[options.dataset_name](options)
    return await _conversations(pairs, options, vocabulary, template)


def _max_tokens(options: DatasetOptions) -> int:
    """Maximum number of prompt tokens of a dataset that is not read from a file; 0 for the others."""
    if options.dataset_name.startswith("random"):
        return options.num_prompts * options.random_input_len * (1 if options.random_length_sigma is None else LONGEST)
    if options.dataset_name == "generated-shared-prefix":
        prompts = options.gsp_num_groups * options.gsp_prompts_per_group
        return prompts * (options.gsp_system_prompt_len + options.gsp_question_len)
    return 0


def random_lens(options: DatasetOptions, rng: random.Random) -> tuple[list[int], list[int]]:
    """The lengths of all prompts and of all answers, at least 1 each.

    Uniform from `random_range_ratio` times the maximum to the maximum; with `random_length_sigma` log-normal, up to `LONGEST` means.
    """
    count, ratio, sigma = options.num_prompts, options.random_range_ratio, options.random_length_sigma

    def drawn(full: int) -> list[int]:
        if sigma is None:
            return [rng.randint(max(int(full * ratio), 1), full) for _ in range(count)]
        mu = math.log(full) - sigma * sigma / 2
        return [min(max(round(rng.lognormvariate(mu, sigma)), 1), LONGEST * full) for _ in range(count)]

    return drawn(options.random_input_len), drawn(options.random_output_len)


def embedded_prompts() -> list[dict[str, str]]:
    """The held-out chat prompts, ten of each of eight kinds; keys `kind` and `prompt`."""
    return [json.loads(line) for line in (ASSETS / "chat_prompts.jsonl").read_text(encoding="utf-8").splitlines()]


def _random_ids(options: DatasetOptions, vocabulary: Vocabulary) -> list[BenchRequest]:
    """Consecutive ids from a random start, sent as ids because their text would not encode to the same tokens."""
    rng = random.Random(options.seed)
    inputs, outputs = random_lens(options, rng)
    requests = []
    for input_len, output_len in zip(inputs, outputs, strict=True):
        start = rng.randrange(vocabulary.size)
        requests.append(BenchRequest([(start + i) % vocabulary.size for i in range(input_len)], input_len, output_len))
    return requests


async def _random_text(options: DatasetOptions, vocabulary: Vocabulary) -> list[BenchRequest]:
    rng = random.Random(options.seed)
    inputs, outputs = random_lens(options, rng)
    texts = [prompt for prompt, _ in _sharegpt(options)] if options.dataset_path else None
    requests = []
    for i, (input_len, output_len) in enumerate(zip(inputs, outputs, strict=True)):
        source = texts[i % len(texts)] if texts else sentences(rng, input_len)
        ids = await _ids_of_length(source, input_len, vocabulary)
        prompt = ids if options.tokenize_prompt else await fit_text(ids, vocabulary)
        requests.append(BenchRequest(prompt, input_len, output_len))
    return requests


def sentences(rng: random.Random, words: int) -> str:
    """`words` common English words in sentences of random length."""
    vocabulary = (ASSETS / "words.txt").read_text(encoding="utf-8").split()
    parts: list[str] = []
    while len(parts) < words:
        sentence = rng.choices(vocabulary, k=rng.randint(5, 14))
        parts += [sentence[0].capitalize(), *sentence[1:-1], sentence[-1] + "."]
    return " ".join(parts[:words])


async def _ids_of_length(text: str, length: int, vocabulary: Vocabulary) -> list[int]:
    """The ids of `text`, repeated or cut to `length`."""
    ids = await vocabulary.encode(text) or [0]
    return (ids * -(-length // len(ids)))[:length]


async def fit_text(ids: list[int], vocabulary: Vocabulary) -> str:
    """A text that encodes to about `len(ids)` tokens, in most cases exactly.

    Decoding and encoding again may split or join tokens, so the length is corrected a few times.
    """
    length, keep = len(ids), len(ids)
    text = await vocabulary.decode(ids)
    for _ in range(_FIT_ROUNDS):
        off = len(await vocabulary.encode(text)) - length
        if off == 0:
            break
        keep = max(keep - off, 1)
        text = await vocabulary.decode((ids * -(-keep // length))[:keep])
    return text


async def _shared_prefix(options: DatasetOptions, vocabulary: Vocabulary) -> list[BenchRequest]:
    """Groups of prompts that start with the same system prompt."""
    rng = random.Random(options.seed)
    requests = []
    for _ in range(options.gsp_num_groups):
        system = await _ids_of_length(sentences(rng, options.gsp_system_prompt_len), options.gsp_system_prompt_len, vocabulary)
        for _ in range(options.gsp_prompts_per_group):
            ids = system + await _ids_of_length(sentences(rng, options.gsp_question_len), options.gsp_question_len, vocabulary)
            prompt = ids if options.tokenize_prompt else await vocabulary.decode(ids)
            requests.append(BenchRequest(prompt, len(ids), options.gsp_output_len))
    rng.shuffle(requests)
    return requests


Pair = tuple[str, str | None]  # a prompt and the answer in the file, if any


async def _conversations(
    pairs: list[Pair], options: DatasetOptions, vocabulary: Vocabulary, template: Template | None
) -> list[BenchRequest]:
    requests: list[BenchRequest] = []
    for prompt, answer in pairs:
        if len(requests) == options.num_prompts:
            break
        if _SURROGATE.search(prompt + (answer or "")):
            raise ValueError(f"--dataset-path {options.dataset_path}: {prompt[:60]!r} or its answer has a lone surrogate; remove it")
        text = _with_suffix(prompt, options.prompt_suffix)
        if template is not None:
            text = template(text)
        ids = await _ids_if_known(text, options, vocabulary)
        output_len = await _answer_len(answer, options, vocabulary)
        if options.sharegpt_context_len is None or len(ids) + output_len <= options.sharegpt_context_len:
            requests.append(BenchRequest(ids if options.tokenize_prompt else text, len(ids), output_len))
    if not requests:
        raise ValueError(f"--dataset-name {options.dataset_name}: no prompt fits --sharegpt-context-len {options.sharegpt_context_len}")
    return requests


async def _ids_if_known(text: str, options: DatasetOptions, vocabulary: Vocabulary) -> list[int]:
    try:
        return await vocabulary.encode(text)
    except ValueError:  # no tokenizer: the server reports the length of the prompt
        if options.sharegpt_context_len is not None or options.tokenize_prompt:
            raise
        return []


async def _answer_len(answer: str | None, options: DatasetOptions, vocabulary: Vocabulary) -> int:
    if options.sharegpt_output_len is not None:
        return options.sharegpt_output_len
    return EMBEDDED_OUTPUT_LEN if answer is None else max(len(await vocabulary.encode(answer)), 2)


def _with_suffix(prompt: str, suffix: str) -> str:
    return prompt.removesuffix(ASSISTANT_SUFFIX) + suffix + ASSISTANT_SUFFIX if suffix else prompt


def _embedded(options: DatasetOptions) -> list[Pair]:
    """Prompts interleaved by kind, so that any number of them is a balanced sample; independent of the seed."""
    by_kind: dict[str, list[str]] = {}
    for line in embedded_prompts():
        by_kind.setdefault(line["kind"], []).append(line["prompt"])
    return [(prompt, None) for group in zip(*by_kind.values(), strict=True) for prompt in group]


def _sharegpt(options: DatasetOptions) -> list[Pair]:
    return _first_turns(_read_json(options), options)


def _custom(options: DatasetOptions) -> list[Pair]:
    """JSONL: conversations as in ShareGPT, or lines with a `prompt` and an optional `answer`."""
    # Split at line feeds only: JSON strings may contain other Unicode line separators.
    lines = [_line(options, number, text) for number, text in enumerate(_read_text(options).split("\n"), 1) if text.strip()]
    plain: list[Pair] = [(line["prompt"], line.get("answer")) for line in lines if isinstance(line.get("prompt"), str) and line["prompt"]]
    return plain or _first_turns(lines, options)


def _first_turns(conversations: Iterable[dict[str, Any]], options: DatasetOptions) -> list[Pair]:
    pairs: list[Pair] = []
    for conversation in conversations:
        turns = conversation.get("conversations", conversation.get("conversation", []))
        if isinstance(turns, list) and len(turns) >= 2:
            first, second = (turn.get("value", turn.get("content")) if isinstance(turn, dict) else None for turn in turns[:2])
            if isinstance(first, str) and isinstance(second, str) and first:
                pairs.append((first, second))
    if not pairs:
        raise ValueError(f"--dataset-path {options.dataset_path}: there is no conversation of two turns in the file")
    random.Random(options.seed).shuffle(pairs)
    return pairs


def _read_text(options: DatasetOptions) -> str:
    if not options.dataset_path or not os.path.isfile(options.dataset_path):
        raise ValueError(f"--dataset-name {options.dataset_name} requires --dataset-path; {options.dataset_path!r} is not a file")
    try:
        return Path(options.dataset_path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--dataset-path {options.dataset_path} cannot be read: {why(error)}") from error


def _read_json(options: DatasetOptions) -> list[dict[str, Any]]:
    wrong = f"--dataset-path {options.dataset_path}: not a JSON list of conversations"
    text = _read_text(options)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{wrong} ({error})") from error
    if not isinstance(found, list) or not all(isinstance(conversation, dict) for conversation in found):
        raise ValueError(wrong)
    return found


def _line(options: DatasetOptions, number: int, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--dataset-path {options.dataset_path}, line {number}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"--dataset-path {options.dataset_path}, line {number}: not a JSON object")
    if not isinstance(found.get("answer"), str | None):
        raise ValueError(f"--dataset-path {options.dataset_path}, line {number}: its answer is not a string")
    return found
