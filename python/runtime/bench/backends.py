"""The three request formats: `/generate`, completions and chat completions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from runtime.bench.http_stream import HttpClient, HttpFailure
from runtime.bench.records import BenchRequest, Chunk, RequestRecord

Dialect = Literal["generate", "completions", "chat"]
Json = dict[str, Any]

TEXTS = ("reasoning_content", "reasoning", "content")
"""Fields of a chat message that hold generated text; vLLM calls the first one `reasoning`."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One value of `--backend`.

    Attributes:
        port: default port of such a server.
        running_usage: the server can report token counts in every chunk (`continuous_usage_stats`).
    """

    name: str
    dialect: Dialect
    port: int
    running_usage: bool = False

    @property
    def path(self) -> str:
        """Path of the endpoint that generates."""
        return {"generate": "/generate", "completions": "/v1/completions", "chat": "/v1/chat/completions"}[self.dialect]


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("sglang", "generate", 30000),
        Backend("native", "generate", 30000),
        Backend("sglang-native", "generate", 30000),
        Backend("sglang-oai", "completions", 30000),
        Backend("sglang-oai-chat", "chat", 30000),
        Backend("vllm", "completions", 8000, running_usage=True),
        Backend("vllm-chat", "chat", 8000, running_usage=True),
    )
}


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Options that all requests of a run share."""

    model: str
    stream: bool = True
    ignore_eos: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    return_logprob: bool = False
    extra_body: Json = field(default_factory=dict)


def payload(backend: Backend, request: BenchRequest, options: GenerationOptions) -> Json:
    """The JSON body of one request.

    Raises:
        ValueError: the prompt holds token ids and the endpoint is a chat endpoint, which takes text only; or `/generate` is asked for
            several answers, whose tokens cannot be told apart.
    """
    if backend.dialect == "generate":
        body = _merged(_generate_payload(request, options), options.extra_body)
        sampling = body["sampling_params"]
        if isinstance(sampling, dict) and sampling.get("n") not in (None, 1):
            raise ValueError(f"--backend {backend.name} measures one answer per request; remove n from --extra-request-body")
        return body
    stream = options.extra_body.get("stream", options.stream)
    body: Json = {"model": options.model, "temperature": options.temperature, "stream": stream, "ignore_eos": options.ignore_eos}
    if options.top_p < 1.0:
        body["top_p"] = options.top_p
    if stream:
        body["stream_options"] = {"include_usage": True} | ({"continuous_usage_stats": True} if backend.running_usage else {})
    if backend.dialect == "completions":
        body |= {"prompt": request.prompt, "max_tokens": request.output_len}
        if options.return_logprob:
            body["logprobs"] = 1
    else:
        if not isinstance(request.prompt, str):
            raise ValueError(f"--backend {backend.name} takes text; for token ids choose a completions backend")
        body |= {"messages": [{"role": "user", "content": request.prompt}], "max_completion_tokens": request.output_len}
        if options.return_logprob:
            body["logprobs"] = True
    return _merged(body, options.extra_body)


def _merged(body: Json, extra: Json) -> Json:
    """`body` with the fields of `extra`. Objects in both, such as `sampling_params`, are merged; other values are replaced."""
    both = {name: _merged(body[name], new) for name, new in extra.items() if isinstance(new, dict) and isinstance(body.get(name), dict)}
    return {**body, **extra, **both}


def _output_len(request: BenchRequest, body: Json) -> int:
    """Maximum number of tokens to generate: that of the request, or 0 if the extra fields of the body say so."""
    sampling = body.get("sampling_params")
    limits = sampling if isinstance(sampling, dict) else body
    return 0 if any(limits.get(name) == 0 for name in ("max_new_tokens", "max_tokens", "max_completion_tokens")) else request.output_len


def _generate_payload(request: BenchRequest, options: GenerationOptions) -> Json:
    sampling: Json = {"temperature": options.temperature, "max_new_tokens": request.output_len, "ignore_eos": options.ignore_eos}
    if options.top_p < 1.0:
        sampling["top_p"] = options.top_p
    body: Json = {
        ("text" if isinstance(request.prompt, str) else "input_ids"): request.prompt,
        "sampling_params": sampling,
        "stream": options.stream,
    }
    if options.return_logprob:
        body["return_logprob"] = True
    return body


class Answer:
    """Records one answer as it arrives: text, token counts, and the time of each chunk with tokens."""

    def __init__(self, backend: Backend, record: RequestRecord) -> None:
        self._read = {"generate": self._generate, "completions": self._openai, "chat": self._openai}[backend.dialect]
        self._record = record
        self._texts: list[str] = []
        self._seen_text = ""
        self._counted = 0  # tokens that the chunks so far reported
        self._empty = True  # no message has arrived
        self._ended_at: float | None = None
        self.total: int | None = None  # tokens of the whole answer, counted by the server

    def event(self, data: bytes, at: float) -> None:
        """Read one server-sent event."""
        self._empty = False
        if data == b"[DONE]":
            self._end(at)
        elif data:
            self.message(data, at)

    def message(self, text: bytes, at: float) -> None:
        """Read one JSON message, a chunk of a stream or a whole answer. Raises HttpFailure if it is not a JSON object."""
        self._empty = False
        data = _object(text)
        if error := data.get("error") or (data.get("object") == "error" and data):
            self._record.error = str(error.get("message") or error) if isinstance(error, dict) else str(error)
            return
        self._read(data, at)

    def close(self, output_len: int) -> None:
        """Fill in the record at the end of the answer.

        An answer without tokens is a failure if tokens were requested; else the time of its end counts as TTFT. Tokens without text, such
        as special ones, may come with the end.
        """
        record = self._record
        record.text = self._seen_text or "".join(self._texts)
        chunks = record.chunks
        if not chunks and self.total and self._ended_at is not None:
            self._add("", self.total, self._ended_at)
        if output_len == 0 and self._ended_at is not None:
            chunks.clear()  # the prompt, if it was to be repeated
            record.ttft = record.latency = self._ended_at - record.start
            return
        if not chunks:
            none = "the server sent no event; if it does not stream, pass --disable-stream"
            record.error = none if self._empty else "the answer ended without a token"
            return
        if self._ended_at is None:
            record.error = "the stream ended before the answer"
        record.ttft = chunks[0].at - record.start
        record.latency = chunks[-1].at - record.start
        counted = all(chunk.tokens is not None for chunk in chunks)
        record.output_len = self.total or (self._counted if counted else len(chunks))

    def _add(self, text: str, tokens: int | None, at: float) -> None:
        self._texts.append(text)
        self._counted += tokens or 0
        self._record.chunks.append(Chunk(at, text, tokens))

    def _generate(self, data: Json, at: float) -> None:
        meta = data.get("meta_info") or {}
        total = meta.get("completion_tokens")
        text = data.get("text") or ""
        delta = text[len(self._seen_text) :] if text.startswith(self._seen_text) else text
        self._seen_text = text if text.startswith(self._seen_text) else self._seen_text + text
        new = None if total is None else total - self._counted
        if (new is not None and new > 0) or (new is None and delta):
            self._add(delta, new, at)
        self.total = total or self.total
        self._meta(meta)
        self._finish(meta.get("finish_reason"), at)

    def _meta(self, meta: Json) -> None:
        record = self._record
        record.prompt_len = meta.get("prompt_tokens") or record.prompt_len
        record.cached_tokens = meta.get("cached_tokens") or record.cached_tokens
        record.verify_steps = meta.get("spec_verify_ct") or record.verify_steps
        record.accepted_by_position = meta.get("spec_accepted_by_position") or record.accepted_by_position
        record.drafted_by_position = meta.get("spec_drafted_by_position") or record.drafted_by_position

    def _openai(self, data: Json, at: float) -> None:
        usage = data.get("usage") or {}
        for choice in (data.get("choices") or [])[:1]:
            text = choice.get("text") or _text(choice.get("delta") or choice.get("message") or {})
            tokens = self._chunk_tokens(choice, usage)
            # The server may hold text back (an incomplete character, a possible stop string), so a completions chunk without text is a
            # token unless it ends the answer.
            silent_token = "text" in choice and choice.get("finish_reason") is None
            if tokens or (tokens is None and (text or silent_token)):
                self._add(text, tokens, at)
            else:
                self._texts.append(text)
            self._finish(choice.get("finish_reason"), at)
        if usage:
            self.total = usage.get("completion_tokens") or self.total
            self._record.prompt_len = usage.get("prompt_tokens") or self._record.prompt_len
            details = usage.get("prompt_tokens_details") or {}
            self._record.cached_tokens = details.get("cached_tokens") or usage.get("cached_tokens") or self._record.cached_tokens

    def _chunk_tokens(self, choice: Json, usage: Json) -> int | None:
        if (ids := choice.get("token_ids")) is not None:
            return len(ids)
        # Usage in the last chunk alone does not tell which chunk had how many tokens.
        running = all(chunk.tokens is not None for chunk in self._record.chunks[-1:])
        if running and "completion_tokens" in usage:
            return usage["completion_tokens"] - self._counted
        return None

    def _end(self, at: float) -> None:
        self._ended_at = self._ended_at or at

    def _finish(self, reason: Any, at: float) -> None:
        if reason is not None:
            self._end(at)
        kind = reason.get("type") if isinstance(reason, dict) else reason
        if kind == "abort":
            why = reason.get("message") if isinstance(reason, dict) else None
            self._record.error = f"aborted by the server{f': {why}' if why else ''}"


def _object(text: bytes) -> Json:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise HttpFailure(f"the server sent something other than a JSON object: {text[:200].decode('utf-8', 'replace')}")
    return found


def _text(message: Json) -> str:
    """What the model generated in a chat message or in a part of it: text, and the names and arguments of tool calls."""
    functions = [call.get("function") or {} for call in message.get("tool_calls") or []]
    calls = [function.get(name) or "" for function in functions for name in ("name", "arguments")]
    return "".join([*(message.get(name) or "" for name in TEXTS), *calls])


async def send(client: HttpClient, backend: Backend, request: BenchRequest, options: GenerationOptions) -> RequestRecord:
    """Run one request to its end.

    Faults of the server or the network do not raise; they are in the record's `error`.
    """
    record = RequestRecord(prompt_len=request.prompt_len)
    answer = Answer(backend, record)
    body = payload(backend, request, options)
    data = orjson.dumps(body)
    record.start = time.perf_counter()  # before connecting, like SGLang's client
    try:
        on_event = answer.event if body["stream"] else None
        status, rest = await client.exchange("POST", backend.path, data, on_event)
        if status != 200:
            record.error = f"HTTP {status}: {rest.decode('utf-8', 'replace')[:500]}"
        elif on_event is None:
            answer.message(rest, time.perf_counter())
    except HttpFailure as failure:
        record.error = record.error or str(failure)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        record.error = record.error or f"the server's answer has an unknown form ({type(error).__name__}: {error})"
    if not record.error:
        answer.close(_output_len(request, body))
    return record
