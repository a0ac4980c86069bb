"""The flags of `bench_serving`, with SGLang's names."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from runtime.bench.backends import BACKENDS
from runtime.bench.datasets import DATASETS


def _number(kind: type[int] | type[float], name: str, valid: Callable[[float], bool]) -> Callable[[str], float]:
    """An argparse converter that accepts numbers for which `valid` is true; `name` describes them in errors."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not valid(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {name}")
        return value

    return convert


_positive = _number(int, "an integer of at least 1", lambda value: value >= 1)
_count = _number(int, "an integer of at least 0", lambda value: value >= 0)
_port = _number(int, "a port from 1 to 65535", lambda value: 1 <= value <= 65535)
_rate = _number(float, "a number above 0 (inf sends all requests at once)", lambda value: value > 0)
_sigma = _number(float, "a number from 0 to 4", lambda value: 0 <= value <= 4)
_ratio = _number(float, "a number from 0 to 1", lambda value: 0 <= value <= 1)
_top_p = _number(float, "a number above 0 and at most 1", lambda value: 0 < value <= 1)
_seed = _number(int, "an integer from 0 to 4294967295", lambda value: 0 <= value < 1 << 32)
_finite = _number(float, "a finite number", math.isfinite)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _header(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name or not text.isprintable() or not text.isascii():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form Key=Value in ASCII")
    return name, value


class _Parser(argparse.ArgumentParser):
    """Ends the program with one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bench_serving: {message}; --help lists all flags\n")


def parser() -> argparse.ArgumentParser:
    """Create the parser with all flags."""
    flags = _Parser(
        prog="python -m runtime.bench_serving", description="Measure a running server over HTTP: throughput, TTFT, TPOT, ITL, acceptance."
    )
    _server(flags.add_argument_group("server"))
    _dataset(flags.add_argument_group("prompts"))
    _load(flags.add_argument_group("load"))
    _generation(flags.add_argument_group("generation"))
    _output(flags.add_argument_group("output"))
    return flags


def _server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--backend", choices=list(BACKENDS), default="sglang", help="API of the server; native means /generate (default %(default)s)")
    add("--base-url", help="URL of the server, e.g. https://host/prefix; replaces --host and --port")
    add("--host", default="127.0.0.1", help="default %(default)s")
    add("--port", type=_port, help="default 30000, or 8000 for vllm")
    add("--ready-check-timeout-sec", type=_count, default=60, help="seconds to wait for the server; 0: no check (default %(default)s)")
    add("--model", help="model id or folder; default: the first model of /v1/models")
    add("--served-model-name", help="model name in requests; default: --model")
    add("--tokenizer", help="folder or cached hub id with a tokenizer.json; default: the server's tokenizer or its /tokenize")
    add("--header", type=_header, nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="headers for all requests")


def _dataset(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dataset-name", choices=DATASETS, default="sharegpt", help="default %(default)s; embedded: 80 chat prompts of this package")
    add("--dataset-path", default="", help="file for sharegpt (JSON) or custom (JSONL); with random: a ShareGPT file to take text from")
    add("--num-prompts", type=_positive, default=1000, help="requests to send, not for generated-shared-prefix (default %(default)s)")
    add("--seed", type=_seed, default=42, help="seed of prompts and arrivals (default %(default)s)")
    add(
        "--sharegpt-output-len",
        type=_positive,
        help="tokens to generate for real text; default: the length of the answer in the file, or 128",
    )
    add("--sharegpt-context-len", type=_positive, help="skip prompts that exceed this many tokens, output included")
    add("--random-input-len", "--random-input", type=_positive, default=1024, help="tokens (default %(default)s)")
    add("--random-output-len", "--random-output", type=_positive, default=1024, help="tokens (default %(default)s)")
    add(
        "--random-range-ratio",
        type=_ratio,
        default=0.0,
        help="lengths are drawn from RATIO * LEN to LEN; 1: all equal (default %(default)s)",
    )
    add(
        "--random-length-sigma",
        type=_sigma,
        help="lengths are log-normal instead, with means of LEN tokens; this is the standard deviation of their logarithm",
    )
    add("--apply-chat-template", action="store_true", help="apply the tokenizer's chat template to real text (for backends without chat)")
    add("--prompt-suffix", default="", help="text to append to each real-text prompt, followed by 'Assistant:'")
    add("--tokenize-prompt", action="store_true", help="send token ids instead of text, for exact lengths")
    add("--gsp-num-groups", type=_positive, default=64, help="generated-shared-prefix: number of groups (default %(default)s)")
    add("--gsp-prompts-per-group", type=_positive, default=16, help="prompts per shared prefix (default %(default)s)")
    add("--gsp-system-prompt-len", type=_positive, default=2048, help="tokens of the shared prefix (default %(default)s)")
    add("--gsp-question-len", type=_positive, default=128, help="tokens of each question (default %(default)s)")
    add("--gsp-output-len", type=_positive, default=256, help="tokens to generate (default %(default)s)")


def _load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--request-rate", type=_rate, default=float("inf"), help="arrivals per second (Poisson); inf: all at once (default)")
    add("--max-concurrency", type=_positive, help="maximum number of open requests; others wait in the client")
    add("--warmup-requests", type=_count, default=1, help="requests before the run, not counted (default %(default)s)")
    add("--flush-cache", action="store_true", help="flush the server's prefix cache after the warm-up")
    add("--profile", action="store_true", help="profile the server during the run (/start_profile, /stop_profile)")


def _generation(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--disable-stream", dest="stream", action="store_false", help="request non-streaming answers; their TTFT is the whole latency")
    add("--disable-ignore-eos", dest="ignore_eos", action="store_false", help="let the model stop its answers")
    add("--temperature", type=_finite, default=0.0, help="default %(default)s")
    add("--top-p", type=_top_p, default=1.0, help="default %(default)s")
    add("--return-logprob", action="store_true", help="request log-probabilities")
    add(
        "--extra-request-body",
        dest="extra_body",
        type=_json_object,
        default={},
        metavar="JSON",
        help="merged into every request, also its objects such as sampling_params",
    )


def _output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--output-file",
        help="JSON Lines file to append to; default: BACKEND_MMDD_N_DATASET.jsonl (INPUT_OUTPUT instead of DATASET for random)",
    )
    add("--output-details", action="store_true", help="also write lengths, times, text and error of each request")
    add(
        "--goodput",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME:MS",
        help="count requests within these limits, e.g. ttft:200 tpot:20 e2el:5000",
    )
    add("--plot-throughput", "--plot", action="store_true", help="plot tokens and requests over time; with matplotlib also as PNG")
    add("--cache-report", action="store_true", help="show the prefix cache hit rate")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    add("--tag", help="label for the output file")
