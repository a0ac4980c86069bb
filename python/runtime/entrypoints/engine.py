"""The offline engine: the server's processes without HTTP, for scripts and notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypedDict, TypeGuard, TypeVar

from runtime import log as logging_setup
from runtime.config.flag_parser import from_fields
from runtime.entrypoints.native.meta_info import meta_info
from runtime.entrypoints.processes import Runtime, prepare
from runtime.errors import InvalidField, ServingError
from runtime.managers.generation import Generation, GenerationUpdate
from runtime.managers.messages import TokenLogprobs
from runtime.sampling_params import SamplingParams

T = TypeVar("T")

SamplingLike = Mapping[str, Any] | SamplingParams | None
MAX_OPEN = 256
"""Prompts of one call under way together; the rest wait their turn here, not in the scheduler's queue."""


class Output(TypedDict):
    """What one prompt became, in the shape of SGLang's engine."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


class Engine:
    """Generate text in this Python process, with the model in processes of its own.

        with Engine(model_path="...") as engine:
            print(engine.generate("The capital of France is", {"temperature": 0})["text"])

    Options are the server's flags with underscores. Works from plain code and inside a running event loop (`async_generate`).

    Raises:
        ConfigError: an option that does not exist or cannot take effect.
    """

    def __init__(self, *, scheduler_command: Sequence[str] | None = None, **options: Any) -> None:
        args = from_fields({"log_level": "warning", **options})
        logging_setup.setup(args.log_level, "talon::engine")
        self.config, self._model_config = prepare(args)
        self._loop = asyncio.new_event_loop()
        self._gate = threading.RLock()  # held to hand the loop something; after `_closed` it takes nothing
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="talon-engine", daemon=True)
        self._thread.start()
        self._runtime: Runtime | None = None
        try:
            self._runtime = self._wait(self._start(scheduler_command))
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # ---- generation

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingLike | Sequence[SamplingLike] = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        stream: bool = False,
    ) -> Any:
        """Complete one prompt or many.

        Args:
            prompt: a text or a list of texts.
            sampling_params: a mapping of `SamplingParams` fields for all, or one for each prompt.
            input_ids: token ids (or a list of such lists) in place of `prompt`.
            return_logprob: log-probabilities of the output tokens, in `meta_info`.
            top_logprobs_num: how many of the likeliest beside each.
            stream: yield growing outputs instead; one prompt only.

        Returns:
            An `Output`, or a list of them in the prompts' order, or with `stream` an iterator of growing ones.

        Raises:
            RequestError: a value out of bounds. ServingError: the server's side failed.
        """
        jobs = _Jobs.of(prompt, input_ids, sampling_params)
        top = top_logprobs_num if return_logprob else -1
        self._alive()
        if stream:
            return self._stream_sync(jobs.single("stream"), top)
        outputs = self._wait(self._all(jobs, top))
        return outputs if jobs.many else outputs[0]

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingLike | Sequence[SamplingLike] = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        stream: bool = False,
    ) -> Any:
        """`generate` for a running event loop; with `stream` the result is an async iterator."""
        jobs = _Jobs.of(prompt, input_ids, sampling_params)
        top = top_logprobs_num if return_logprob else -1
        self._alive()
        if stream:
            return self._stream_async(jobs.single("stream"), top)
        outputs = await self._elsewhere(self._all(jobs, top))
        return outputs if jobs.many else outputs[0]

    # ---- administration

    def flush_cache(self) -> dict[str, object]:
        """Forget all cached prompts."""
        return {"flushed_pages": self._wait(self._alive().manager.flush_cache())}

    def get_server_info(self) -> dict[str, object]:
        """What was decided at start and how it goes: the scheduler's state and the main options."""
        runtime = self._alive()
        stats = self._wait(runtime.manager.fetch_stats())
        return {
            "model_path": self.config.model.model_path,
            "served_model_name": self.config.model.served_model_name,
            "device": self.config.device.device,
            "dtype": self.config.device.dtype,
            "attention_backend": self.config.device.attention_backend,
            "context_length": self.config.model.context_length,
            "internal_states": [stats.figures()],
        }

    def shutdown(self) -> None:
        """End the processes; calls that are still open raise `ServingError`. Harmless twice, and from any thread."""
        with self._gate:
            first, self._closed = not self._closed, True
        if first:
            try:
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if first:
            self._loop.close()

    # ---- inside the engine's own loop

    async def _start(self, scheduler_command: Sequence[str] | None) -> Runtime:
        runtime = Runtime(self.config, self._model_config, scheduler_command)
        try:
            await runtime.start()
            await runtime.warm_up()
        except BaseException:
            await runtime.stop()
            raise
        return runtime

    async def _end(self) -> None:
        """Stop the runtime and let every call see that its request failed; a start that was interrupted stops its own."""
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if self._runtime is not None:
            await self._runtime.stop()
            self._runtime = None
        else:
            for call in calls:
                call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _all(self, jobs: _Jobs, top_logprobs: int) -> list[Output]:
        limit = asyncio.Semaphore(MAX_OPEN)

        async def one(index: int) -> Output:
            async with limit, await self._open(jobs.prompts[index], jobs.sampling[index], top_logprobs, stream=False) as generation:
                growing = _Growing(generation)
                async for update in generation:
                    growing.add(update)
                return growing.output()

        return list(await asyncio.gather(*(one(index) for index in range(len(jobs.prompts)))))

    async def _open(self, prompt: str | list[int], sampling: SamplingParams, top_logprobs: int, *, stream: bool) -> Generation:
        return await self._alive().manager.generate(prompt, sampling, stream=stream, top_logprobs=top_logprobs, continues_prompt=True)

    async def _next(self, growing: _Growing) -> Output | None:
        try:
            growing.add(await growing.generation.__anext__())
        except StopAsyncIteration:
            return None
        return growing.output()

    # ---- across the threads

    def _alive(self) -> Runtime:
        if self._runtime is None:
            raise _shut_down()
        return self._runtime

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._gate:
            if self._closed:
                work.close()
                raise _shut_down()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._submit(work).result()

    async def _elsewhere(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._submit(work))

    def _close(self, generation: Generation) -> None:
        """Nobody reads it any more. Waits for nothing: an iterator left behind may be collected in the loop's own thread."""
        with self._gate:
            if not self._closed:
                self._loop.call_soon_threadsafe(generation.close)

    def _stream_sync(self, job: tuple[str | list[int], SamplingParams], top_logprobs: int) -> Iterator[Output]:
        growing = _Growing(self._wait(self._open(*job, top_logprobs, stream=True)))
        try:
            while (output := self._wait(self._next(growing))) is not None:
                yield output
        finally:
            self._close(growing.generation)

    async def _stream_async(self, job: tuple[str | list[int], SamplingParams], top_logprobs: int) -> AsyncIterator[Output]:
        growing = _Growing(await self._elsewhere(self._open(*job, top_logprobs, stream=True)))
        try:
            while (output := await self._elsewhere(self._next(growing))) is not None:
                yield output
        finally:
            self._close(growing.generation)


def _shut_down() -> ServingError:
    return ServingError("the engine was shut down")


class _Jobs:
    """The prompts of one call, each with its sampling parameters."""

    def __init__(self, prompts: list[str | list[int]], sampling: list[SamplingParams], many: bool) -> None:
        self.prompts, self.sampling, self.many = prompts, sampling, many

    @classmethod
    def of(
        cls,
        prompt: str | Sequence[str] | None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        sampling_params: SamplingLike | Sequence[SamplingLike],
    ) -> _Jobs:
        if (prompt is None) == (input_ids is None):
            raise InvalidField("prompt", prompt, "given, or input_ids in its place, not both")
        prompts, many = _id_lists(input_ids) if prompt is None else _texts(prompt)
        given = list(sampling_params) if _is_list(sampling_params) else [sampling_params] * len(prompts)
        if len(given) != len(prompts):
            raise InvalidField("sampling_params", f"{len(given)} mappings", f"one mapping, or one for each of {len(prompts)} prompts")
        return cls(prompts, [_sampling(one) for one in given], many)

    def single(self, why: str) -> tuple[str | list[int], SamplingParams]:
        if self.many:
            raise InvalidField("prompt", f"{len(self.prompts)} prompts", f"one prompt with {why}")
        return self.prompts[0], self.sampling[0]


_Prompts = tuple[list[str | list[int]], bool]
"""Prompts, and whether a list of them was given."""


def _texts(prompt: object) -> _Prompts:
    if isinstance(prompt, str):
        return [prompt], False
    if not isinstance(prompt, Sequence) or not all(isinstance(one, str) for one in prompt):
        raise InvalidField("prompt", prompt, "a text, or a list of texts")
    return list(prompt), True


def _id_lists(input_ids: object) -> _Prompts:
    """One list a prompt; what the lists hold is the manager's to check."""
    if _is_list(input_ids):
        if not input_ids or isinstance(input_ids[0], int):
            return [list(input_ids)], False
        if all(_is_list(row) for row in input_ids):
            return [list(row) for row in input_ids], True
    raise InvalidField("input_ids", input_ids, "a list of token ids, or a list of such lists; .tolist() makes one of an array")


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _sampling(given: object) -> SamplingParams:
    if isinstance(given, SamplingParams):
        return given
    if not isinstance(given, Mapping | None):
        raise InvalidField("sampling_params", given, "a mapping of fields to values, a SamplingParams, or one of these for each prompt")
    values = dict(given or {})
    for name in values:
        if name not in SamplingParams.__struct_fields__:
            raise InvalidField("sampling_params", name, f"one of {', '.join(SamplingParams.__struct_fields__)}")
    stop = values.get("stop", ())
    values["stop"] = (stop,) if isinstance(stop, str) else _tuple("stop", stop)
    values["stop_token_ids"] = _tuple("stop_token_ids", values.get("stop_token_ids"))
    return SamplingParams(**values)


def _tuple(field: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise InvalidField(field, value, "a list")
    return tuple(value)


class _Growing:
    """One output as it grows."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[tuple[float | None, int]] = []
        self._top: list[list[tuple[float, int]]] = []
        self._last: GenerationUpdate | None = None

    def add(self, update: GenerationUpdate) -> None:
        self._text += update.text
        self._ids += update.token_ids
        self._last = update
        if update.logprobs is not None:
            self._add_logprobs(update.logprobs, update.token_ids)

    def _add_logprobs(self, logprobs: TokenLogprobs, ids: list[int]) -> None:
        self._logprobs += zip(logprobs.chosen, ids, strict=True)
        self._top += [[(value, token) for token, value in row] for row in logprobs.top]

    def output(self) -> Output:
        last = self._last
        assert last is not None
        meta = meta_info(self.generation.rid, last)
        if self._logprobs:
            meta["output_token_logprobs"] = list(self._logprobs)
            meta["output_top_logprobs"] = list(self._top)
        return {"text": self._text, "output_ids": list(self._ids), "meta_info": meta}
