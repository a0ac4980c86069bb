"""OpenTelemetry spans: one per HTTP request, and one per phase of each of its generations."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.entrypoints.http.auth import OPEN_PATHS, PROBE_PATHS
from runtime.managers.observers.request_end import RequestEnd
from runtime.managers.request_context import CURRENT_REQUEST
from runtime.version import __version__

log = logging.getLogger(__name__)

SEND_SECONDS = 3.0
"""How long the last spans may take to arrive when the server ends."""
UNTRACED = OPEN_PATHS | PROBE_PATHS
PROPAGATOR = TraceContextTextMapPropagator()
"""W3C trace context: the headers `traceparent` and `tracestate`."""


def otlp_provider(endpoint: str, service: str) -> TracerProvider:
    """A provider that sends spans to a collector in batches, from its own thread."""
    resource = Resource.create({"service.version": __version__, "talon.model": service})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):  # the environment names none
        resource = resource.merge(Resource({"service.name": "talon"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


async def send_last_spans(provider: TracerProvider) -> None:
    """Shut `provider` down. Gives up after `SEND_SECONDS`: the exporter waits and retries for 10 s and more if the collector is down."""
    sender = threading.Thread(target=provider.shutdown, name="talon-spans", daemon=True)
    sender.start()
    deadline = time.monotonic() + SEND_SECONDS
    while sender.is_alive():
        if time.monotonic() > deadline:
            log.warning("the collector of --otlp-traces-endpoint did not take the last spans within %g s; they are lost", SEND_SECONDS)
            return
        await asyncio.sleep(0.02)


def phase_spans(end: RequestEnd) -> Iterator[tuple[str, float, float]]:
    """Yield the phases of one choice in order: name, start and end in monotonic seconds. Only the first choice has tokenising; detokenising
    comes last.
    """
    context = end.generation.context
    if end.index == 0 and context is not None and context.tokenized:
        yield "tokenize", *context.tokenized.pop(0)
    began = end.began
    for name, seconds in end.phases().items():
        yield name, began, began + seconds
        began += seconds
    if end.progress.detokenize_seconds:
        yield "detokenize", end.ended - end.progress.detokenize_seconds, end.ended


class PhaseTracer:
    """Creates the spans of a finished choice, as children of its HTTP request's span."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("talon", __version__)

    def __call__(self, end: RequestEnd) -> None:
        """Create the spans."""
        context = end.generation.context
        if context is None or context.span is None:
            return
        parent, progress = trace.set_span_in_context(context.span), end.progress
        offset = time.time_ns() - int(time.monotonic() * 1e9)
        for name, began, ended in phase_spans(end):
            attributes = {"talon.rid": end.generation.rid, "talon.choice": end.index}
            span = self._tracer.start_span(name, parent, start_time=offset + int(began * 1e9), attributes=attributes)
            span.end(offset + int(ended * 1e9))
        counts = {
            "input_tokens": progress.prompt_tokens,
            "cached_tokens": progress.cached_tokens,
            "output_tokens": progress.completion_tokens,
        }
        reason = {"gen_ai.response.finish_reason": end.finish.reason if end.finish is not None else "failed"}
        context.span.add_event("end of choice", {**{f"gen_ai.usage.{name}": n for name, n in counts.items()}, **reason})


class Tracing:
    """ASGI middleware that creates a span per request, a child of the caller's; the answer's `traceparent` identifies it."""

    def __init__(self, app: ASGIApp, provider: TracerProvider, model: str) -> None:
        self.app = app
        self._tracer = provider.get_tracer("talon", __version__)
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["path"] in UNTRACED:
            await self.app(scope, receive, send)
            return
        context = CURRENT_REQUEST.get()
        assert context is not None, "RequestNames sees every request first"
        attributes = {
            "http.request.method": scope["method"], "url.path": scope["path"], "gen_ai.request.model": self._model,
            "talon.request_id": context.request_id,
        }  # fmt: skip
        caller = PROPAGATOR.extract(dict(Headers(scope=scope)))
        with self._tracer.start_as_current_span(scope["method"], caller, kind=SpanKind.SERVER, attributes=attributes) as span:
            context.span = span
            named: dict[str, str] = {}
            PROPAGATOR.inject(named)

            async def traced(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message).update(named)
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            try:
                await self.app(scope, receive, traced)
            finally:
                if (route := scope.get("route")) is not None:
                    span.update_name(f"{scope['method']} {route.path}")
