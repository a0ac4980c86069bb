"""Endpoints that routers, dashboards, evaluation tools and browsers use beside the API itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from front import IM_END, TEMPLATE, ScriptedScheduler, front

from event_loop import in_event_loop
from runtime.config.flag_parser import from_fields
from runtime.config.resolve import check
from runtime.errors import ConfigError
from runtime.managers.telemetry.scheduler_stats import GroupLoad, SchedulerStats
from runtime.managers.telemetry.spec_stats import SpecStats

BUSY = SchedulerStats(
    num_running_reqs=4,
    num_queue_reqs=2,
    num_used_tokens=300,
    pages_total=100,
    pages_free=75,
    spec_by_context={"0": SpecStats(4, 12, 8, [4, 3, 1])},
)
ORIGIN = "https://app.example"


@in_event_loop
async def test_the_load_of_attention_groups_is_reported_one_by_one() -> None:
    grouped = SchedulerStats(num_running_reqs=3, num_queue_reqs=1, groups=[GroupLoad(3, 0, 40), GroupLoad(0, 1, 0)])
    async with front(ScriptedScheduler(stats=grouped)) as f:
        first, second = (await f.client.get("/get_load")).json()
        assert first == {"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 0, "num_tokens": 40}
        assert second == {"dp_rank": 1, "num_reqs": 1, "num_waiting_reqs": 1, "num_tokens": 0}
        first, second = (await f.client.get("/v1/loads")).json()["loads"]
        assert (first["dp_rank"], first["num_running_reqs"], first["num_used_tokens"]) == (0, 3, 40)
        assert (first["max_running_requests"], first["utilization"]) == (8, 3 / 8)
        assert (second["dp_rank"], second["queues"]) == (1, {"waiting": 1})
        (only,) = (await f.client.get("/v1/loads?dp_rank=1")).json()["loads"]
        assert only["dp_rank"] == 1
        assert (await f.client.get("/v1/loads?dp_rank=2")).status_code == 400
        text = (await f.client.get("/v1/loads?format=prometheus")).text
        assert text.count("# TYPE sglang_num_running_reqs gauge") == 1
        assert 'sglang_num_running_reqs{dp_rank="1"} 0' in text


@in_event_loop
async def test_load_is_reported_to_routers() -> None:
    async with front(ScriptedScheduler(stats=BUSY)) as f:
        load = (await f.client.get("/get_load")).json()
        assert load == [{"dp_rank": 0, "num_reqs": 6, "num_waiting_reqs": 2, "num_tokens": 300}]
        answer = (await f.client.get("/v1/loads")).json()
        assert (answer["num_accelerators"], answer["accelerator"], answer["tp_size"]) == (0, None, 1)
        one = answer["loads"][0]
        assert (one["num_running_reqs"], one["num_waiting_reqs"], one["token_usage"], one["utilization"]) == (4, 2, 0.25, 0.5)
        assert one["speculative"] == {"accept_length": 3.0, "accept_rate": 8 / 12}
        assert one["queues"] == {"waiting": 2, "retracted": 0}
        assert "queues" not in (await f.client.get("/v1/loads?include=core,spec")).json()["loads"][0]
        text = (await f.client.get("/v1/loads?format=prometheus")).text
        assert 'sglang_num_running_reqs{dp_rank="0"} 4' in text
        assert 'sglang_spec_accept_length{dp_rank="0"} 3.0' in text
        for query in ("include=everything", "format=xml", "dp_rank=1"):
            assert (await f.client.get(f"/v1/loads?{query}")).status_code == 400, query


@in_event_loop
async def test_a_remote_tokenizer_finds_its_tokens_and_template() -> None:
    async with front() as f:
        info = (await f.client.get("/tokenizer_info")).json()
        assert (info["eos_token"], info["bos_token"], info["eos_token_ids"]) == ("<|im_end|>", None, [IM_END])
        assert info["chat_template"] == TEMPLATE
        tokens = (await f.post("/tokenize", {"prompt": "abc", "add_special_tokens": False})).json()["tokens"]
        assert (await f.post("/v1/detokenize", {"tokens": tokens})).json() == {"text": "abc", "prompt": "abc"}


@in_event_loop
async def test_a_remote_tokenizer_learns_all_ids_that_end_a_text() -> None:
    async with front() as f:
        f.manager.model_config = replace(f.manager.model_config, eos_ids=(7, IM_END, 5))
        assert (await f.client.get("/tokenizer_info")).json()["eos_token_ids"] == [IM_END, 7, 5]


@in_event_loop
async def test_a_conversation_of_any_length_is_tokenised_as_a_chat_renders_it() -> None:
    async with front(template=TEMPLATE + "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ reasoning_effort }}") as f:
        tools = [{"type": "function", "function": {"name": "weather"}}]
        chat = {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": tools,
            "reasoning_effort": "low",
            "add_generation_prompt": False,
        }
        assert (await f.post("/v1/chat/completions", chat)).status_code == 200
        tokens = (await f.post("/tokenize", chat)).json()["tokens"]
        assert tokens == f.scheduler.requests[0].input_ids
        assert bytes(token for token in tokens if token < 256).endswith(b"weatherlow")
        assert (await f.post("/tokenize", {**chat, "tool_choice": {"type": "function"}})).json()["error"]["param"] == "tool_choice.function"
        long = {"messages": [{"role": "user", "content": "x" * 4096}]}
        counted = await f.post("/v1/messages/count_tokens", long)
        assert (await f.post("/tokenize", long)).json()["count"] == counted.json()["input_tokens"] > 4096
        assert (await f.post("/v1/chat/completions", long)).json()["error"]["code"] == "context_length_exceeded"


@in_event_loop
async def test_pages_of_allowed_origins_may_use_the_api() -> None:
    preflight = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with front(allow_origins=(ORIGIN,), api_key="k") as f:
        allowed = await f.client.options("/v1/chat/completions", headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        answer = await f.client.get("/v1/models", headers={"origin": ORIGIN})
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        refused = await f.client.get("/v1/models", headers={"origin": ORIGIN, "authorization": "Bearer x"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
        other = await f.client.options("/v1/chat/completions", headers={**preflight, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
    async with front() as f:
        assert "access-control-allow-origin" not in (await f.client.get("/v1/models", headers={"origin": ORIGIN})).headers


@pytest.mark.parametrize("origin", ["app.example", "https://a.example/path", "https://a b", "null"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allow-origins"):
        check(from_fields({"allow_origins": origin}))
    check(from_fields({"allow_origins": "*"}))


@pytest.mark.parametrize("host", ["https://own.example", "own.example:30000", "*.example", "own.example, a/b"])
def test_what_no_host_name_equals_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-hosts .* is not a host name"):
        check(from_fields({"allowed_hosts": host}))
    for hosts in ("*", "own.example, 10.0.0.7"):
        check(from_fields({"allowed_hosts": hosts}))


def test_metrics_are_protected_only_with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TALON_API_KEY", raising=False)
    for other in ({}, {"admin_api_key": "a"}):
        with pytest.raises(ConfigError, match="--protect-metrics has no effect without keys"):
            check(from_fields({"protect_metrics": True, **other}))
    check(from_fields({"protect_metrics": True, "api_key": "k"}))
    monkeypatch.setenv("TALON_API_KEY", "k")
    check(from_fields({"protect_metrics": True}))
