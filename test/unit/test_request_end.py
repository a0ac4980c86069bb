"""The phases of a request that ended, in logs and spans."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import partial

import httpx
import pytest
from front import ScriptedScheduler, front, make_manager
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from event_loop import in_event_loop
from runtime.config.flag_parser import from_fields
from runtime.config.resolve import check
from runtime.entrypoints.http.tracing import otlp_provider
from runtime.entrypoints.server.server import create_app
from runtime.errors import ConfigError
from runtime.managers.generation import NO_OPTIONS, Generation
from runtime.managers.messages import Finish
from runtime.managers.observers.request_end import RequestEnd
from runtime.managers.observers.request_log import log_request, log_slow_request
from runtime.managers.telemetry.progress import Progress


def end_of(progress: Progress, seconds: float = 10.0) -> RequestEnd:
    return RequestEnd(Generation("r", "", [1], NO_OPTIONS, 9, lambda _: None), 0, None, progress, 5.0, 5.0 + seconds)


@pytest.mark.parametrize(
    ("progress", "phases", "slowest"),
    [
        (Progress(1), {"queue": 10.0}, "queue"),
        (Progress(1, queue_seconds=4.0), {"queue": 4.0, "prefill": 6.0}, "prefill"),
        (Progress(1, queue_seconds=4.0, prefill_seconds=1.0), {"queue": 4.0, "prefill": 1.0, "decode": 5.0}, "decode"),
        (Progress(1, queue_seconds=7.0, prefill_seconds=1.0), {"queue": 7.0, "prefill": 1.0, "decode": 2.0}, "queue"),
    ],
)
def test_the_phase_in_which_it_ended_takes_the_rest(progress: Progress, phases: dict[str, float], slowest: str) -> None:
    end = end_of(progress)
    assert end.phases() == phases
    assert end.slowest_phase() == slowest


def test_only_slow_requests_are_logged_with_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    log = partial(log_slow_request, 5.0)
    with caplog.at_level(logging.WARNING):
        log(end_of(Progress(1, queue_seconds=1.0, prefill_seconds=1.0), seconds=4.9))
        assert caplog.messages == []
        log(end_of(Progress(7, queue_seconds=4.0, prefill_seconds=1.0, completion_tokens=3), seconds=6.0))
    (line,) = caplog.messages
    assert line == "slow request r[0]: 6.00 s, most of it queue (queue 4.00 s, prefill 1.00 s, decode 1.00 s); 7 prompt tokens, 3 new"


def test_text_lines_of_requests_have_counts_and_phases(caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress(7, queue_seconds=4.0, prefill_seconds=1.0, completion_tokens=3)
    with caplog.at_level(logging.INFO):
        log_request(end_of(progress, seconds=6.0))
        log_request(replace(end_of(progress, seconds=6.0), finish=Finish(reason="length")))
    early, whole = caplog.messages
    times = "6.00 s (queue 4.00 s, prefill 1.00 s, decode 1.00 s)"
    assert early == f"r[0]: 7 prompt tokens (0 cached), 3 new, ended early, {times}"
    assert whole == f"r[0]: 7 prompt tokens (0 cached), 3 new, length, {times}"


@pytest.mark.parametrize("key", [None, "sk-a"])
@in_event_loop
async def test_text_lines_of_http_requests_have_bytes_and_client(key: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with front(log_requests=True, api_key=key) as f:
            answer = await f.client.get("/v1/models")
    (line,) = [record.getMessage() for record in caplog.records if record.name.endswith("access_log")]
    client = "127.0.0.1" if key is None else "key api-key"
    size, name = len(answer.content), answer.headers["x-request-id"]
    assert re.fullmatch(rf"GET /v1/models 200 0\.\d\d\d s {size} bytes {client} {name}", line), line


@pytest.mark.parametrize("status", [200, 400])
@in_event_loop
async def test_every_request_has_a_span_and_a_new_trace_without_a_caller(status: int) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = create_app(make_manager(ScriptedScheduler()), provider)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        answer = await client.post("/v1/completions", json={"prompt": "hi" if status == 200 else 3, "n": 2})
    assert answer.status_code == status
    *phases, root = exporter.get_finished_spans()
    assert root.attributes is not None
    assert root.attributes["http.response.status_code"] == status
    assert root.attributes["talon.request_id"] == answer.headers["x-request-id"]
    assert root.parent is None
    assert {span.parent.span_id for span in phases if span.parent} == ({root.context.span_id} if status == 200 else set())
    assert sum(span.name == "tokenize" for span in phases) == (status == 200)
    assert sum(span.name == "queue" for span in phases) == 2 * (status == 200)


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("talon", "chat"):
        provider = otlp_provider("http://127.0.0.1:1/v1/traces", "tiny")
        assert provider.resource.attributes["service.name"] == name
        provider.shutdown()
        monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")


@pytest.mark.parametrize("url", ["localhost:4317", "http://[::1", "http://collector:99999", "http://:4318"])
def test_an_endpoint_that_is_not_http_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=f"--otlp-traces-endpoint {re.escape(url)} is not an address of OTLP over HTTP"):
        check(from_fields({"otlp_traces_endpoint": url}))
