"""The generations of one HTTP request, which start and end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import structs

from runtime.entrypoints.tasks import cancel
from runtime.errors import RequestError
from runtime.managers.generation import Generation, RequestOptions
from runtime.managers.messages import TextOut
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.sampling_params import SamplingParams

MAX_UNREAD = 256
"""Capacity of the queue between the generations of a request and its writer; each generation also has a bound of its own."""

REPLY_SECONDS = 10.0
"""Longest time that a stream with a grammar waits for its first update: the time in which a grammar is compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request for text.

    Attributes:
        name: a request id for `/abort_request` that all its generations share; empty for none.
        prompts: texts or token ids.
        sampling: one per prompt.
        rids: one per prompt.
        options: the same for every prompt.
        params: the protocol's field names for the manager's "prompt", "input_ids" and "max_new_tokens", and for the grammar.
        prompt_only: indices of the prompts that are only computed.
    """

    name: str
    prompts: Sequence[str | list[int]]
    sampling: Sequence[SamplingParams]
    rids: Sequence[str]
    options: RequestOptions
    params: Mapping[str, str]
    prompt_only: Collection[int] = ()

    def name_field(self, error: RequestError) -> None:
        """Replace the manager's name of the field at fault by the protocol's."""
        error.param = self.params.get(error.param or "", error.param)

    def options_of(self, prompt: int) -> RequestOptions:
        """The options of one prompt."""
        return structs.replace(self.options, prompt_only=prompt in self.prompt_only)


class Generations:
    """One generation per prompt. Leaving `async with` aborts those that still run."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.each: list[Generation] = []

    @classmethod
    async def start(cls, manager: TokenizerManager, call: Call) -> Generations:
        """Start all generations of a call, or none. A stream with a grammar starts with its first update, because the status of its
        answer depends on whether the grammar can be used.

        Raises:
            RequestError: a prompt or parameter is out of bounds, a grammar cannot be used, or the call costs too much.
            QueueFull, QueuedTokensFull: the queue cannot hold all of them.
        """
        group = cls(call)
        try:
            for index, (prompt_ids, sampling) in enumerate(await _price(manager, call)):
                group.each.append(manager.submit(prompt_ids, sampling, call.options_of(index), call.rids[index], call.name))
            if call.options.stream and any(sampling.grammar is not None for sampling in call.sampling):
                await group._replied()
        except BaseException as error:
            group.close()
            if isinstance(error, RequestError):
                call.name_field(error)
            raise
        return group

    async def __aenter__(self) -> Generations:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort the generations that still run."""
        for generation in self.each:
            generation.close()

    async def _replied(self) -> None:
        """Wait at most `REPLY_SECONDS` for the first update of any generation. Raises the error that came instead."""
        readers = [asyncio.create_task(each.replied()) for each in self.each]
        try:
            done, _ = await asyncio.wait(readers, timeout=REPLY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for reader in done:
                reader.result()
        finally:
            await cancel(*readers)

    async def updates(self) -> AsyncGenerator[tuple[int, TextOut], None]:
        """Yield the updates of all generations as they arrive, each with the index of its prompt; raise the first error."""
        queue: asyncio.Queue[tuple[int, TextOut] | Exception | None] = asyncio.Queue(MAX_UNREAD)
        readers: list[asyncio.Task[None]] = []
        try:
            if len(self.each) == 1:
                async for update in self.each[0]:
                    yield 0, update
                return
            readers += [asyncio.create_task(_read(prompt, each, queue)) for prompt, each in enumerate(self.each)]
            open_readers = len(readers)
            while open_readers:
                item = await queue.get()
                if item is None:
                    open_readers -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        except RequestError as error:
            self._call.name_field(error)
            raise
        finally:
            for reader in readers:
                reader.cancel()

    async def texts(self) -> list[list[TextOut]]:
        """Return the texts of every prompt once all have ended. Each text is one update, because the call does not stream."""
        async with aclosing(self.updates()) as updates:
            texts = {(prompt, update.index): update async for prompt, update in updates}
        return [[texts[prompt, index] for index in range(each.n)] for prompt, each in enumerate(self.each)]


async def _price(manager: TokenizerManager, call: Call) -> list[tuple[list[int], SamplingParams]]:
    """Tokenise all prompts and check the cost of the call, before anything is submitted."""
    pooling = call.options.pooling
    if manager.model_config.no_head and (pooling is None or pooling.kind == "labels"):
        raise RequestError("The checkpoint has no LM head, so the model cannot generate or score text. Use /v1/embeddings.")
    cost = manager.new_cost()
    cost.check_samples(len(call.prompts), call.options.n)
    priced: list[tuple[list[int], SamplingParams]] = []
    for prompt, sampling in zip(call.prompts, call.sampling, strict=True):
        priced.append(await manager.price(cost, prompt, sampling, call.options))
        await asyncio.sleep(0)  # let other requests run between many prompts
    manager.check_capacity(cost)
    return priced


async def _read(prompt: int, generation: Generation, queue: asyncio.Queue[tuple[int, TextOut] | Exception | None]) -> None:
    try:
        async for update in generation:
            await queue.put((prompt, update))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
