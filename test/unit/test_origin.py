"""Requests that a web page of another site made a browser send are refused."""

from __future__ import annotations

from typing import Any

import pytest
from front import ScriptedScheduler, front

from event_loop import in_event_loop
from runtime.entrypoints.http.request_names import address_name

PROMPT = {"prompt": "x"}


async def answers(requests: list[tuple[str, str, dict[str, str]]], **config: Any) -> list[int]:
    """The statuses of requests: method, path, headers. POSTs carry a prompt."""
    async with front(**config) as f:
        body = b'{"prompt": "x"}'
        return [
            (await f.client.request(method, path, headers=headers, content=body if method == "POST" else None)).status_code
            for method, path, headers in requests
        ]


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:30000", "localhost", "LOCALHOST:1", "[::1]:5", "10.0.0.7", "talon:30000", "talon.default.svc", "a.local", "own.example"],
)
@in_event_loop
async def test_names_of_the_server_are_accepted(host: str) -> None:
    assert await answers([("GET", "/get_server_info", {"Host": host})], allowed_hosts=("own.example",)) == [200]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:30000", "127.0.0.1.evil.example", "localhost.evil.example", "[::1].evil.example"]
)
@in_event_loop
async def test_another_host_reads_nothing(host: str) -> None:
    requests = [("GET", "/get_server_info", {"Host": host}), ("POST", "/v1/completions", {"Host": host})]
    assert await answers(requests) == [403, 403]
    assert await answers(requests, allowed_hosts=("*",)) == [200, 200]
    assert await answers(requests, api_key="secret") == [200, 200], "a page does not know the key"


@in_event_loop
async def test_a_refused_host_is_allowed_by_its_name_without_a_port() -> None:
    async with front() as f:
        answer = await f.client.get("/get_server_info", headers={"Host": "own.example:30000"})
    assert answer.json()["error"]["message"].endswith("Add it, without a port, to --allowed-hosts.")
    assert await answers([("GET", "/get_server_info", {"Host": "own.example:30000"})], allowed_hosts=("own.example",)) == [200]


@in_event_loop
async def test_a_page_of_another_origin_writes_nothing() -> None:
    scheduler = ScriptedScheduler()
    evil, null = {"Origin": "https://evil.example"}, {"Origin": "null"}
    writes = [(method, "/abort_request", {**headers, "Content-Type": "text/plain"}) for method in ("POST",) for headers in (evil, null)]
    writes += [("POST", "/v1/completions", evil), ("POST", "/flush_cache", evil), ("GET", "/flush_cache", {"Sec-Fetch-Site": "cross-site"})]
    async with front(scheduler) as f:
        for method, path, headers in writes:
            answer = await f.client.request(method, path, headers=headers, content=b'{"abort_all": true}')
            assert answer.status_code == 403, (method, path)
            assert "--allow-origins" in answer.json()["error"]["message"]
        assert scheduler.calls == scheduler.aborted == scheduler.requests == []


@pytest.mark.parametrize("origin", ["http://[::1", "http://a]b", "//[", "//localhost", ""])
@in_event_loop
async def test_a_malformed_origin_is_another_one(origin: str) -> None:
    assert await answers([("POST", "/v1/completions", {"Host": "localhost", "Origin": origin})]) == [403]


@in_event_loop
async def test_the_servers_own_page_and_allowed_origins_write() -> None:
    own = {"Host": "localhost:30000", "Origin": "http://localhost:30000"}
    allowed = {"Origin": "https://app.example"}
    assert await answers([("POST", "/v1/completions", own), ("POST", "/v1/completions", allowed)]) == [200, 403]
    assert await answers([("POST", "/v1/completions", allowed)], allow_origins=("https://app.example",)) == [200]
    assert await answers([("POST", "/v1/completions", allowed)], allow_origins=("*",)) == [200]


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200), ("application/json; charset=utf-8", 200), ("application/vnd.api+json", 200),
        ("application/x-www-form-urlencoded", 200), ("text/plain", 415), ("multipart/form-data; boundary=x", 415), ("nonsense", 415),
    ],
)  # fmt: skip
@in_event_loop
async def test_a_body_is_declared_as_json(kind: str, status: int) -> None:
    assert await answers([("POST", "/v1/completions", {"Content-Type": kind})]) == [status]


@in_event_loop
async def test_a_slash_too_many_redirects_to_no_host() -> None:
    async with front() as f:
        answer = await f.client.get("/health/", headers={"Host": "evil"})
        assert answer.status_code == 404
        assert "location" not in answer.headers


@in_event_loop
async def test_probes_may_use_head() -> None:
    async with front() as f:
        for path in ("/health", "/ready", "/v1/models", "/metrics"):
            answer = await f.client.head(path)
            assert (answer.status_code, answer.content) == (200, b"")


@in_event_loop
async def test_requests_name_their_client() -> None:
    scheduler = ScriptedScheduler()
    async with front(scheduler) as f:
        await f.post("/v1/completions", PROMPT)
    async with front(scheduler, api_key="secret") as f:
        await f.post("/v1/completions", PROMPT)
    address, key = (request.client for request in scheduler.requests)
    assert address == "127.0.0.1"
    assert key.startswith("key ")
    assert "secret" not in key


def test_an_ipv6_client_has_a_whole_network() -> None:
    assert address_name("2001:db8::1") == address_name("2001:db8::ffff:1") == "2001:db8::/64"
    assert address_name("10.0.0.1") != address_name("10.0.0.2")
    assert address_name("::ffff:10.0.0.1") == address_name("10.0.0.1"), "as a socket for IPv4 and IPv6 shows it"
    assert address_name("") == ""
