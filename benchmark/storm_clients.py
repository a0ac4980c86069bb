"""The clients of a storm: good ones, whose answers and times are recorded, and hostile ones."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

PATIENCE = 600.0
"""Seconds within which every request must have an answer; an error about a full or slow queue counts as one."""
PAUSE = 4.0
"""Most seconds that hostile clients wait between actions, most of which take less time than an answer."""
BOMBS: tuple[dict[str, Any], ...] = (
    {"regex": "((a{1,900}){1,900}){1,900}"},
    {"regex": "(a|aa|aaa|b*)*" * 2000},
    {"json_schema": json.dumps({"$ref": "#"})},
    {"json_schema": json.dumps({"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 9} for i in range(60)}})},
    {"json_schema": json.dumps({"enum": ["x" * 999 for _ in range(1000)]})},
    {"json_schema": json.dumps({"type": "array", "items": {"type": "string", "pattern": "^(a+)+$"}, "minItems": 100_000})},
    {"ebnf": "root ::= root root | root"},
)  # fmt: skip
BAD: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"prompt": "' + b"\xff\xfe" + b'"}',
    b"[" * 50_000,
    json.dumps({"prompt": [-1]}).encode(),
    json.dumps({"prompt": "a", "max_tokens": 1 << 70}).encode(),
    json.dumps({"prompt": "a", "temperature": "hot"}).encode(),
    json.dumps({"prompt": "a", "n": 100_000}).encode(),
    json.dumps({"prompt": "a", "model": "another"}).encode(),
    json.dumps({"prompt": list(range(2, 100)) * 5000}).encode(),
    b'{"prompt": "' + b"x" * (9 << 20) + b'"}',
)
"""Bodies that must be answered with a 4xx status."""


@dataclass
class Tally:
    """The outcome of the requests.

    Attributes:
        seconds: duration of each complete answer to a good client.
        ends: number of good clients' requests by end: `answered`, `refused` (429 or 503), or `cut` (an error, or a closed connection).
        done: number of hostile actions by kind.
        wrong: descriptions of requests without an answer or with a wrong one.
    """

    seconds: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Served:
    """The server's port, context length, and number of token ids."""

    port: int
    longest: int
    vocabulary: int


class Clients:
    """Clients of one server until `stop`, each with its own address, so that the server can distinguish them."""

    def __init__(self, served: Served, rng: random.Random) -> None:
        self.tally = Tally()
        self._served, self._rng = served, rng
        self._ending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, good: int, hostile: int, ramp: float = 0.0, think: float = 0.0) -> None:
        """Start `good` and `hostile` clients, each at a random time within `ramp` seconds.

        Good clients wait up to `think` seconds after each answer.
        """
        for index in range(good + hostile):
            client = _Client(self._served, f"127.0.1.{index + 1}", self.tally, self._ending, random.Random(self._rng.random()))
            self._tasks.append(asyncio.create_task(client.run(index < good, ramp, think)))

    async def stop(self) -> Tally:
        """Let every client finish its current request, and return the outcome."""
        self._ending.set()
        await asyncio.gather(*self._tasks)
        return self.tally


class _Client:
    """One client, good or hostile."""

    def __init__(self, served: Served, address: str, tally: Tally, ending: asyncio.Event, rng: random.Random) -> None:
        self._served, self._address, self._tally, self._ending, self._rng = served, address, tally, ending, rng
        transport = httpx.AsyncHTTPTransport(local_address=address, verify=False)
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}", timeout=PATIENCE, transport=transport)
        self._hostile: tuple[Callable[[], Awaitable[str]], ...] = (
            self._disconnect, self._disconnect_early, self._read_slowly, self._send_wrong_body, self._send_long_prompt,
            self._send_hostile_grammar, self._send_part,
        )  # fmt: skip

    async def run(self, good: bool, ramp: float, think: float) -> None:
        """Send one request after the other until stopped."""
        await asyncio.sleep(self._rng.uniform(0.0, ramp))
        async with self._http:
            while not self._ending.is_set():
                await (self._run_good(think) if good else self._run_hostile())

    # ---- good clients

    async def _run_good(self, think: float) -> None:
        body = {
            "prompt": self._prompt(8, 96),
            "max_tokens": 16,
            "ignore_eos": True,
            "stream": True,
            "temperature": self._rng.choice([0, 1]),
        }
        began = time.perf_counter()
        try:
            end = await self._stream(body)
        except httpx.TimeoutException:
            end = "lost"
            self._tally.wrong.append(f"a good request had no answer within {PATIENCE:g} s")
        except httpx.HTTPError:
            end = "cut"
        self._tally.ends[end] += 1
        if end == "answered":
            self._tally.seconds.append(time.perf_counter() - began)
            await asyncio.sleep(self._rng.uniform(0.0, think))
        else:
            await asyncio.sleep(1.0)

    async def _stream(self, body: dict[str, Any]) -> str:
        last = ""
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code in (429, 503):
                return "refused"
            if answer.status_code != 200:
                self._tally.wrong.append(f"a good request got {answer.status_code}: {(await answer.aread())[:200]!r}")
                return "wrong"
            async for line in answer.aiter_lines():
                last = line or last
        if last == "data: [DONE]":
            return "answered"
        if not last.startswith('data: {"error"'):
            self._tally.wrong.append(f"a stream ended after {last[:200]}")
            return "cut"
        return "refused" if "--queue-timeout" in last else "cut"  # comments began the stream while it waited

    def _prompt(self, least: int, most: int) -> list[int]:
        return [self._rng.randrange(2, self._served.vocabulary) for _ in range(self._rng.randint(least, most))]

    # ---- hostile clients

    async def _run_hostile(self) -> None:
        act = self._rng.choice(self._hostile)
        self._tally.done[act.__name__.strip("_")] += 1
        try:
            wrong = await act()
        except httpx.TimeoutException:
            wrong = f"no answer within {PATIENCE:g} s"
        except (httpx.HTTPError, OSError):
            wrong = ""  # the server closed the connection
            await asyncio.sleep(0.2)
        await asyncio.sleep(self._rng.uniform(0.0, PAUSE))
        if wrong:
            self._tally.wrong.append(f"{act.__name__.strip('_')}: {wrong}")

    async def _disconnect(self) -> str:
        """Disconnect from a stream after a few tokens."""
        body = {"prompt": self._prompt(4, 200), "max_tokens": 400, "ignore_eos": True, "stream": True, "n": self._rng.choice([1, 1, 3])}
        left = self._rng.randint(1, 12)
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                left -= 1
                if left == 0:
                    break
        return ""

    async def _disconnect_early(self) -> str:
        """Disconnect before the answer begins."""
        body = {"prompt": self._prompt(4, 400), "max_tokens": 300, "ignore_eos": True}
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._http.post("/generate", json=_native(body)), self._rng.uniform(0.01, 0.5))
        return ""

    async def _read_slowly(self) -> str:
        """Request a long stream and read it very slowly."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._served.port, limit=1 << 12, local_addr=(self._address, 0))
        try:
            body = json.dumps(
                {"prompt": self._prompt(4, 50), "max_tokens": 200, "ignore_eos": True, "stream": True, "logprobs": 5}
            ).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            for _ in range(self._rng.randint(3, 20)):
                if not await asyncio.wait_for(reader.read(64), PATIENCE):
                    break
                await asyncio.sleep(0.5)
        finally:
            writer.close()
        return ""

    async def _send_wrong_body(self) -> str:
        """Send a body that must be refused."""
        body = self._rng.choice(BAD)
        answer = await self._http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        return "" if 400 <= answer.status_code < 500 or answer.status_code == 503 else f"{body[:60]!r} got {answer.status_code}"

    async def _send_long_prompt(self) -> str:
        """Send a prompt of about the context length, or longer."""
        longest = self._served.longest
        length = self._rng.choices([longest // 8, longest - 8, longest + 1, 3 * longest], [12, 1, 4, 3])[0]
        answer = await self._http.post(
            "/v1/completions", json={"prompt": self._prompt(length, length), "max_tokens": 4, "ignore_eos": True}
        )
        return "" if answer.status_code in (200, 400, 413, 429, 503) else f"{length} tokens got {answer.status_code}: {answer.text[:200]}"

    async def _send_hostile_grammar(self) -> str:
        """Send a grammar that is expensive or matches nothing."""
        answer = await self._http.post("/v1/completions", json={"prompt": self._prompt(4, 20), "max_tokens": 8, **self._rng.choice(BOMBS)})
        return "" if answer.status_code in (200, 400, 413, 429, 503) else f"{answer.status_code}: {answer.text[:200]}"

    async def _send_part(self) -> str:
        """Send part of a request, wait, and disconnect."""
        _, writer = await asyncio.open_connection("127.0.0.1", self._served.port, local_addr=(self._address, 0))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"[: self._rng.randint(1, 70)])
        await asyncio.sleep(self._rng.uniform(0.1, 5.0))
        writer.close()
        return ""


def _native(body: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": body["prompt"], "sampling_params": {"max_new_tokens": body["max_tokens"], "ignore_eos": True}}
