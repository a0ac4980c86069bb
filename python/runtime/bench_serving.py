"""`python -m runtime.bench_serving`: measure any running server over HTTP, with SGLang's flags and columns."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from tqdm import tqdm

from runtime.bench import summary
from runtime.bench.backends import BACKENDS, GenerationOptions, payload, send
from runtime.bench.chat_template import chat_template
from runtime.bench.datasets import DatasetOptions, load
from runtime.bench.http_stream import HttpClient, HttpFailure, authority
from runtime.bench.load import Load, Send, run_load
from runtime.bench.metrics import Timeline, acceptance, count_chunks, parse_goodput, per_second, spread_itl, summarize
from runtime.bench.options import parser
from runtime.bench.output import append, complain, say, why
from runtime.bench.records import BenchRequest, RequestRecord
from runtime.bench.vocabulary import LocalVocabulary, Vocabulary, open_vocabulary

T = TypeVar("T")
_WARMUP_OUTPUT_LEN = 32
_FLUSH_SECONDS = 5.0
_INFO_SECONDS = 5.0
"""How long the server may take to describe itself. One that hangs must not keep the result of an interrupted run back."""
_ARGUMENTS = (
    *("tag", "backend", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len"),
    *("random_input_len", "random_output_len", "random_range_ratio", "random_length_sigma"),
)


class BenchError(Exception):
    """The run cannot start; the message is for the user."""


async def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[RequestRecord]]:
    """Run the benchmark once.

    Returns:
        The fields of the JSON line without the details of each request, and the records of the requests. After Ctrl-C `interrupted` is
        true, and they cover the requests that had ended.

    Raises:
        BenchError: there is no server or no prompt, or the warm-up failed.
        CancelledError: Ctrl-C before any request had ended.
    """
    backend = BACKENDS[args.backend]
    try:
        client = HttpClient(args.base_url or f"http://{authority(args.host, args.port or backend.port)}", _headers(args.header))
        goodput = parse_goodput(args.goodput) if args.goodput else None
        await _wait_ready(client, args.ready_check_timeout_sec)
        model = args.served_model_name or args.model or await _served_model(client)
        info = await _get(client, "/get_model_info", "/model_info") or {}
        vocabulary = await open_vocabulary(client, args.tokenizer, args.model or model, info)
        dataset = _options(DatasetOptions, args)
        requests = await load(dataset, vocabulary, chat_template(vocabulary) if args.apply_chat_template else None)
        options = _options(GenerationOptions, args, model=model)
        payload(backend, requests[0], options)
    except (ValueError, HttpFailure) as error:
        raise BenchError(str(error)) from error
    if args.dataset_name != "generated-shared-prefix" and len(requests) < args.num_prompts:
        say(f"{args.dataset_name} has only {len(requests)} prompts that fit; {args.num_prompts} were requested")
    send_request = partial(send, client, backend, options=options)
    await _warm_up(args.warmup_requests, send_request, requests[0])
    if args.flush_cache:
        await _flush(client, "/reset_prefix_cache" if backend.name.startswith("vllm") else "/flush_cache")
    before = await _get(client, "/get_server_info", "/server_info")
    records, seconds = await _measure(args, client, send_request, requests)
    _count_tokens(records, vocabulary)
    server_info = await _unless_cancelled(_get(client, "/get_server_info", "/server_info"))
    figures = {name: getattr(args, name) for name in _ARGUMENTS} | {"server_info": server_info}
    if args.request_rate == float("inf"):
        figures["request_rate"] = "inf"  # JSON has no infinity
    figures |= summarize(records, seconds, goodput) | acceptance(records, before, server_info) | summary.origin(server_info)
    figures["total_output_tokens_retokenized"] = _retokenized(records, vocabulary)
    figures["interrupted"] = not asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)  # Ctrl-C has removed it
    return figures, records


async def _measure(
    args: argparse.Namespace, client: HttpClient, send_request: Send, requests: list[BenchRequest]
) -> tuple[list[RequestRecord], float]:
    if args.profile:
        await _control(client, "/start_profile")
    _cancel_on_ctrl_c()
    load = Load(args.request_rate, args.max_concurrency, args.seed)
    try:
        with tqdm(total=len(requests), disable=args.disable_tqdm, unit="req") as bar:
            return await run_load(requests, load, send_request, lambda: bar.update(1))
    finally:
        if args.profile:
            await _unless_cancelled(_stop_profile(client))


def _cancel_on_ctrl_c() -> None:
    """Let the first Ctrl-C cancel this task; a second one ends the program."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        task.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)


async def _unless_cancelled(work: Awaitable[T]) -> T | None:
    """The result; None if this task is cancelled meanwhile, which does not cost the figures of the run."""
    try:
        return await work
    except asyncio.CancelledError:
        return None


async def _stop_profile(client: HttpClient) -> None:
    """Also after Ctrl-C. A failure does not cost the figures of the run."""
    try:
        await _control(client, "/stop_profile")
    except BenchError as error:
        complain(str(error))


async def _warm_up(number: int, send_request: Send, request: BenchRequest) -> None:
    if number == 0:
        return
    short = BenchRequest(request.prompt, request.prompt_len, min(request.output_len, _WARMUP_OUTPUT_LEN))
    records = await asyncio.gather(*(send_request(short) for _ in range(number)))
    if not any(record.success for record in records):
        raise BenchError(f"the warm-up failed: {records[0].error}")


def _count_tokens(records: Sequence[RequestRecord], vocabulary: Vocabulary) -> None:
    """Count the tokens of each chunk, after the run so that counting does not slow down the client."""
    counter = vocabulary.count if isinstance(vocabulary, LocalVocabulary) else None
    for record in records:
        count_chunks(record, counter)
        record.itl = spread_itl(record)


def _retokenized(records: Sequence[RequestRecord], vocabulary: Vocabulary) -> int | None:
    if not isinstance(vocabulary, LocalVocabulary):
        return None
    return sum(vocabulary.count(record.text) for record in records if record.success)


def _show(args: argparse.Namespace, figures: dict[str, Any], records: Sequence[RequestRecord]) -> None:
    if figures["interrupted"]:
        complain(f"interrupted; the result covers the {len(records)} requests that had ended")
    say("\n" + summary.render(figures, args.cache_report))
    if errors := summary.failures(records):
        print(f"{figures['failed']} of {len(records)} requests failed:\n{errors}", file=sys.stderr)
    if args.plot_throughput:
        timeline = per_second([record for record in records if record.success])
        say(summary.chart("Output tokens per second", timeline.tokens))
        say(summary.chart("Concurrent requests", timeline.requests))
        say(_plot(timeline, _picture_file(_output_file(args))))


def _plot(timeline: Timeline, picture: Path) -> str:
    """Write the picture; returns what to say about it."""
    try:
        return f"plot: {picture}" if summary.plot(timeline, picture) else "no PNG: matplotlib is not installed"
    except OSError as error:
        return f"no PNG: {picture} cannot be written: {why(error)}"


def _details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    return {
        "input_lens": [record.prompt_len for record in records],
        "output_lens": [record.output_len for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.itl for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
    }


def _output_file(args: argparse.Namespace) -> Path:
    if args.output_file:
        return Path(args.output_file)
    lens = f"{args.random_input_len}_{args.random_output_len}" if args.dataset_name.startswith("random") else args.dataset_name
    return Path(f"{args.backend}_{datetime.now():%m%d}_{args.num_prompts}_{lens}.jsonl")


def _picture_file(output: Path) -> Path:
    return output.with_suffix(".png")


def _check_output(file: Path) -> None:
    """Raise BenchError before the run if its result could not be written."""
    try:
        writable = not file.is_dir() and os.access(file if file.exists() else file.parent, os.W_OK)
    except OSError as error:  # such as a name that is too long
        raise BenchError(f"--output-file {file}: the file cannot be written: {error.strerror}") from error
    if not writable:
        raise BenchError(f"--output-file {file}: the file cannot be written; name a file in an existing folder")


def _headers(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return ({"Authorization": f"Bearer {key}"} if key else {}) | dict(pairs)


def _options(kind: type[T], args: argparse.Namespace, **own: object) -> T:
    """A dataclass whose fields are flags, except `own`."""
    flags = {field.name: getattr(args, field.name) for field in fields(kind) if field.name not in own}  # pyright: ignore[reportArgumentType]
    return kind(**flags, **own)


async def _wait_ready(client: HttpClient, seconds: float) -> None:
    """Poll `/ready` until it answers 200; if the server does not have it, `/health`, else `/v1/models`, which may require an API key."""
    if seconds <= 0:
        return
    deadline, paths, last = time.monotonic() + seconds, ["/ready", "/health", "/v1/models"], ""
    while True:
        try:
            await client.json("GET", paths[0], timeout=5)
            return
        except HttpFailure as failure:
            if failure.status in (401, 403):
                return  # the server is up, and its next answer says what is wrong
            last = str(failure)
            if failure.status == 404 and len(paths) > 1:
                del paths[0]
                continue
        if time.monotonic() > deadline:
            raise BenchError(f"no server is ready at {client.endpoint.host}:{client.endpoint.port} after {seconds:.0f} s ({last})")
        await asyncio.sleep(0.5)


async def _served_model(client: HttpClient) -> str:
    try:
        return (await client.json("GET", "/v1/models"))["data"][0]["id"]
    except (HttpFailure, KeyError, IndexError, TypeError) as error:
        raise BenchError(f"the server does not name its model ({error}); pass --model") from error


async def _get(client: HttpClient, *paths: str) -> dict[str, Any] | None:
    """The answer of the first of `paths` that returns an object; None if no path does, or the server does not answer."""
    for path in paths:
        try:
            answer = await client.json("GET", path, timeout=_INFO_SECONDS)
        except HttpFailure as failure:
            if not failure.status:
                return None
            continue
        if isinstance(answer, dict):
            return answer
    return None


async def _flush(client: HttpClient, path: str) -> None:
    """Flush the prefix cache.

    The server refuses while the last step of the warm-up is in flight, so retry for a while.
    """
    deadline = time.monotonic() + _FLUSH_SECONDS
    while True:
        try:
            return await _control(client, path)
        except BenchError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.1)


async def _control(client: HttpClient, path: str) -> None:
    try:
        await client.json("POST", path, {})
    except HttpFailure as failure:
        raise BenchError(f"{path}: {failure}") from failure


def _allow_many_connections() -> None:
    """Raise the soft limit of open files to the hard limit; each request needs a socket."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 if a request succeeded, 1 if all failed or the result could not be written, 2 if the run could not start, 130 if it was
        interrupted: the first Ctrl-C ends the requests, and the result covers those that had ended; a second one ends the program.
    """
    args = parser().parse_args(argv)
    _allow_many_connections()
    file = _output_file(args)
    try:
        _check_output(file)
        if args.plot_throughput:
            _check_output(_picture_file(file))
        figures, records = uvloop.run(run(args))
        line = json.dumps(figures | (_details(records) if args.output_details else {}))
        status = 130 if figures["interrupted"] else 0 if figures["completed"] else 1
        try:
            append(file, line)
        except OSError as error:
            complain(f"--output-file {file} cannot be written: {why(error)}; its line is printed")
            say(line)
            status = 1
        _show(args, figures, records)
        return status
    except BenchError as error:
        complain(str(error))
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


if __name__ == "__main__":
    sys.exit(main())
