"""The load generator's parts: dialects, prompts, arrivals, figures, flags."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders

from event_loop import in_event_loop
from runtime.bench import backends, metrics, summary
from runtime.bench.backends import BACKENDS, Answer, GenerationOptions, payload, send
from runtime.bench.chat_template import chat_template
from runtime.bench.datasets import LONGEST, DatasetOptions, embedded_prompts, load, random_lens
from runtime.bench.http_stream import Endpoint, HttpClient, HttpFailure, authority
from runtime.bench.load import Load, arrivals, run_load
from runtime.bench.options import parser
from runtime.bench.records import BenchRequest, Chunk, RequestRecord
from runtime.bench.vocabulary import LocalVocabulary, UnknownVocabulary, open_vocabulary, tokenizer_file

FLAGS = (
    "backend base-url host port ready-check-timeout-sec dataset-name dataset-path model served-model-name tokenizer "
    "num-prompts "
    "sharegpt-output-len sharegpt-context-len random-input-len random-output-len random-range-ratio random-length-sigma request-rate "
    "max-concurrency "
    "output-file output-details goodput disable-tqdm disable-stream return-logprob cache-report disable-ignore-eos "
    "temperature top-p "
    "extra-request-body apply-chat-template profile plot-throughput prompt-suffix flush-cache warmup-requests "
    "tokenize-prompt seed "
    "gsp-num-groups gsp-prompts-per-group gsp-system-prompt-len gsp-question-len gsp-output-len tag header"
)
FIELDS = (
    "tag interrupted backend dataset_name request_rate max_concurrency sharegpt_output_len random_input_len random_output_len "
    "random_range_ratio random_length_sigma "
    "server_info duration completed failed total_input_tokens total_output_tokens total_output_tokens_retokenized "
    "request_throughput "
    "input_throughput output_throughput total_throughput concurrency accept_length per_position_acceptance "
    "graph_hit_rate "
    "padding_waste steps_by_depth accept_length_by_context max_output_tokens_per_s max_concurrent_requests request_goodput commit device"
)


@pytest.fixture
def vocabulary(tmp_path: Path) -> LocalVocabulary:
    """Single letters and pairs as tokens, so that cutting a text between ids changes its tokenisation."""
    letters = [chr(c) for c in range(33, 127)] + ["Ġ"]
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("Ġ", "t"), ("i", "n"), ("e", "r")]
    vocab = {token: i for i, token in enumerate(letters + [a + b for a, b in merges])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = token_decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return LocalVocabulary(tmp_path / "tokenizer.json")


def make(vocabulary: Any, **options: Any) -> list[BenchRequest]:
    return asyncio.run(load(DatasetOptions(**options), vocabulary))


# ---- flags and fields


def test_the_list_of_flags_is_pinned() -> None:
    have = {flag for action in parser()._actions for flag in action.option_strings}
    aliases = {"-h", "--help", "--random-input", "--random-output", "--plot"}
    assert have - aliases == {f"--{name}" for name in FLAGS.split()}


@pytest.mark.parametrize(("prompts", "concurrency"), [(5, 1), (20, 4), (80, 16), (160, 32)])
def test_reference_command_lines_parse(prompts: int, concurrency: int) -> None:
    line = (
        "--backend sglang-oai  --dataset-name random --random-input-len 1000 --random-output-len 1000 "
        "--random-range-ratio 1 "
        f"--num-prompts {prompts} --max-concurrency {concurrency} --output-file dsv3.jsonl"
    )
    args = parser().parse_args(line.split())
    assert (args.backend, args.random_input_len, args.random_range_ratio) == ("sglang-oai", 1000, 1.0)
    assert (args.num_prompts, args.max_concurrency, args.output_file) == (prompts, concurrency, "dsv3.jsonl")


@pytest.mark.parametrize(
    "flags",
    [
        "--num-prompts 0",
        "--num-prompts many",
        "--random-length-sigma -1",
        "--random-length-sigma nan",
        "--warmup-requests -1",
        "--port 65536",
        "--request-rate 0",
        "--request-rate nan",
        "--seed -1",
        "--seed 4294967296",
        "--temperature nan",
        "--top-p inf",
        "--top-p 1.5",
        "--top-p 0",
        "--random-range-ratio 1.5",
        "--extra-request-body [1]",
        f"--extra-request-body {'[' * 3000}",
        "--header x",
        "--header =x",
        "--header x=\u20ac",
    ],
)
def test_flags_out_of_range_are_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parser().parse_args(flags.split(" ", 1))
    assert exit_info.value.code == 2
    told = capsys.readouterr().err
    assert flags.split()[0] in told
    assert told.count("\n") == 1


def test_repeated_list_flags_add_up() -> None:
    args = parser().parse_args(["--header", "A=1", "--goodput", "ttft:200", "--header", "B=2", "C=3", "--goodput", "tpot:20"])
    assert args.header == [("A", "1"), ("B", "2"), ("C", "3")]
    assert args.goodput == ["ttft:200", "tpot:20"]
    assert parser().parse_args([]).header == []


def test_json_fields_and_columns_match_sglang() -> None:
    args = parser().parse_args([])
    record = finished([0.0, 0.1, 0.2])
    figures = {name: getattr(args, name, None) for name in FIELDS.split()}
    figures |= metrics.summarize([record], 1.0) | metrics.acceptance([record], None, None) | {"commit": "c", "device": "d"}
    names = ("e2e_latency", "ttft", "tpot", "itl")
    latencies = {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p90", "p95", "p99") for name in names}
    assert set(figures) >= latencies | set(FIELDS.split())
    text = summary.render(figures)
    for column in (
        "Successful requests:",
        "Benchmark duration (s):",
        "Output token throughput (tok/s):",
        "P99 TTFT (ms):",
        "Max ITL (ms):",
    ):
        assert column in text


# ---- dialects


REQUEST = BenchRequest("hello", 1, 8)


def test_each_dialect_builds_its_own_request_body() -> None:
    options = GenerationOptions(model="m", temperature=0.5, top_p=0.9, extra_body={"min_p": 0.1})
    native = payload(BACKENDS["sglang"], REQUEST, options)
    assert native["text"] == "hello"
    assert native["sampling_params"] == {"temperature": 0.5, "max_new_tokens": 8, "ignore_eos": True, "top_p": 0.9}
    completions = payload(BACKENDS["sglang-oai"], REQUEST, options)
    assert (completions["prompt"], completions["max_tokens"], completions["ignore_eos"]) == ("hello", 8, True)
    assert completions["stream_options"] == {"include_usage": True}
    chat = payload(BACKENDS["vllm-chat"], REQUEST, options)
    assert chat["messages"] == [{"role": "user", "content": "hello"}]
    assert chat["stream_options"]["continuous_usage_stats"] is True
    assert all(body["min_p"] == 0.1 for body in (native, completions, chat))


def test_objects_of_the_extra_body_are_merged() -> None:
    native = payload(BACKENDS["sglang"], REQUEST, GenerationOptions("m", extra_body={"sampling_params": {"top_k": 5, "temperature": 1}}))
    assert native["sampling_params"] == {"temperature": 1, "max_new_tokens": 8, "ignore_eos": True, "top_k": 5}
    chat = payload(BACKENDS["vllm-chat"], REQUEST, GenerationOptions("m", extra_body={"stream_options": {"include_usage": False}}))
    assert chat["stream_options"] == {"include_usage": False, "continuous_usage_stats": True}
    assert "stream_options" not in payload(BACKENDS["vllm"], REQUEST, GenerationOptions("m", extra_body={"stream": False}))


def test_native_dialect_refuses_several_answers_per_request() -> None:
    options = GenerationOptions("m", extra_body={"sampling_params": {"n": 2}})
    with pytest.raises(ValueError, match="one answer per request; remove n"):
        payload(BACKENDS["sglang"], REQUEST, options)


def test_chat_dialect_refuses_token_ids() -> None:
    ids = BenchRequest([1, 2], 2, 8)
    options = GenerationOptions(model="m")
    assert payload(BACKENDS["sglang"], ids, options)["input_ids"] == [1, 2]
    assert payload(BACKENDS["vllm"], ids, options)["prompt"] == [1, 2]
    with pytest.raises(ValueError, match="takes text"):
        payload(BACKENDS["sglang-oai-chat"], ids, options)


def read(backend: str, events: list[tuple[float, Any]], output_len: int = 8, ended: bool = True) -> RequestRecord:
    record = RequestRecord(prompt_len=3)
    answer = Answer(BACKENDS[backend], record)
    for at, event in [*events, (9.0, None)] if ended else events:
        answer.event(b"[DONE]" if event is None else json.dumps(event).encode(), at)
    if not record.error:
        answer.close(output_len)
    return record


def choice(text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": reason}], **more}


def test_chunk_with_held_back_text_counts_as_token() -> None:
    events = [(1.0, choice("")), (2.0, choice("é")), (3.0, choice("", "length")), (3.5, {"choices": [], "usage": {"completion_tokens": 2}})]
    record = read("sglang-oai", [*events, (4.0, None)])
    assert (record.ttft, record.latency, record.output_len) == (1.0, 2.0, 2)


def test_chat_role_chunk_is_not_a_token() -> None:
    def delta(**fields: Any) -> dict[str, Any]:
        return {"choices": [{"delta": fields, "finish_reason": None}]}

    record = read("sglang-oai-chat", [(1.0, delta(role="assistant", content="")), (2.0, delta(content="a")), (4.0, delta(content="b"))])
    assert (record.ttft, record.latency, record.text) == (2.0, 4.0, "ab")


def test_running_usage_gives_tokens_per_chunk() -> None:
    events = [(1.0, choice("a", usage={"completion_tokens": 1})), (2.0, choice("bcd", usage={"completion_tokens": 4}))]
    record = read("vllm", events)
    assert [chunk.tokens for chunk in record.chunks] == [1, 3]
    assert metrics.spread_itl(record) == pytest.approx([1 / 3] * 3)


def test_final_usage_is_not_the_last_chunks_token_count() -> None:
    events = [(1.0, choice("a")), (2.0, choice("b")), (3.0, choice("c", "length", usage={"completion_tokens": 3, "prompt_tokens": 5}))]
    record = read("sglang-oai", events)
    assert (record.output_len, record.prompt_len) == (3, 5)
    assert metrics.spread_itl(record) == [1.0, 1.0]


def test_tokens_without_text_may_come_with_the_end() -> None:
    record = read("sglang-oai", [(2.0, choice("", "length")), (3.0, {"choices": [], "usage": {"completion_tokens": 2}})])
    assert not record.error
    assert (record.output_len, record.ttft, record.latency) == (2, 2.0, 2.0)


def test_tool_calls_count_as_tokens() -> None:
    def call(**function: str) -> dict[str, Any]:
        return {"choices": [{"delta": {"content": None, "tool_calls": [{"function": function}]}, "finish_reason": None}]}

    events = [(2.0, call(name="f", arguments="")), (3.0, call(arguments="{}")), (4.0, {"usage": {"completion_tokens": 2}})]
    record = read("sglang-oai-chat", events)
    assert (record.ttft, record.latency, record.output_len, record.text) == (2.0, 3.0, 2, "f{}")


def test_native_text_may_be_cumulative_or_not() -> None:
    def chunk(text: str, tokens: int) -> dict[str, Any]:
        return {"text": text, "meta_info": {"completion_tokens": tokens, "cached_tokens": 2, "finish_reason": None}}

    cumulative = read("native", [(1.0, chunk("a", 1)), (2.0, chunk("ab", 2))])
    deltas = read("native", [(1.0, chunk("a", 1)), (2.0, chunk("b", 2))])
    assert cumulative.text == deltas.text == "ab"
    assert cumulative.cached_tokens == 2


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([(1.0, {"error": {"message": "out of luck"}})], "out of luck"),
        ([(1.0, choice("a")), (2.0, {"object": "error", "message": "out of luck"})], "out of luck"),
        ([(1.0, choice("a")), (2.0, choice("", "abort"))], "aborted"),
        ([(1.0, None)], "without a token"),
    ],
)
def test_failed_answer_is_an_error(events: list[tuple[float, Any]], why: str) -> None:
    assert why in read("sglang-oai", events).error


class Answering:
    """A client whose requests get one body, whole or as the events of a stream."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    async def exchange(self, method: str, path: str, body: bytes, on_event: Callable[[bytes, float], None] | None) -> tuple[int, bytes]:
        if on_event is None:
            return 200, self.body
        for line in self.body.split(b"\n"):
            if line.startswith(b"data:"):
                on_event(line[5:].strip(), backends.time.perf_counter())
        return 200, b""


def answered(body: bytes, backend: str = "sglang-oai", **options: Any) -> RequestRecord:
    client: Any = Answering(body)
    return asyncio.run(send(client, BACKENDS[backend], REQUEST, GenerationOptions("m", **options)))


@pytest.mark.parametrize(
    ("body", "stream", "why"),
    [
        (b"<html>", True, "the server sent no event; if it does not stream, pass --disable-stream"),
        (b"<html>", False, "the server sent something other than a JSON object: <html>"),
        (b"[]", False, "the server sent something other than a JSON object: []"),
        (b"data: {oops\n\n", True, "the server sent something other than a JSON object: {oops"),
        (b'{"choices": [5]}', False, "the server's answer has an unknown form (AttributeError: 'int' object has no attribute 'get')"),
    ],
)
def test_what_is_no_answer_is_described(body: bytes, stream: bool, why: str) -> None:
    assert answered(body, stream=stream).error == why


@pytest.mark.parametrize("stream", [True, False])
def test_the_extra_body_chooses_whether_to_stream(stream: bool) -> None:
    whole = json.dumps(choice("ab", "length", usage={"completion_tokens": 2})).encode()
    record = answered(b"data: " + whole if stream else whole, stream=not stream, extra_body={"stream": stream})
    assert (record.error, record.output_len, record.text) == ("", 2, "ab")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("extra", [{"max_tokens": 0, "echo": True}, {"sampling_params": {"max_new_tokens": 0}}])
def test_answers_may_have_no_token_if_none_was_requested(extra: dict[str, Any], stream: bool) -> None:
    backend = "sglang" if "sampling_params" in extra else "sglang-oai"
    end = {"meta_info": {"completion_tokens": 0, "finish_reason": {"type": "length"}}, "usage": {"completion_tokens": 0}}
    whole = json.dumps(choice("the prompt", "length", **end)).encode()
    record = answered(b"data: " + whole if stream else whole, backend, stream=stream, extra_body=extra)
    assert (record.error, record.output_len, record.chunks) == ("", 0, [])
    assert record.ttft == record.latency > 0


@pytest.mark.parametrize("backend", ["sglang", "vllm", "vllm-chat"])
def test_a_stream_that_breaks_off_is_an_error(backend: str) -> None:
    chunk = {"text": "a", "meta_info": {}, "choices": [{"text": "a", "delta": {"content": "a"}, "finish_reason": None}]}
    assert "ended before the answer" in read(backend, [(1.0, chunk)], ended=False).error
    assert read(backend, [(1.0, chunk)]).error == ""


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_thinking_counts_as_tokens(field: str) -> None:
    events = [(at, {"choices": [{"delta": {field: "a"}, "finish_reason": None}]}) for at in (1.0, 2.0)]
    record = read("vllm-chat", events)
    assert (record.ttft, record.text, len(record.chunks)) == (1.0, "aa", 2)


@pytest.mark.parametrize(("url", "address"), [("http://[::1]:8000/x", "[::1]:8000"), ("https://a.example", "a.example:443")])
def test_the_host_header_has_the_form_of_an_address(url: str, address: str) -> None:
    assert Endpoint.parse(url).authority == address


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_host_may_have_brackets(host: str) -> None:
    assert authority(host, 8000) == "[::1]:8000"


def test_ttft_includes_connect_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        now = 5.0

        async def exchange(self, method: str, path: str, body: bytes, on_event: Callable[[bytes, float], None]) -> tuple[int, bytes]:
            self.now += 1.0
            on_event(json.dumps(choice("a", "length")).encode(), self.now)
            return 200, b""

    client: Any = Client()
    monkeypatch.setattr(backends.time, "perf_counter", lambda: client.now)
    record = asyncio.run(send(client, BACKENDS["sglang-oai"], REQUEST, GenerationOptions(model="m")))
    assert (record.start, record.ttft, record.error) == (5.0, 1.0, "")


# ---- prompts


def test_random_ids_have_exact_lengths_and_repeat_by_seed() -> None:
    options = {"dataset_name": "random-ids", "num_prompts": 20, "random_input_len": 30, "random_output_len": 9, "random_range_ratio": 0.5}
    requests = make(UnknownVocabulary(100), **options)
    assert requests == make(UnknownVocabulary(100), **options)
    assert requests != make(UnknownVocabulary(100), **options, seed=1)
    assert all(isinstance(request.prompt, list) and len(request.prompt) == request.prompt_len for request in requests)
    assert all(15 <= request.prompt_len <= 30 and 4 <= request.output_len <= 9 for request in requests)
    assert {token for request in requests for token in request.prompt} <= set(range(100))


@pytest.mark.parametrize(
    "options",
    [
        {"dataset_name": "random-ids", "num_prompts": 1, "random_input_len": 1 << 40},
        {"dataset_name": "random", "num_prompts": 1 << 20, "random_input_len": 1 << 10},
        {"dataset_name": "random-ids", "num_prompts": 1 << 14, "random_input_len": 1 << 10, "random_length_sigma": 0.5},
        {"dataset_name": "generated-shared-prefix", "gsp_system_prompt_len": 1 << 30},
    ],
)
def test_prompts_that_would_fill_the_memory_are_refused(options: dict[str, Any], vocabulary: LocalVocabulary) -> None:
    with pytest.raises(ValueError, match="the limit is 67,108,864"):
        make(vocabulary, **options)


def test_random_text_encodes_to_the_exact_length(vocabulary: LocalVocabulary) -> None:
    requests = make(vocabulary, dataset_name="random", num_prompts=12, random_input_len=60, random_output_len=5, random_range_ratio=0.3)
    for request in requests:
        assert isinstance(request.prompt, str)
        assert len(asyncio.run(vocabulary.encode(request.prompt))) == request.prompt_len


def test_text_without_tokenizer_suggests_random_ids() -> None:
    with pytest.raises(ValueError, match="random-ids"):
        make(UnknownVocabulary(100), dataset_name="random", num_prompts=1)


def test_vocabulary_size_of_a_multimodal_config_is_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 7}}))
    client = HttpClient("http://127.0.0.1:1")  # no server
    assert asyncio.run(open_vocabulary(client, None, str(tmp_path), {})).size == 7


@pytest.mark.parametrize("text", ["{", "[" * 9000, "[]"])
def test_a_malformed_config_of_the_model_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json "):
        asyncio.run(open_vocabulary(HttpClient("http://127.0.0.1:9"), None, str(tmp_path), {}))


def test_a_model_name_too_long_for_a_path_is_no_folder() -> None:
    client = HttpClient("http://127.0.0.1:1")  # no server
    with pytest.raises(ValueError, match="pass --tokenizer FOLDER"):
        asyncio.run(open_vocabulary(client, None, "x" * 300, {}))


@in_event_loop
async def test_headers_and_paths_beyond_ascii_are_sent() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + head)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        _, head = await HttpClient(f"http://127.0.0.1:{port}/é", {"X-Name": "é"}).exchange("GET", "/v1")
    assert head.startswith(b"GET /%C3%A9/v1 HTTP/1.1\r\n")
    assert "x-name: é\r\n".encode("latin-1") in head.replace(b"X-Name", b"x-name")


@pytest.mark.parametrize("header", [("a b", "1"), ("X", "1\n2"), ("X", "€")])
def test_headers_that_http_does_not_allow_are_refused(header: tuple[str, str]) -> None:
    with pytest.raises(HttpFailure, match="the request cannot be sent: "):
        asyncio.run(HttpClient("http://127.0.0.1:1", dict([header])).exchange("GET", "/"))


def test_prompts_of_a_group_share_a_prefix(vocabulary: LocalVocabulary) -> None:
    sizes = {"gsp_num_groups": 3, "gsp_prompts_per_group": 4, "gsp_system_prompt_len": 50, "gsp_question_len": 10}
    requests = make(vocabulary, dataset_name="generated-shared-prefix", tokenize_prompt=True, **sizes)
    prefixes = [tuple(request.prompt[:50]) for request in requests]
    assert len(requests) == 12
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    assert len({tuple(request.prompt) for request in requests}) == 12


def test_tokenize_prompt_sends_real_text_as_ids(vocabulary: LocalVocabulary) -> None:
    as_ids, as_text = (make(vocabulary, dataset_name="embedded", tokenize_prompt=ids) for ids in (True, False))
    for sent, told in zip(as_ids, as_text, strict=True):
        assert isinstance(told.prompt, str)
        assert sent.prompt == asyncio.run(vocabulary.encode(told.prompt))
        assert sent.prompt_len == len(sent.prompt)
    with pytest.raises(ValueError, match="--tokenizer"):
        make(UnknownVocabulary(100), dataset_name="embedded", tokenize_prompt=True)


def test_any_part_of_embedded_prompts_mixes_all_kinds() -> None:
    lines = embedded_prompts()
    assert len({line["prompt"] for line in lines}) == 80
    kinds = {line["prompt"]: line["kind"] for line in lines}
    requests = make(UnknownVocabulary(9), dataset_name="embedded", num_prompts=16, sharegpt_output_len=None)
    counts = [sum(kinds[str(request.prompt)] == kind for request in requests) for kind in set(kinds.values())]
    assert counts == [2] * 8


def test_conversation_files_are_read_and_missing_files_named(tmp_path: Path, vocabulary: LocalVocabulary) -> None:
    talk = {"conversations": [{"from": "human", "value": "the hen"}, {"from": "gpt", "value": "in the inn"}]}
    sharegpt, custom = tmp_path / "s.json", tmp_path / "c.jsonl"
    sharegpt.write_text(json.dumps([talk, {"conversations": []}]))
    custom.write_text(json.dumps({"prompt": "another"}) + "\n\n" + json.dumps({"prompt": "thing"}) + "\n")
    (request,) = make(vocabulary, dataset_name="sharegpt", dataset_path=str(sharegpt), prompt_suffix=" and")
    assert request.prompt == "the hen andAssistant:"
    assert request.output_len == vocabulary.count("in the inn")
    assert [r.prompt for r in make(vocabulary, dataset_name="custom", dataset_path=str(custom))] == ["another", "thing"]
    custom.write_text("\ufeff" + json.dumps({"prompt": "one\u2028line\x85still"}, ensure_ascii=False), encoding="utf-8")
    (request,) = make(vocabulary, dataset_name="custom", dataset_path=str(custom), num_prompts=1)
    assert request.prompt == "one\u2028line\x85still"
    with pytest.raises(ValueError, match="requires --dataset-path"):
        make(vocabulary, dataset_name="sharegpt", dataset_path=str(tmp_path / "none.json"))


def test_empty_prompts_of_a_file_are_skipped(tmp_path: Path, vocabulary: LocalVocabulary) -> None:
    talks = [{"conversations": [{"value": value}, {"value": "in"}]} for value in ("", "the hen", "")]
    lines = [{"prompt": value} for value in ("", "the hen", "")]
    (tmp_path / "s.json").write_text(json.dumps(talks))
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    for name, file in (("sharegpt", "s.json"), ("custom", "c.jsonl")):
        assert [r.prompt for r in make(vocabulary, dataset_name=name, dataset_path=str(tmp_path / file))] == ["the hen"]


@in_event_loop
async def test_creation_of_prompts_can_be_cancelled(vocabulary: LocalVocabulary) -> None:
    task = asyncio.create_task(load(DatasetOptions("random", num_prompts=50), vocabulary))
    await asyncio.sleep(0)
    assert task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_files_that_cannot_be_read_are_named(tmp_path: Path, vocabulary: LocalVocabulary) -> None:
    (tmp_path / "file").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=f"--dataset-path {tmp_path}/file cannot be read: not UTF-8"):
        make(vocabulary, dataset_name="custom", dataset_path=str(tmp_path / "file"))
    with pytest.raises(ValueError, match="is not a file"):
        make(vocabulary, dataset_name="custom", dataset_path="x" * 300)
    assert tokenizer_file("x" * 300) is None


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("sharegpt", "[1, 2]", "not a JSON list of conversations"),
        ("sharegpt", '{"a": 1}', "not a JSON list of conversations"),
        ("sharegpt", "hello", "not a JSON list of conversations"),
        ("sharegpt", '[{"conversations": ["hi", "ho"]}, {"conversations": [{"value": 1}, {"value": 2}]}]', "no conversation of two turns"),
        ("custom", '{"prompt": "a"}\nhello', "line 2: not JSON"),
        ("custom", '{"prompt": "a"}\n"b"', "line 2: not a JSON object"),
        ("custom", '{"prompt": "a", "answer": 5}', "line 1: its answer is not a string"),
        ("custom", '{"foo": "a"}', "no conversation of two turns"),
        ("sharegpt", "[" * 9000, "not a JSON list of conversations"),
        ("custom", '{"prompt": "a"}\n' + '{"a":' * 9000, "line 2: not JSON"),
        ("custom", r'{"prompt": "a \ud800"}', "has a lone surrogate"),
        ("custom", r'{"prompt": "a", "answer": "\udfff"}', "has a lone surrogate"),
    ],
)
def test_malformed_dataset_file_is_refused(name: str, text: str, why: str, tmp_path: Path, vocabulary: LocalVocabulary) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"--dataset-path {file}.*{why}"):
        make(vocabulary, dataset_name=name, dataset_path=str(file))


def test_chat_template_omits_the_bos_token(tmp_path: Path, vocabulary: LocalVocabulary) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        chat_template(vocabulary)
    source = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "chat_template": source}))
    assert chat_template(vocabulary)("hi") == "<user>hi<bot>"


def test_chat_template_may_use_what_transformers_offers(tmp_path: Path, vocabulary: LocalVocabulary) -> None:
    source = "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}{% endfor %}{{ strftime_now('!') }}"
    (tmp_path / "chat_template.jinja").write_text(source)
    assert chat_template(vocabulary)("é") == '{"role": "user", "content": "é"}!'


@pytest.mark.parametrize("source", ["{% generation %}", "{{ missing() }}", "{{ 'a' + 1 }}"])
def test_a_chat_template_that_fails_is_named(source: str, tmp_path: Path, vocabulary: LocalVocabulary) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(ValueError, match=f"{tmp_path}: the chat template fails"):
        chat_template(vocabulary)("hi")


def test_half_of_a_surrogate_pair_in_an_answer_is_counted(vocabulary: LocalVocabulary) -> None:
    assert vocabulary.count("the \ud800") == vocabulary.count("the ?")


def test_a_malformed_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model"')
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read: "):
        LocalVocabulary(tmp_path / "tokenizer.json")


def lens(count: int, **options: Any) -> tuple[list[int], list[int]]:
    return random_lens(DatasetOptions("random-ids", num_prompts=count, **options), random.Random(0))


def test_random_lengths_stay_in_range() -> None:
    inputs, outputs = lens(50, random_input_len=10, random_output_len=20, random_range_ratio=1.0)
    assert (set(inputs), set(outputs)) == ({10}, {20})
    assert min(lens(500, random_input_len=10)[0]) == 1


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0])
def test_log_normal_lengths_have_the_mean_and_the_spread_that_were_asked_for(sigma: float) -> None:
    for found, mean in zip(lens(20_000, random_input_len=1000, random_output_len=250, random_length_sigma=sigma), (1000, 250), strict=True):
        logs = [math.log(length) for length in found]
        assert statistics.fmean(found) == pytest.approx(mean, rel=0.03)
        assert statistics.pstdev(logs) == pytest.approx(sigma, abs=0.02)
        assert max(found) <= LONGEST * mean


def test_log_normal_lengths_end_at_the_longest_and_at_one_token() -> None:
    inputs, _ = lens(2000, random_input_len=10, random_length_sigma=2.0)
    assert (min(inputs), max(inputs)) == (1, 10 * LONGEST)


# ---- load


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(4000, 50.0, seed=3)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.1), "an exponential's deviation is its mean"
    assert arrivals(3, float("inf"), seed=3) == [0.0, 0.0, 0.0]


def test_a_seed_gives_the_arrivals_of_sglangs_client() -> None:
    gaps = np.random.RandomState(7)  # SGLang seeds numpy's global generator and draws before each sleep
    expected = [0.0]
    for _ in range(5):
        expected.append(expected[-1] + gaps.exponential(1.0 / 2.0))
    assert arrivals(6, 2.0, seed=7) == pytest.approx(expected)


def test_records_keep_request_order_and_concurrency_limit_holds() -> None:
    open_now, most = 0, 0

    async def send(request: BenchRequest) -> RequestRecord:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.001 * (5 - request.prompt_len))
        open_now -= 1
        return RequestRecord(prompt_len=request.prompt_len)

    requests = [BenchRequest("x", i, 1) for i in range(5)]
    records, _ = asyncio.run(run_load(requests, Load(float("inf"), 3, 0), send))
    assert [record.prompt_len for record in records] == [0, 1, 2, 3, 4]
    assert most == 3


# ---- figures


def finished(times: list[float], start: float = 0.0, ttft: float = 0.5) -> RequestRecord:
    """A record with one-token chunks that arrive `times` after the first."""
    chunks = [Chunk(start + ttft + at, "x", 1) for at in times]
    record = RequestRecord(prompt_len=10, output_len=len(times), start=start, ttft=ttft, latency=ttft + times[-1], chunks=chunks)
    record.itl = metrics.spread_itl(record)
    return record


def test_figures_match_their_definitions() -> None:
    records = [finished([0.0, 0.1, 0.4]), finished([0.0, 0.3, 0.6], start=1.0), RequestRecord(prompt_len=99, error="lost")]
    figures = metrics.summarize(records, 2.0)
    assert (figures["completed"], figures["failed"], figures["total_input_tokens"], figures["total_output_tokens"]) == (2, 1, 20, 6)
    assert figures["output_throughput"] == 3.0
    assert figures["mean_tpot_ms"] == pytest.approx((200 + 300) / 2)
    assert figures["mean_itl_ms"] == pytest.approx((100 + 300 + 300 + 300) / 4)
    assert figures["concurrency"] == pytest.approx((0.9 + 1.1) / 2.0)
    assert figures["median_ttft_ms"] == pytest.approx(500)


def test_percentiles_match_their_definition() -> None:
    values = [random.Random(5).random() for _ in range(101)]
    figures = metrics.percentiles("x", values)
    assert figures["p90_x_ms"] == pytest.approx(sorted(values)[90] * 1000)
    assert figures["median_x_ms"] == pytest.approx(sorted(values)[50] * 1000)


def gaps(texts: list[str], output_len: int, count: Callable[[str], int] | None) -> list[float]:
    """The gaps of chunks that arrive half a second apart without a token count."""
    chunks = [Chunk(0.5 * i, text, None) for i, text in enumerate(texts)]
    record = RequestRecord(prompt_len=1, output_len=output_len, chunks=chunks)
    metrics.count_chunks(record, count)
    return metrics.spread_itl(record)


def words(text: str) -> int:
    return len(text.split())


def test_chunk_gaps_are_split_by_tokens_of_text() -> None:
    texts = ["a", "b c d e f", "g"]
    assert gaps(texts, 7, words) == pytest.approx([0.1] * 5 + [0.5])
    assert gaps(texts, 7, None) == pytest.approx([0.1] * 5 + [0.5]), "by characters if there is no tokenizer"
    assert gaps(texts, 3, words) == pytest.approx([0.5, 0.5]), "as many chunks as tokens: one token each"


@pytest.mark.parametrize("seed", range(10))
def test_split_tokens_add_up_to_the_answer(seed: int) -> None:
    rng = random.Random(seed)
    texts = ["x " * rng.randint(0, 6) for _ in range(rng.randint(2, 30))] + ["x x "]
    output_len = len(texts) + rng.randint(0, 60)
    record = RequestRecord(prompt_len=1, output_len=output_len, chunks=[Chunk(float(i), text, None) for i, text in enumerate(texts)])
    metrics.count_chunks(record, words)
    assert sum(chunk.tokens or 0 for chunk in record.chunks) == output_len
    assert min(chunk.tokens or 0 for chunk in record.chunks) >= 1


def test_goodput_counts_requests_within_all_limits() -> None:
    records = [finished([0.0, 0.1]), finished([0.0, 0.9])]
    assert metrics.summarize(records, 1.0, {"ttft": 501, "tpot": 200})["request_goodput"] == 1.0
    assert metrics.summarize(records, 1.0, {"ttft": 400})["request_goodput"] == 0.0
    assert metrics.summarize(records, 1.0)["request_goodput"] is None


@pytest.mark.parametrize("bad", ["ttft", "speed:3", "tpot:x", "e2el:-1", "ttft:nan"])
def test_malformed_goodput_limits_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="--goodput"):
        metrics.parse_goodput([bad])


def test_tokens_are_counted_in_their_second() -> None:
    timeline = metrics.per_second([finished([0.0, 0.1, 1.0]), finished([0.0], start=1.0)])
    assert timeline.tokens == [2, 2]
    assert timeline.requests == [1, 2]


def test_requests_one_after_another_are_not_concurrent() -> None:
    closed_loop = [finished([0.0], start=0.1 * i, ttft=0.09) for i in range(25)]
    assert metrics.per_second(closed_loop).requests == [1, 1, 1]
    assert metrics.summarize(closed_loop, 2.5)["max_concurrent_requests"] == 1
    overlapping = [finished([0.0], start=at, ttft=1.0) for at in (0.0, 0.5, 1.2)]
    assert metrics.per_second(overlapping).requests == [2, 2, 1], "the second is open until 1.5, the third until 2.2"


def test_token_at_the_end_of_a_second_survives_rounding() -> None:
    first, ended = finished([0.0], start=8.479168751052146), 30.479168751052146
    last = finished([0.0], start=8.720086612211697, ttft=ended - 8.720086612211697)
    last.chunks[0].at = ended
    assert last.start + last.latency < ended, "the sum is one rounding step below the chunk's time"
    assert sum(metrics.per_second([first, last]).tokens) == 2


def test_missing_position_counts_come_from_server_totals() -> None:
    record = finished([0.0] * 5)
    record.verify_steps = 2
    before = {"spec_verify_steps_total": 100, "spec_accepted_tokens_total": 90, "spec_accepted_by_position": [60, 30]}
    after = {"spec_verify_steps_total": 102, "spec_accepted_tokens_total": 93, "spec_accepted_by_position": [62, 31]}
    figures = metrics.acceptance([record], before, {**after, "per_position_acceptance": [0.6, 0.3]})
    assert (figures["accept_length"], figures["per_position_acceptance"]) == (2.0, [1.0, 0.5])


def test_acceptance_by_position_is_of_what_was_drafted() -> None:
    """By answers, and by the server's totals."""
    record = finished([0.0] * 7)
    record.verify_steps, record.accepted_by_position, record.drafted_by_position = 4, [3, 1, 0], [4, 2, 0]
    assert metrics.acceptance([record], None, None)["per_position_acceptance"] == [0.75, 0.5, None]
    name = ("spec_verify_steps_total", "spec_accepted_tokens_total", "spec_accepted_by_position", "spec_drafted_by_position")
    before, after = (dict(zip(name, values, strict=True)) for values in ((9, 9, [9, 0, 0], [9, 9, 0]), (19, 16, [14, 2, 0], [19, 13, 0])))
    figures = metrics.acceptance([], before, after)
    assert figures["per_position_acceptance"] == [0.5, 0.5, None]
    rest = {"interrupted": False, "backend": "talon", "request_rate": 1.0, "max_concurrency": 1, "total_output_tokens_retokenized": 7}
    shown = summary.render(metrics.summarize([record], 1.0, None) | figures | rest)
    assert " 0.500 0.500 -\n" in shown


def test_acceptance_by_context_is_of_the_run() -> None:
    name = "spec_steps_and_accepted_by_context"
    before, after = {name: {"0": [10, 30], "1024": [4, 4]}}, {name: {"0": [30, 40], "1024": [4, 4], "4096": [2, 4]}}
    after |= {"spec_accept_length_by_context": {"0": 9.0}}
    assert metrics.acceptance([], before, after)["accept_length_by_context"] == {"0": 1.5, "4096": 3.0}
    assert metrics.acceptance([], after, after)["accept_length_by_context"] is None


def test_acceptance_uses_answers_if_all_report_it() -> None:
    told = [finished([0.0] * 7), finished([0.0] * 5)]
    for record, steps, accepted in zip(told, (3, 2), ([3, 1], [1, 1]), strict=True):
        record.verify_steps, record.accepted_by_position = steps, accepted
    info = {"internal_states": [{"avg_spec_accept_length": 9.0}], "padding_waste": 0.25}
    figures = metrics.acceptance(told, None, info)
    assert figures["accept_length"] == pytest.approx((6 + 4) / 5)
    assert figures["per_position_acceptance"] == pytest.approx([4 / 5, 2 / 5])
    assert figures["padding_waste"] == 0.25
    told[0].output_len += 40  # from steps without drafts
    assert metrics.acceptance(told, None, info)["accept_length"] == pytest.approx((7 + 4) / 5)
    told[1].verify_steps = 0
    assert metrics.acceptance(told, None, info)["accept_length"] == 9.0
    assert metrics.acceptance([], None, None)["accept_length"] is None


def test_server_totals_exclude_steps_before_the_run() -> None:
    def info(scale: int, **means: float) -> dict[str, Any]:
        totals = {"spec_verify_steps_total": 10, "spec_accepted_tokens_total": 15, "spec_accepted_by_position": [8, 7]}
        totals |= {"spec_depth_steps_total": {"0": 2 * scale, "3": 10 * scale, "5": 4}}  # scaled already
        totals |= {"decode_steps": 12, "graph_steps_total": 9, "live_rows_total": 30, "padded_rows_total": 10}
        scaled = {k: [n * scale for n in v] if isinstance(v, list) else v if isinstance(v, dict) else v * scale for k, v in totals.items()}
        return {"internal_states": [{**scaled, **means}]}

    figures = metrics.acceptance([], info(3), info(5, avg_spec_accept_length=9.0))
    assert figures["accept_length"] == pytest.approx(1 + 30 / 20)
    assert figures["per_position_acceptance"] == pytest.approx([0.8, 0.7])
    assert figures["graph_hit_rate"] == pytest.approx(0.75)
    assert figures["padding_waste"] == pytest.approx(0.25)
    assert figures["steps_by_depth"] == {"0": 4, "3": 20}
    idle = metrics.acceptance([], info(3), info(3, avg_spec_accept_length=9.0, graph_hit_rate=1.0, padding_waste=0.5))
    assert [idle[name] for name in ("accept_length", "per_position_acceptance", "graph_hit_rate", "padding_waste")] == [None] * 4


def test_failures_are_grouped_by_error() -> None:
    records = [RequestRecord(prompt_len=1, error=error) for error in ("b", "a", "b", "")]
    assert summary.failures(records) == "2 x b\n1 x a"
    many = [RequestRecord(prompt_len=1, error=str(i)) for i in range(9)]
    assert "and 4 other errors" in summary.failures(many)


def test_chart_of_a_long_run_stays_short() -> None:
    assert len(summary.chart("tokens", list(range(1000))).split("\n")) <= 25


def test_client_loads_neither_torch_nor_the_engine(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, runtime.bench_serving; "
        "bad = [m for m in sys.modules if m.split('.')[0] == 'torch' or (m.startswith('runtime.') and not "
        "m.startswith(('runtime.bench', 'runtime.version')))]; "
        "sys.exit(str(bad) if bad else 0)"
    )
    python = Path(__file__).resolve().parents[2] / "python"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(python), "PATH": ""}, timeout=60
    )
    assert done.returncode == 0, done.stderr
