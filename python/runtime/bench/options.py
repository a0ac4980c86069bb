"""The flags of `bench_serving`, spelled as SGLang's."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from runtime.bench.backends import BACKENDS
from runtime.bench.datasets import DATASETS


def positive(text: str) -> int:
    """An int of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def count(text: str) -> int:
    """An int of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def port(text: str) -> int:
    """A TCP port that a server can listen at."""
    value = positive(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text} is above 65535")
    return value


def rate(text: str) -> float:
    """A number above 0, or inf."""
    value = float(text)
    if math.isnan(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 (inf sends all at once)")
    return value


def ratio(text: str) -> float:
    """A number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def header(text: str) -> tuple[str, str]:
    """`Key=Value`."""
    name, sign, value = text.partition("=")
    if not sign or not name or "\n" in text or "\r" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form Key=Value")
    return name, value


def parser() -> argparse.ArgumentParser:
    """All flags with their help."""
    flags = argparse.ArgumentParser(
        prog="python -m runtime.bench_serving",
        description="Measure a running server over HTTP: throughput, time to first token, time per token, acceptance.",
    )
    _server(flags.add_argument_group("server"))
    _dataset(flags.add_argument_group("prompts"))
    _load(flags.add_argument_group("load"))
    _generation(flags.add_argument_group("generation"))
    _output(flags.add_argument_group("output"))
    return flags


def _server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--backend", choices=list(BACKENDS), default="sglang", help="dialect of the server; native is /generate (default %(default)s)")
    add("--base-url", help="any server, e.g. https://host/prefix; instead of --host and --port")
    add("--host", default="127.0.0.1", help="default %(default)s")
    add("--port", type=port, help="default 30000, for vllm 8000")
    add("--ready-check-timeout-sec", type=count, default=60, help="seconds to wait for the server; 0: do not ask (default %(default)s)")
    add("--model", help="model id or folder; default: what /v1/models names")
    add("--served-model-name", help="name to send in requests; default: --model")
    add("--tokenizer", help="folder or cached hub id with a tokenizer.json; default: the server's, or its /tokenize")
    add("--header", type=header, nargs="+", default=[], metavar="KEY=VALUE", help="sent with every request")


def _dataset(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dataset-name", choices=DATASETS, default="sharegpt", help="default %(default)s; embedded: 80 held-out chat prompts, shipped")
    add("--dataset-path", default="", help="file of sharegpt (JSON) or custom (JSONL); for random: take the text from this ShareGPT file")
    add("--num-prompts", type=positive, default=1000, help="requests to send (default %(default)s)")
    add("--seed", type=int, default=42, help="of prompts and arrivals (default %(default)s)")
    add(
        "--sharegpt-output-len",
        type=positive,
        help="tokens to generate for prompts of real text; default: as long as the file's answer, or 128",
    )
    add("--sharegpt-context-len", type=positive, help="leave out prompts longer than this, output included")
    add("--random-input-len", "--random-input", type=positive, default=1024, help="tokens (default %(default)s)")
    add("--random-output-len", "--random-output", type=positive, default=1024, help="tokens (default %(default)s)")
    add(
        "--random-range-ratio",
        type=ratio,
        default=0.0,
        help="lengths are drawn from RATIO * LEN to LEN; 1: all alike (default %(default)s)",
    )
    add("--apply-chat-template", action="store_true", help="wrap real text by the tokenizer's chat template (for backends without chat)")
    add("--prompt-suffix", default="", help="put at the end of every prompt of real text, and 'Assistant:' after it")
    add("--tokenize-prompt", action="store_true", help="send token ids instead of text, so that lengths are exact")
    add("--gsp-num-groups", type=positive, default=64, help="generated-shared-prefix: groups (default %(default)s)")
    add("--gsp-prompts-per-group", type=positive, default=16, help="prompts with the same prefix (default %(default)s)")
    add("--gsp-system-prompt-len", type=positive, default=2048, help="tokens of the shared prefix (default %(default)s)")
    add("--gsp-question-len", type=positive, default=128, help="tokens of each question (default %(default)s)")
    add("--gsp-output-len", type=positive, default=256, help="tokens to generate (default %(default)s)")


def _load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--request-rate", type=rate, default=float("inf"), help="arrivals a second, a Poisson process; inf: all at once (default)")
    add("--max-concurrency", type=positive, help="most requests under way; the others wait at the client")
    add("--warmup-requests", type=count, default=1, help="sent before the run and not counted (default %(default)s)")
    add("--flush-cache", action="store_true", help="empty the server's prefix cache after the warm-up")
    add("--profile", action="store_true", help="profile the server during the run (/start_profile, /stop_profile)")


def _generation(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--disable-stream", action="store_true", help="ask for whole answers; there is no time to first token then")
    add("--disable-ignore-eos", action="store_true", help="let answers end where the model ends them")
    add("--temperature", type=float, default=0.0, help="default %(default)s")
    add("--top-p", type=float, default=1.0, help="default %(default)s")
    add("--return-logprob", action="store_true", help="ask for log-probabilities")
    add("--extra-request-body", type=json_object, default={}, metavar="JSON", help="merged into every request")


def _output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--output-file",
        help="JSON lines, appended to; default: BACKEND_MMDD_N_DATASET.jsonl in this folder, INPUT_OUTPUT for DATASET where random",
    )
    add("--output-details", action="store_true", help="keep lengths, times, texts and errors of every request too")
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help="count requests within limits, e.g. ttft:200 tpot:20 e2el:5000")
    add("--plot-throughput", "--plot", action="store_true", help="chart tokens and requests over time; a PNG too where matplotlib is there")
    add("--cache-report", action="store_true", help="show how much of the prompts came from the prefix cache")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    add("--tag", help="kept in the output")
