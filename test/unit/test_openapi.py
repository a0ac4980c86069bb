"""/openapi.json is valid, lists every documented field with its bounds, and every status code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from front import ScriptedScheduler, front, make_manager
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from event_loop import in_event_loop
from runtime.entrypoints.server.openapi import up_to
from runtime.entrypoints.server.server import create_app

HI = [{"role": "user", "content": "hi"}]
CALL = {"function": {"name": "f"}}

CHAT = """add_generation_prompt cache_salt chat_template_kwargs continue_final_message frequency_penalty ignore_eos logit_bias logprobs
max_completion_tokens max_tokens messages min_p min_tokens model n presence_penalty priority repetition_penalty
return_cached_tokens_details return_spec_tokens_details return_token_ids
seed skip_special_tokens speculative_num_steps stop stop_token_ids stream stream_options temperature top_k top_logprobs top_p
user cache_control prompt_cache_retention stream_reasoning
background client_metadata conversation_id custom_labels external_trace_header log_metrics no_logs prompt_cache_options routing_key
session_id stream_interval metadata store prompt_cache_key safety_identifier service_tier verbosity prediction rid separate_reasoning"""
TOOLS = "function_call functions parallel_tool_calls reasoning_effort tool_choice tools"
CONSTRAINED = "ebnf json_schema regex structural_tag"
OPENAI_CONSTRAINED = """guided_choice guided_decoding_backend guided_grammar guided_json guided_regex response_format
structured_outputs"""
CHAT = f"{CHAT} {CONSTRAINED} {OPENAI_CONSTRAINED}"
NOT_FOR_COMPLETIONS = """add_generation_prompt chat_template_kwargs continue_final_message max_completion_tokens messages top_logprobs"""
NATIVE = """text input_ids sampling_params rid stream return_logprob logprob_start_len top_logprobs_num
return_text_in_logprobs cache_salt priority model background conversation_id custom_labels external_trace_header log_metrics
no_logs routing_key"""
SHARED = """frequency_penalty ignore_eos logit_bias min_p presence_penalty repetition_penalty seed skip_special_tokens
speculative_num_steps stop stop_token_ids temperature top_k top_p"""
RESPONSE = """cache_salt chat_template_kwargs include input instructions max_output_tokens max_tool_calls metadata model
parallel_tool_calls previous_response_id priority prompt_cache_key prompt_cache_options prompt_cache_retention reasoning
safety_identifier service_tier store stream stream_options text tool_choice tools top_logprobs truncation user"""
MESSAGE = """cache_control context_management max_tokens messages metadata model output_config priority service_tier
stop_sequences stream system temperature thinking tool_choice tools top_k top_p"""
NOT_FOR_COUNTS = "max_tokens metadata priority service_tier stop_sequences stream temperature top_k top_p"
POOLING = "cache_salt model priority rid user"
TOKENIZE = """add_generation_prompt add_special_tokens chat_template_kwargs continue_final_message messages model prompt
reasoning_effort return_token_strs tool_choice tools"""
SAMPLING = """frequency_penalty ignore_eos logit_bias max_new_tokens min_new_tokens min_p n no_stop_trim presence_penalty
repetition_penalty sampling_seed seed skip_special_tokens speculative_num_steps stop stop_token_ids temperature top_k top_p"""
SAMPLING = f"{SAMPLING} {CONSTRAINED}"
UNBOUNDED = {"metadata", "prediction", "prompt_cache_key", "rid", "safety_identifier", "separate_reasoning", "service_tier"}
UNBOUNDED |= {"store", "user", "verbosity", "cache_control", "prompt_cache_retention", "stream_reasoning", "background"}
UNBOUNDED |= {"conversation_id", "custom_labels", "external_trace_header", "log_metrics", "no_logs", "routing_key"}
UNBOUNDED |= {"max_tool_calls", "prompt_cache_options", "context_management"}
UNBOUNDED |= {"guided_decoding_backend", "client_metadata", "session_id", "stream_interval"}


@pytest.fixture(scope="module")
def spec() -> Iterator[dict[str, Any]]:
    manager = make_manager(ScriptedScheduler())
    yield create_app(manager).openapi()
    manager.close()


def fields(spec: dict[str, Any], path: str) -> dict[str, Any]:
    """The properties of an endpoint's body."""
    reference = spec["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return spec["components"]["schemas"][reference.rpartition("/")[2]]["properties"]


def forms(spec: dict[str, Any], node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The alternatives of a schema, and those of its items and entries."""
    if "$ref" in node:
        node = spec["components"]["schemas"][node["$ref"].rpartition("/")[2]]
    for inner in node.get("anyOf", [node]):
        if inner is not node:
            yield from forms(spec, inner)
    if "anyOf" not in node:
        yield node
        for key in ("items", "additionalProperties"):
            if isinstance(node.get(key), dict):
                yield from forms(spec, node[key])


def test_it_is_openapi_3_1(spec: dict[str, Any]) -> None:
    assert spec["openapi"].startswith("3.1")
    OpenAPIV31SpecValidator(spec).validate()


def test_every_documented_field_has_a_type_and_every_number_bounds(spec: dict[str, Any]) -> None:
    completion = {*CHAT.split(), "best_of", "echo", "include_stop_str_in_output", "no_stop_trim", "prompt"}
    completion -= set(NOT_FOR_COMPLETIONS.split())
    expected = {
        "/v1/chat/completions": {*CHAT.split(), *TOOLS.split(), "chat_template"},
        "/v1/completions": completion,
        "/generate": set(NATIVE.split()),
        "/v1/responses": {*RESPONSE.split(), *SHARED.split(), *CONSTRAINED.split()},
        "/v1/messages": set(MESSAGE.split()),
        "/v1/messages/count_tokens": set(MESSAGE.split()) - set(NOT_FOR_COUNTS.split()),
        "/v1/embeddings": {*POOLING.split(), "dimensions", "encoding_format", "input"},
        "/v1/score": {*POOLING.split(), "apply_softmax", "item_first", "items", "label_token_ids", "query", "temperature"},
        "/tokenize": set(TOKENIZE.split()),
        "/rerank": {*POOLING.split(), "documents", "query", "return_documents", "top_n"},
        "/v1/rerank": {*POOLING.split(), "documents", "query", "return_documents", "top_n"},
    }
    for path, names in expected.items():
        found = fields(spec, path)
        assert set(found) == names
        for name in names - UNBOUNDED:
            check_bounds(spec, found[name], f"{path} {name}")
    sampling = spec["components"]["schemas"]["NativeSampling"]["properties"]
    assert set(sampling) == set(SAMPLING.split())
    for name, node in sampling.items():
        check_bounds(spec, node, name)


def test_fields_that_the_docs_list_as_without_effect_are_in_the_schema(spec: dict[str, Any]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    listed = text.partition("are accepted without effect: ")[2].partition("; outside of chats")[0]
    names = set(re.findall("`([a-z_]+)`", listed))
    assert {"conversation_id", "session_id", "background"} <= names
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert names <= set(fields(spec, path))


def check_bounds(spec: dict[str, Any], node: dict[str, Any], name: str) -> None:
    for form in forms(spec, node):
        assert "type" in form, name
        if form["type"] in ("integer", "number") and "chat_template_kwargs" not in name:
            assert "maximum" in form, name
            assert "minimum" in form or "exclusiveMinimum" in form, name


def test_endpoints_list_their_status_codes_and_content_types(spec: dict[str, Any]) -> None:
    for path, operations in spec["paths"].items():
        for operation in operations.values():
            statuses = set(operation["responses"])
            assert statuses >= {"200", "400", "401", "431", "500"}, path
            assert "422" not in statuses, path
            assert ("requestBody" in operation) <= (statuses >= {"408", "413", "503"}), path
    assert list(spec["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"):
        answer = spec["paths"][path]["post"]["responses"]
        assert {"429", "503"} <= set(answer)
        assert set(answer["200"]["content"]) == {"application/json", "text/event-stream"}
    (model,) = spec["paths"]["/v1/models/{model}"]["get"]["parameters"]
    assert (model["in"], model["name"], model["required"]) == ("path", "model", True)


def test_fields_that_may_be_left_out_may_be_null(spec: dict[str, Any]) -> None:
    for path in ("/v1/messages", "/v1/embeddings", "/detokenize"):
        reference = spec["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        body = spec["components"]["schemas"][reference.rpartition("/")[2]]
        for name, node in body["properties"].items():
            free = "description" in node and "anyOf" not in node  # any value is accepted without effect
            assert free or (name in body["required"]) != ({"type": "null"} in node.get("anyOf", [])), f"{path} {name}"


BODIES: list[tuple[str, bool, dict[str, Any]]] = [
    ("/v1/chat/completions", True, {"messages": HI, "stream_options": {}, "tools": [], "functions": None, "top_logprobs": None}),
    ("/v1/chat/completions", False, {"messages": HI, "stream_options": {"include_usage": False}}),
    ("/v1/chat/completions", False, {"messages": HI, "top_logprobs": 1}),
    ("/v1/chat/completions", True, {"messages": HI, "regex": "a", "response_format": {"type": "text"}}),
    ("/v1/chat/completions", False, {"messages": HI, "regex": "a", "json_schema": {}}),
    ("/v1/chat/completions", False, {"messages": HI, "response_format": {"type": "text", "json_schema": {"name": "a", "schema": "b"}}}),
    ("/v1/chat/completions", False, {"messages": HI, "structured_outputs": {"regex": "a", "json_object": True}}),
    ("/v1/chat/completions", False, {"messages": HI, "response_format": {"type": "json_schema"}}),
    ("/v1/chat/completions", False, {"messages": HI, "chat_template_kwargs": {"messages": 1}}),
    ("/v1/chat/completions", False, {"messages": HI, "chat_template_kwargs": {"a b": 1}}),
    ("/v1/chat/completions", False, {"messages": HI, "chat_template": "x"}),
    ("/v1/chat/completions", False, {"messages": [{"role": "user"}]}),
    ("/v1/chat/completions", False, {"messages": [{"role": "user", "content": "", "tool_calls": [CALL]}]}),
    ("/v1/chat/completions", True, {"messages": [{"role": "assistant", "tool_calls": [CALL]}, *HI]}),
    ("/v1/chat/completions", False, {"messages": HI, "max_tokens": 1 << 20}),
    ("/v1/chat/completions", False, {"messages": HI, "logit_bias": {"99999": 1}}),
    ("/v1/chat/completions", False, {"messages": HI, "logit_bias": {"a": 1}}),
    ("/v1/chat/completions", True, {"messages": HI, "logit_bias": {"007": 1}, "max_tokens": 2.0}),
    ("/v1/completions", False, {"prompt": "a", "max_tokens": 0}),
    ("/v1/completions", True, {"prompt": "a", "max_tokens": 0, "echo": True}),
    ("/v1/completions", False, {"prompt": [1 << 20]}),
    ("/v1/completions", False, {"prompt": "a", "priority": -9.3e18}),
    ("/v1/responses", False, {"input": "a", "tool_choice": "required"}),
    ("/v1/responses", False, {"input": [{"content": "a"}]}),
    ("/v1/responses", False, {"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}),
    ("/v1/responses", False, {"input": "a", "text": {"format": {"type": "json_schema"}}}),
    ("/v1/responses", False, {"input": "a", "reasoning": {"effort": "odd"}}),
    ("/v1/responses", False, {"input": "a", "tools": [{"type": "function", "name": "a b"}]}),
    ("/v1/messages", False, {"messages": HI, "max_tokens": 2, "tool_choice": {"type": "tool"}}),
    ("/v1/messages", False, {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}], "max_tokens": 2}),
    ("/generate", False, {}),
    ("/generate", False, {"text": "a", "input_ids": [1]}),
    ("/generate", True, {"text": "a", "input_ids": None, "sampling_params": {"max_new_tokens": 1}}),
    ("/tokenize", False, {"prompt": "a", "messages": HI}),
    ("/tokenize", False, {"messages": HI, "continue_final_message": True, "add_generation_prompt": True}),
    ("/detokenize", False, {"tokens": [1 << 20]}),
    ("/abort_request", False, {"abort_all": False}),
    ("/abort_request", True, {"rid": "a"}),
    ("/set_internal_state", True, {"server_args": {}}),
    ("/set_internal_state", False, {"server_args": {"speculative_num_steps": 1}}),
    ("/v1/embeddings", False, {"input": "a", "dimensions": 1 << 20}),
    ("/v1/score", False, {"query": "a", "items": [[1]], "label_token_ids": [1]}),
    ("/v1/score", False, {"query": "", "items": [""], "label_token_ids": [1]}),
    ("/v1/score", True, {"query": "a", "items": "b", "label_token_ids": [1], "temperature": None}),
]


@in_event_loop
async def test_the_schema_accepts_and_refuses_what_the_server_does() -> None:
    async with front() as f:
        spec = (await f.client.get("/openapi.json")).json()
        for path, good, body in BODIES:
            content = spec["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            validator = Draft202012Validator({**content, "components": spec["components"]})
            assert validator.is_valid(body) == good, (path, body)
            answer = await f.client.post(path, json=body)
            assert (answer.status_code != 400) == good, (path, body, answer.text)


def test_numbers_in_a_pattern_end_at_the_limit() -> None:
    for highest in (0, 5, 9, 10, 19, 99, 100, 1023, 49151):
        pattern = re.compile(f"0*({up_to(highest)})")
        for number in range(highest + 200):
            assert bool(pattern.fullmatch(str(number))) == (number <= highest)


def test_int64_bounds_are_exact(spec: dict[str, Any]) -> None:
    (priority, _) = fields(spec, "/v1/embeddings")["priority"]["anyOf"]
    assert (priority["minimum"], priority["maximum"]) == (-(2**63), 2**63 - 1)


def test_operations_with_get_and_post_list_both(spec: dict[str, Any]) -> None:
    for path in ("/flush_cache", "/start_profile", "/stop_profile"):
        assert set(spec["paths"][path]) == {"get", "post"}
    assert not spec["paths"]["/start_profile"]["post"]["requestBody"]["required"]


@in_event_loop
async def test_both_messages_about_the_output_length_name_the_context() -> None:
    async with front() as f:
        longest = f.manager.max_context_len
        for tokens, bound in ((0, f"between 1 and {longest}"), (longest + 1, f"at most {longest}")):
            answer = await f.client.post("/v1/chat/completions", json={"messages": HI, "max_tokens": tokens})
            assert bound in answer.json()["error"]["message"]
