"""Structured output of the default server: the embedded model with its own draft, over HTTP."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake
import httpx
import jsonschema
import psutil
import pytest
from benchmark.hostile_grammars import HOSTILE

from conftest import Embedded
from unit.small_tokenizer import write_small_tokenizer
from warm_start import cold_start

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["France", "Italy"]}, "size": {"type": "integer"}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Name a city and its country as JSON."}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}


def chat(embedded: Embedded, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{embedded.url}/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 96, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_answer_satisfies_its_schema_whole_streamed_and_several_times(embedded: Embedded) -> None:
    whole = chat(embedded, response_format=FORMAT, temperature=0, logprobs=True, top_logprobs=3)["choices"][0]
    assert whole["finish_reason"] == "stop"
    jsonschema.validate(json.loads(whole["message"]["content"]), SCHEMA)
    assert all(entry["logprob"] <= 0 for entry in whole["logprobs"]["content"])
    body = {"messages": QUESTION, "max_tokens": 96, "response_format": FORMAT, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{embedded.url}/v1/chat/completions", json=body, timeout=60) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
    deltas = [choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(deltas) == whole["message"]["content"]
    several = chat(embedded, response_format=FORMAT, temperature=1, seed=5, n=3)["choices"]
    for choice in several:
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert any(choice["finish_reason"] == "stop" for choice in several)


def test_a_stop_string_inside_json_ends_the_text_before_it(embedded: Embedded) -> None:
    whole = chat(embedded, response_format=FORMAT, temperature=0)["choices"][0]["message"]["content"]
    cut = chat(embedded, response_format=FORMAT, temperature=0, stop=['"country"'])["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["message"]["content"] == whole[: whole.index('"country"')]


def test_a_regex_holds_on_the_native_endpoint(embedded: Embedded) -> None:
    sampling = {"regex": "(yes|no), [a-z]{3,8}", "max_new_tokens": 24, "temperature": 1.0}
    answers = httpx.post(f"{embedded.url}/generate", json={"text": ["Is it?", "Or not?"], "sampling_params": sampling}, timeout=60).json()
    assert all(re.fullmatch("(yes|no), [a-z]{3,8}", answer["text"]) for answer in answers)


def processes(server: Embedded | fake.Server) -> dict[str, psutil.Process]:
    """The processes of the server by title."""
    return {process.cmdline()[0].strip(): process for process in psutil.Process(server.process.pid).children(recursive=True)}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE)
def test_hostile_grammars_are_refused_while_others_stream(embedded: Embedded, fields: dict[str, Any]) -> None:
    streaming = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "ignore_eos": True, "stream": True}
    before = processes(embedded)["talon::scheduler"].pid
    with httpx.stream("POST", f"{embedded.url}/v1/completions", json=streaming, timeout=60) as stream:
        events = (line for line in stream.iter_lines() if line.startswith("data: {"))
        next(events)
        for _ in range(2):
            refused = httpx.post(f"{embedded.url}/v1/completions", json={"prompt": "x", "max_tokens": 64, **fields}, timeout=60)
            assert refused.status_code == 400, refused.text
            assert re.search("cannot be used|must be|grammar", refused.json()["error"]["message"])
        assert json.loads([*events][-1].removeprefix("data: "))["choices"][0]["finish_reason"] == "length", "the stream goes on"
    embedded.quiet()
    assert processes(embedded)["talon::scheduler"].pid == before


@pytest.fixture
def small(tmp_path: Path) -> Iterator[fake.Server]:
    """A server without a model, which compiles grammars for a small vocabulary. Its processes start as a user's do."""
    with cold_start(), fake.serving(write_small_tokenizer(fake.dummy_model(tmp_path / "model"))) as server:
        yield server


def test_no_process_is_left_behind_when_the_scheduler_is_killed_in_a_trial(small: fake.Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        body = {"prompt": "x", "max_tokens": 8}
        assert httpx.post(f"{small.url}/v1/completions", json={**body, "regex": "ab"}, timeout=60).status_code == 200
        family = processes(small)
        trying = pool.submit(httpx.post, f"{small.url}/v1/completions", json={**body, "regex": "a?" * 20_000}, timeout=60)
        deadline = time.monotonic() + 30
        while not (forks := family["talon::grammars"].children()) and time.monotonic() < deadline:
            time.sleep(0.001)
        family["talon::scheduler"].kill()
        assert not psutil.wait_procs([*family.values(), *forks], timeout=30)[1]
        with contextlib.suppress(httpx.HTTPError):
            assert trying.result().status_code >= 500


def test_no_process_is_left_behind_after_a_shutdown(small: fake.Server) -> None:
    body = {"prompt": "x", "max_tokens": 8, "regex": "ab"}
    assert httpx.post(f"{small.url}/v1/completions", json=body, timeout=60).status_code == 200
    family = processes(small)
    assert set(family) == {"talon::scheduler", "talon::detokenizer", "talon::grammars"}
    small.process.send_signal(signal.SIGTERM)
    assert not psutil.wait_procs(list(family.values()), timeout=30)[1]
