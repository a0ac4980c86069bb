"""The HTTP front around a real manager and a real tokenizer, with a scripted scheduler behind them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from tiny import tiny_model, tiny_runtime

from runtime.batch import WorkerLimits
from runtime.entrypoints.server.server import serve
from runtime.errors import GrammarError
from runtime.managers.messages import (
    AbortReq,
    CacheFlushed,
    ControlReply,
    ControlReq,
    Finish,
    GenerateReq,
    ProfileAt,
    TextOut,
    TextOutBatch,
    TokenLogprobs,
    ToScheduler,
)
from runtime.managers.replies import failure
from runtime.managers.telemetry.decode_stats import DecodeStats
from runtime.managers.telemetry.progress import Progress
from runtime.managers.telemetry.scheduler_stats import SchedulerStats
from runtime.managers.telemetry.spec_stats import SpecStats
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.pooling import Pooling
from runtime.text import bounded_encoding
from runtime.text.tokenizer import Tokenizer
from runtime.text.tokenizer_files import TokenizerFiles

VOCAB = 259
IM_START, IM_END, END_OF_TEXT = 256, 257, 258
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% if not (continue_final_message and loop.last) %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE, more: Sequence[str] = ()) -> Tokenizer:
    """One token per byte and three control tokens, then `more` control tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    for n, byte in enumerate(byte for byte in range(256) if byte not in printable):
        letters[byte] = chr(0x100 + n)
    control = {"<|im_start|>": IM_START, "<|im_end|>": IM_END, "<|endoftext|>": END_OF_TEXT}
    control |= {text: VOCAB + i for i, text in enumerate(more)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    definition = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": i, "content": text, **plain} for text, i in control.items()],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {letters[byte]: byte for byte in range(256)} | control, "merges": []},
    }  # fmt: skip
    return Tokenizer(TokenizerFiles(json.dumps(definition), {"eos_token": "<|im_end|>"}, template))


def logprob_of(token: int) -> float:
    """The log-probability of a token."""
    return -0.1 - (token % 7) / 10


def top_of(token: int, k: int) -> list[tuple[int, float]]:
    """The token itself and the next ids, each less likely."""
    return [((token + i) % VOCAB, logprob_of(token) - i) for i in range(k)]


MAX_TURNS = 200
"""Turns of the event loop that a step waits for its reader at most."""


@dataclass
class ScriptedScheduler:
    """Answers each request with `say(request)`, one byte per step, and records its messages.

    Attributes:
        gap: seconds between steps.
        hold: steps after which requests make no progress, or None.
        fail: steps after which requests fail, or None.
        refuse: why no grammar can be used; empty to follow none and refuse none.
        bursts: run all steps of a request at once; otherwise one follows when the handler has read the one before.
    """

    say: Callable[[GenerateReq], str] = lambda request: "Hello, world"
    gap: float = 0.0
    hold: int | None = None
    fail: int | None = None
    refuse: str = ""
    bursts: bool = False
    manager: TokenizerManager = field(init=False)
    requests: list[GenerateReq] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    calls: list[ControlReq] = field(default_factory=list)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    stats: SchedulerStats = field(default_factory=SchedulerStats)

    def send(self, message: ToScheduler) -> None:
        if isinstance(message, GenerateReq):
            for request in message.samples():
                self.requests.append(request)
                self.tasks[request.rid] = asyncio.get_running_loop().create_task(self._run(request))
        elif isinstance(message, AbortReq):
            for rid in list(self.tasks) if message.all else [message.rid]:
                self._abort(rid)
        elif isinstance(message, ControlReq):
            self.calls.append(message)
            self.manager.handle(ControlReply(call_id=message.call_id, result=self._perform(message)))

    def _perform(self, call: ControlReq) -> SchedulerStats | CacheFlushed | ProfileAt:
        if call.what in ("stats", "change_speculation"):
            return self.stats
        return CacheFlushed(pages=0) if call.what == "flush_cache" else ProfileAt(path=call.folder or "trace.json")

    def _abort(self, rid: str) -> None:
        self.aborted.append(rid)
        if not self.tasks[rid].done():
            self.tasks[rid].cancel()
            finish = Finish(reason="abort")
            out = TextOut(rid=rid, text="", token_ids=[], progress=Progress(1), finish=finish)
            asyncio.get_running_loop().call_soon(self.manager.handle, TextOutBatch(outs=[out]))

    async def _pool(self, request: GenerateReq, pooling: Pooling) -> None:
        """The first tokens of the prompt as its vector; of labels their log-probabilities."""
        await asyncio.sleep(self.gap)
        if self.hold is not None:
            await asyncio.Event().wait()
        ids = [*request.input_ids, *[0] * 32][:32]
        vector = [logprob_of(label) for label in pooling.label_ids] if pooling.kind == "labels" else [float(i) for i in ids]
        out = TextOut(
            rid=request.rid, text="", token_ids=[], progress=Progress(len(request.input_ids)), finish=Finish(reason="stop"), pooled=vector
        )
        self.manager.handle(TextOutBatch(outs=[out]))

    async def _run(self, request: GenerateReq) -> None:
        if request.pooling is not None:
            await self._pool(request, request.pooling)
            return
        if self.refuse and (spec := request.sampling.grammar) is not None:
            await asyncio.sleep(0)
            finish = failure(GrammarError(spec.kind, self.refuse))
            self.manager.handle(TextOutBatch(outs=[TextOut(rid=request.rid, text="", token_ids=[], progress=Progress(1), finish=finish)]))
            return
        data = self.say(request).encode()[: request.sampling.max_new_tokens]
        cut = len(self.say(request).encode()) > len(data)
        tokens = list(data) if cut else [*data, IM_END]
        if not request.stream:
            await self._step(request, tokens, data.decode(errors="ignore"), len(tokens), cut, True, True)
            return
        for i, token in enumerate(tokens):
            if i == self.hold:
                await asyncio.Event().wait()
            text = chr(token) if token < 128 else ""
            await self._step(request, [token], text, i + 1, cut, i == 0, i == len(tokens) - 1)

    async def _step(self, request: GenerateReq, ids: list[int], text: str, count: int, cut: bool, first: bool, last: bool) -> None:
        if not self.bursts:
            await self._read_by_handler()
        if self.hold is not None and not request.stream:
            await asyncio.Event().wait()
        finish = (Finish(reason="length") if cut else Finish(reason="stop", matched=IM_END)) if last else None
        if self.fail is not None and count > self.fail:
            finish = Finish(reason="abort", message="the forward step of this request failed", status=500)
        wanted = request.top_logprobs >= 0
        k = max(request.top_logprobs, 0)
        decode = DecodeStats(4, graph_steps=3, live_rows=6, padded_rows=2) if count > 1 else DecodeStats()
        spec = SpecStats(4, 12, 8, [4, 3, 1]) if last else None
        progress = Progress(len(request.input_ids), 2, count, 0.25, spec, decode)
        out = TextOut(
            rid=request.rid,
            text=text,
            token_ids=ids,
            progress=progress,
            finish=finish,
            logprobs=TokenLogprobs(chosen=[logprob_of(t) for t in ids], top=[top_of(t, k) for t in ids]) if wanted else None,
            prompt_logprobs=self._of_prompt(request, k) if request.prompt_logprobs and first else None,
        )
        self.manager.handle(TextOutBatch(outs=[out]))

    async def _read_by_handler(self) -> None:
        await asyncio.sleep(self.gap)
        for _ in range(MAX_TURNS):
            if self.manager.unread_messages:
                await asyncio.sleep(0)

    def _of_prompt(self, request: GenerateReq, k: int) -> TokenLogprobs:
        rest = request.input_ids[1:]
        return TokenLogprobs(chosen=[None, *(logprob_of(t) for t in rest)], top=[[], *(top_of(t, k) for t in rest)])


LIMITS = WorkerLimits(
    max_total_tokens=4096, max_running_requests=8, max_context_len=256, max_extend_tokens=64, page_size=1, vocab_size=VOCAB
)


def make_manager(scheduler: ScriptedScheduler, template: str | None = TEMPLATE, **config: object) -> TokenizerManager:
    """A manager whose messages go to `scheduler`."""
    model = tiny_model(vocab_size=VOCAB, eos_ids=(IM_END,))
    runtime = tiny_runtime(**config)
    limits = replace(LIMITS, max_context_len=runtime.model.context_length, groups=max(len(scheduler.stats.groups), 1))
    manager = TokenizerManager(runtime, byte_tokenizer(template), model, limits, scheduler.send)
    manager.health.warm = True
    scheduler.manager = manager
    return manager


class Front:
    """A server on a loopback port and a client of it."""

    def __init__(self, manager: TokenizerManager, scheduler: ScriptedScheduler, port: int, client: httpx.AsyncClient) -> None:
        self.manager = manager
        self.scheduler = scheduler
        self.port = port
        self.client = client

    async def post(self, path: str, body: object = None, **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **options)

    async def events(self, path: str, body: object) -> list[Any]:
        """The data of each event of a stream, parsed; the end mark as it is."""
        answer = await self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    async def fine(self) -> bool:
        """Whether an ordinary request is still answered."""
        answer = await self.post("/v1/completions", {"prompt": "x"})
        return answer.status_code == 200 and answer.json()["choices"][0]["text"] == "Hello, world"


@asynccontextmanager
async def front(scheduler: ScriptedScheduler | None = None, *, template: str | None = TEMPLATE, **config: object) -> AsyncIterator[Front]:
    """Serve on a free loopback port as the launcher does."""
    scheduler = scheduler or ScriptedScheduler()
    manager = make_manager(scheduler, template, **config)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    stopping = asyncio.Event()
    serving = asyncio.create_task(serve(manager, listener, stopping))
    key = {"Authorization": f"Bearer {config['api_key']}"} if config.get("api_key") else {}
    try:
        plain = {"trust_env": False, "verify": False}  # reads no certificates, which takes 20 ms
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=key, timeout=20, **plain) as client:
            yield Front(manager, scheduler, port, client)
    finally:
        for task in scheduler.tasks.values():
            task.cancel()
        stopping.set()
        await serving
        manager.close()


def count_tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that are tokenised from now on."""
    lengths: list[int] = []
    original = bounded_encoding.encode_text

    def counted(hf: Any, text: str, add_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        return original(hf, text, add_special_tokens)

    monkeypatch.setattr(bounded_encoding, "encode_text", counted)
    return lengths


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for `condition`, and fail after `seconds`."""
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not come true")
