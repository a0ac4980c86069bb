"""The generations of one HTTP request: started together, read together, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from runtime.managers.messages import TokenLogprobs
from runtime.managers.tokenizer_manager import Generation, GenerationUpdate

MAX_UNREAD = 256
"""Updates kept between the generations of a request and its writer; beyond it the generations' own bound counts."""


class Generations:
    """One generation a prompt. Leaving `async with` ends those that still run."""

    def __init__(self) -> None:
        self.each: list[Generation] = []

    async def __aenter__(self) -> Generations:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs."""
        for generation in self.each:
            generation.close()

    async def updates(self) -> AsyncGenerator[tuple[int, GenerationUpdate], None]:
        """Updates of all as they come, each with the index of its prompt. Raises what the first of them to fail raises."""
        if len(self.each) == 1:
            async for update in self.each[0]:
                yield 0, update
            return
        news: asyncio.Queue[tuple[int, GenerationUpdate] | Exception | None] = asyncio.Queue(MAX_UNREAD)
        readers = [asyncio.create_task(_read(prompt, each, news)) for prompt, each in enumerate(self.each)]
        try:
            open_readers = len(readers)
            while open_readers:
                item = await news.get()
                if item is None:
                    open_readers -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for reader in readers:
                reader.cancel()

    async def texts(self, tally: Tally) -> list[list[Choice]]:
        """All choices of every prompt, complete; `tally` counts them."""
        done = [[Choice() for _ in range(each.n)] for each in self.each]
        updates = self.updates()
        try:
            async for prompt, update in updates:
                tally.add(prompt, update)
                done[prompt][update.index].add(update)
        finally:
            await updates.aclose()
        return done


async def _read(prompt: int, generation: Generation, news: asyncio.Queue[tuple[int, GenerationUpdate] | Exception | None]) -> None:
    try:
        async for update in generation:
            await news.put((prompt, update))
    except Exception as error:
        await news.put(error)
    else:
        await news.put(None)


@dataclass(slots=True)
class Choice:
    """One text, gathered from its updates."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: TokenLogprobs | None = None
    last: GenerationUpdate | None = None

    def add(self, update: GenerationUpdate) -> None:
        """Append what is new."""
        self.text += update.text
        self.token_ids.extend(update.token_ids)
        if update.logprobs is not None:
            self.logprobs.extend(update.logprobs.chosen)
            self.top.extend(update.logprobs.top)
        self.prompt_logprobs = update.prompt_logprobs or self.prompt_logprobs
        self.last = update

    @property
    def finish_reason(self) -> str | None:
        """stop, length or abort."""
        return self.last.finish.reason if self.last is not None and self.last.finish is not None else None

    @property
    def mean_logprob(self) -> float:
        """The score by which `best_of` ranks."""
        known = [value for value in self.logprobs if value is not None]
        return sum(known) / len(known) if known else float("-inf")


class Tally:
    """Token counts of a request while its updates come in; without `output` what is generated is nobody's to see, and counts nothing."""

    def __init__(self, prompt_tokens: Sequence[int], *, output: bool = True) -> None:
        self._output = output
        self.prompt_tokens = sum(prompt_tokens)
        self._cached = [0] * len(prompt_tokens)
        self._generated: dict[tuple[int, int], int] = {}

    def add(self, prompt: int, update: GenerationUpdate) -> None:
        """Count what `update` says so far."""
        self._cached[prompt] = max(self._cached[prompt], update.cached_tokens)
        self._generated[prompt, update.index] = update.completion_tokens

    def usage(self) -> dict[str, object]:
        """OpenAI's `usage`."""
        generated = sum(self._generated.values()) if self._output else 0
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }
