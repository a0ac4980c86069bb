"""A collector of OpenTelemetry gets the trace of a request, and the log tells about it in JSON."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
from fake import dummy_model, serving
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def collector() -> Iterator[tuple[str, list[Span]]]:
    """An OTLP collector on a free port, and the spans that it got."""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            spans.extend(span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", spans
    server.shutdown()
    server.server_close()


def test_a_collector_gets_the_phases_of_a_request_below_its_callers_span(tmp_path: Path) -> None:
    with collector() as (url, spans):
        flags = ("--otlp-traces-endpoint", url, "--log-format", "json", "--log-requests", "--log-slow-requests", "0.001")
        with serving(dummy_model(tmp_path / "model"), *flags) as server:
            body = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True}
            headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "X-Request-Id": "req_mine"}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=30)
            server.get("/health")
            server.process.terminate()
            server.process.wait(30)
    assert answer.status_code == 200, answer.text
    (root,) = (span for span in spans if span.name == "POST /v1/completions")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, CALLER)
    assert answer.headers["traceparent"].split("-")[1:3] == [TRACE, root.span_id.hex()]
    phases = {span.name: span for span in spans if span.parent_span_id == root.span_id}
    assert list(phases) == ["tokenize", "queue", "prefill", "decode", "detokenize"]
    for one, next_one in (("tokenize", "queue"), ("queue", "prefill"), ("prefill", "decode")):
        assert phases[one].end_time_unix_nano <= phases[next_one].start_time_unix_nano + 1000
    assert all(span.start_time_unix_nano < span.end_time_unix_nano for span in phases.values())
    assert root.start_time_unix_nano < phases["tokenize"].start_time_unix_nano
    assert not [span for span in spans if "health" in span.name]

    lines = [json.loads(line) for line in server.text().splitlines()]
    assert any(line["message"].startswith("talon: ready after") for line in lines)
    assert all(line.keys() >= {"time", "level", "process", "logger", "message"} for line in lines)
    mine = {line["logger"].rpartition(".")[2]: line for line in lines if line.get("request_id") == "req_mine" and line["level"] == "info"}
    assert mine["access_log"].items() >= {"method": "POST", "path": "/v1/completions", "status": 200}.items()
    assert mine["request_log"].items() >= {"completion_tokens": 8, "finish_reason": "length", "process": "talon::http"}.items()
    (slow,) = (line for line in lines if line.get("level") == "warning" and line.get("request_id") == "req_mine")
    assert list(slow["phase_seconds"]) == ["queue", "prefill", "decode"]
    assert slow["slowest_phase"] == max(slow["phase_seconds"], key=slow["phase_seconds"].get)


def test_a_collector_that_hangs_does_not_delay_the_end(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        flags = ("--otlp-traces-endpoint", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with serving(dummy_model(tmp_path / "model"), *flags) as server:
            assert server.complete([5]).status_code == 200
            server.process.terminate()
            assert server.process.wait(60) == 0
    assert "did not take the last spans within 3 s" in server.text()
