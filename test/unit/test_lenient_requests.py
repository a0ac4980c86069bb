"""Requests of other servers' clients: what changes nothing is accepted, and answers carry what these clients look for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from front import IM_END, VOCAB, ScriptedScheduler, front
from openai import AsyncOpenAI, BadRequestError

from event_loop import in_event_loop
from runtime.config.flag_parser import from_fields
from runtime.config.model_facts import ModelFacts
from runtime.config.served_model import resolve_served_model
from runtime.entrypoints.http import body_route
from runtime.entrypoints.http.body_schema import BodySchema
from runtime.entrypoints.openai.protocol import CompletionBody
from runtime.errors import CompilerBusy, NeverFits, QueueFull, QueueTimeout, RequestTimeout, StepFailed
from runtime.managers.messages import CallFailed
from runtime.managers.remote_errors import call_failure, request_failure
from runtime.managers.replies import failure

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
ROUTER_CHAT = {
    "model": "tiny", "messages": HI, "no_stop_trim": False, "separate_reasoning": True, "stream_reasoning": True,
    "return_hidden_states": False, "ignore_eos": False, "continue_final_message": False, "skip_special_tokens": True,
}  # fmt: skip
"""A chat as sglang-router 0.3.2 forwards it."""
ROUTER_GENERATE = {
    "text": "hi", "model": None, "log_metrics": True, "background": False, "no_logs": False, "return_bytes": False,
    "return_entropy": False, "return_hidden_states": False, "lora_path": None, "stream": False,
}  # fmt: skip
FRONT_END = {
    "text": "hi",
    "sampling_params": {
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "max_new_tokens": 8, "min_new_tokens": 0, "n": 1, "stop": [],
        "stop_token_ids": [], "stop_regex": [], "temperature": 0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "ignore_eos": False, "regex": None, "json_schema": None,
    },
}  # fmt: skip
"""A call of gen() in SGLang's front-end language."""
BENCH = {
    "text": "hi", "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}, "stream": True, "lora_path": "",
    "return_logprob": False, "return_routed_experts": False, "logprob_start_len": -1,
}  # fmt: skip
OPENAI = {
    "messages": HI, "prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "u", "metadata": {"a": "b"},
    "store": True, "service_tier": "auto", "verbosity": "low", "prediction": {"type": "content", "content": "x"},
    "cache_control": {"type": "ephemeral"}, "reasoning_effort": "none", "tools": [], "parallel_tool_calls": False, "user": "u",
}  # fmt: skip
SGLANG = {
    "messages": HI,
    "rid": "r",
    "priority": 3,
    "lora_path": None,
    "routed_dp_rank": 0,
    "return_meta_info": False,
    "session_id": "s",
    "routed_experts_start_len": 0,
    "use_beam_search": False,
    "some_new_field": None,
}
SGLANG_NATIVE = {
    "text": "hi", "sampling_params": {"max_new_tokens": 2, "stream_interval": 1, "beam_width": 1}, "mm_hashes": ["x"], "session_id": "s",
    "return_flat_raw_top_logprobs": False, "video_config": {"fps": 1}, "received_time": 0.5,
}  # fmt: skip
PER_PROMPT = {
    "text": ["a", "b"], "lora_path": [None, None], "return_hidden_states": [False, False], "token_ids_logprob": [None, []],
    "image_data": [None, None],
}  # fmt: skip
"""Fields that SGLang takes once per prompt too."""
CACHED_PART = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]


ACCEPTED = [
    (CHAT, ROUTER_CHAT), ("/generate", ROUTER_GENERATE), ("/generate", FRONT_END), ("/generate", BENCH), ("/generate", SGLANG_NATIVE),
    (CHAT, OPENAI), (CHAT, SGLANG),
    (CHAT, {"messages": [{"role": "user", "content": CACHED_PART, "cache_control": {"type": "ephemeral"}}]}),
    ("/v1/completions", {"prompt": "x", "return_cached_tokens_details": True, "best_of": 1, "ignore_eos": False}),
    ("/v1/completions", {"prompt": "x", "suffix": "", "tool_choice": "auto", "background": False}),
    (CHAT, {"messages": HI, "top_logprobs": 0, "background": False, "conversation_id": "c"}),
    ("/generate", PER_PROMPT),
    ("/generate", {"text": "x", "store": True, "metadata": {"a": "b"}, "user": "u", "prompt_cache_key": "k"}),
]  # fmt: skip
"""Paths and bodies."""


@in_event_loop
async def test_fields_that_change_nothing_are_accepted() -> None:
    async with front(strict_request_fields=True) as f:
        for path, body in ACCEPTED:
            answer = await f.post(path, body)
            assert answer.status_code == 200, (path, body, answer.text)


def test_the_names_of_unknown_fields_are_looked_up_no_further_than_they_are_shown() -> None:
    class Endless(BodySchema):
        def unknown(self, value: object, node: Any = None, path: str = "") -> Iterator[str]:
            return map(str, count())

    assert len(body_route._unknown(Endless(CompletionBody), {})) == body_route.MAX_NAMED


@in_event_loop
async def test_strict_request_fields_refuses_unknown_fields() -> None:
    async with front(strict_request_fields=True) as f:
        refused = await f.post(CHAT, {"messages": HI, "temprature": 1, "stream_options": {"usage": True}})
        assert refused.status_code == 400
        assert refused.json()["error"] == {
            "message": "Unknown request fields: temprature, stream_options.usage. Correct or remove them.",
            "type": "invalid_request_error", "param": "temprature", "code": "unknown_parameter", "status": 400,
        }  # fmt: skip
        assert not f.scheduler.requests
        assert await f.fine()


@in_event_loop
async def test_the_model_is_found_under_its_other_names() -> None:
    facts = ModelFacts(
        path="/cache/snapshots/abc", load_format="safetensors", tokenizer_path="", name="org/Some-Model", dtype="float32",
        max_context_len=64, head_dim=8,
    )  # fmt: skip
    aliases = resolve_served_model(from_fields({"model_path": "./models/Some-Model/", "served_model_name": "mine"}), "cpu", facts).aliases
    assert aliases == ("default", "unknown", "org/Some-Model", "./models/Some-Model", "/cache/snapshots/abc", "Some-Model", "abc")
    async with front(aliases=aliases) as f:
        for name in ("tiny", "default", "", None, "./models/Some-Model/", "./models/Some-Model", "Some-Model"):
            answer = await f.post(CHAT, {"messages": HI, "model": name})
            assert answer.status_code == 200, name
            assert answer.json()["model"] == "tiny"
            assert (await f.post("/generate", {"text": "x", "model": name})).status_code == 200
        for path, body in ((CHAT, {"messages": HI}), ("/generate", {"text": "x"})):
            answer = await f.post(path, {**body, "model": "Other-Model"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@in_event_loop
async def test_max_new_tokens_0_reads_the_prompt_and_generates_nothing() -> None:
    prompt_only = {"text": ["ab", "cd"], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    async with front() as f:
        for output in (await f.post("/generate", prompt_only)).json():
            assert (output["text"], output["output_ids"]) == ("", [])
            meta = output["meta_info"]
            assert meta["finish_reason"] == {"type": "length", "length": 0}
            assert (meta["prompt_tokens"], meta["completion_tokens"]) == (2, 0)
            assert len(meta["input_token_logprobs"]) == 2
            assert meta["output_token_logprobs"] == []
        assert [request.sampling.max_new_tokens for request in f.scheduler.requests] == [1, 1]
        stream = await f.events("/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 0}, "stream": True})
        assert stream[0]["output_ids"] == []
        await f.post("/v1/completions", {"prompt": "ab", "max_tokens": 0, "echo": True})
        figures = (await f.client.get("/metrics")).text
        assert re.findall(r"^sglang:generation_tokens_total.* (\S+)$", figures, re.MULTILINE) == ["0.0"]


@in_event_loop
async def test_matched_stop_names_what_ended_the_output() -> None:
    async with front() as f:
        for path, body in ((CHAT, {"messages": HI}), ("/v1/completions", {"prompt": "x", "max_tokens": 50})):
            assert (await f.post(path, body)).json()["choices"][0]["matched_stop"] == IM_END
            assert (await f.post(path, {**body, "max_tokens": 2})).json()["choices"][0]["matched_stop"] is None
            chunks = await f.events(path, {**body, "stream": True})
            assert chunks[-2]["choices"][0]["matched_stop"] == IM_END


@in_event_loop
async def test_every_answer_has_a_request_id() -> None:
    async with front(api_key="k") as f:
        for path, headers in (("/health", {}), ("/v1/models", {}), ("/nope", {}), ("/v1/models", {"authorization": "Bearer x"})):
            first, second = [(await f.client.get(path, headers=headers)).headers["x-request-id"] for _ in range(2)]
            assert re.fullmatch("req_[0-9a-f]{32}", first)
            assert first != second
        given = await f.client.get("/health", headers={"x-request-id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"
        assert (await f.client.get("/health", headers={"x-request-id": "a b" + "x" * 200})).headers["x-request-id"].startswith("req_")
        async with f.client.stream("POST", CHAT, json={"messages": HI, "stream": True}) as stream:
            assert stream.headers["x-request-id"].startswith("req_")


@in_event_loop
async def test_errors_carry_openais_codes() -> None:
    async with front() as f:
        for body, status, code in (
            ({"messages": [{"role": "user", "content": "x" * 400}]}, 400, "context_length_exceeded"),
            ({}, 400, "missing_required_parameter"),
            ({"messages": HI, "temperature": 300}, 400, "invalid_value"),
            ({"messages": HI, "no_stop_trim": True}, 400, "unsupported_parameter"),
            ({"messages": HI, "model": "gpt-9"}, 404, "model_not_found"),
            ({"messages": HI, "logit_bias": {str(VOCAB): 1}}, 400, "invalid_value"),
        ):
            answer = await f.post(CHAT, body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        for path, body, param in (
            (CHAT, {"messages": [{"role": "user", "content": "x" * 400}]}, "messages"),
            (CHAT, {"messages": [{"role": "user", "content": "x" * 400_000}]}, "messages"),
            ("/v1/responses", {"input": "x" * 400}, "input"),
            ("/v1/completions", {"prompt": "x" * 400}, "prompt"),
            ("/generate", {"text": "x" * 400}, "text"),
        ):
            error = (await f.post(path, body)).json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", param), error
        for headers, status in (({"content-type": "text/plain"}, 415), ({"origin": "https://evil.example"}, 403)):
            answer = await f.client.post(CHAT, content=b"{}", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, None)
        client = AsyncOpenAI(base_url=f"http://127.0.0.1:{f.port}/v1", api_key="none", max_retries=0)
        with pytest.raises(BadRequestError, match="maximum context length is 256 tokens") as caught:
            await client.completions.create(model="tiny", prompt="x" * 400)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.request_id is not None
        await client.close()
    async with front(api_key="k") as f:
        answer = await f.client.get("/v1/models", headers={"authorization": "Bearer x"})
        assert answer.json()["error"]["code"] == "invalid_api_key"
    async with front(ScriptedScheduler(hold=0), max_running_requests=1) as f:
        f.manager.health.draining = True
        answer = await f.post(CHAT, {"messages": HI})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")


def test_errors_of_the_scheduler_keep_their_codes() -> None:
    for error in (NeverFits(9, 4), QueueFull(4), QueueTimeout(1.0), RequestTimeout(1.0), CompilerBusy(), StepFailed("no")):
        received = request_failure(failure(error))
        assert (received.status, received.code, str(received)) == (error.status, error.code, str(error))
        assert (error.code == "internal_error") == (error.status == 500)
    assert call_failure(CallFailed(message="busy", status=409, code="cache_busy")).code == "cache_busy"
