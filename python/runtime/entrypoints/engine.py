"""The offline engine: the server's processes without HTTP, for scripts and notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypedDict, TypeGuard, TypeVar

from runtime import log as logging_setup
from runtime.config.flag_parser import from_fields
from runtime.entrypoints.generations import Choice
from runtime.entrypoints.native.meta_info import meta_info
from runtime.entrypoints.prepare import prepare
from runtime.entrypoints.processes import Runtime
from runtime.errors import ConfigError, InvalidField, ServingError
from runtime.managers.generation import Generation
from runtime.sampling_params import SamplingDefaults, SamplingParams

T = TypeVar("T")

Prompt = str | list[int]
SamplingLike = Mapping[str, Any] | SamplingParams | None
MAX_OPEN = 256
"""Prompts of one call that run together; the others wait here, not in the scheduler's queue."""


class Output(TypedDict):
    """The output of one prompt, in the form of SGLang's engine."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


class Engine:
    """Generates text in this Python process, with the model in processes of its own.

        with Engine(model_path="...") as engine:
            print(engine.generate("The capital of France is", {"temperature": 0})["text"])

    Options are the server's flags with underscores. `async_generate` works inside a running event loop.

    Raises:
        ConfigError: an option does not exist or cannot take effect.
    """

    def __init__(self, *, scheduler_command: Sequence[str] | None = None, **options: Any) -> None:
        args = from_fields({"log_level": "warning", **options})
        logging_setup.setup(args.log_level, "talon::engine")
        self.config, self._model_config = prepare(args)
        if self.config.parallel.node_rank:
            raise ConfigError("The engine is node 0. Start the other nodes with python -m runtime.launch_server and the same flags.")
        self._defaults = self.config.model.preferred_sampling_params
        self._loop = asyncio.new_event_loop()
        self._gate = threading.RLock()  # guards `_closed` and what is handed to the loop
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
        """Complete one prompt or several.

        Args:
            prompt: a text or a list of texts.
            sampling_params: a mapping of `SamplingParams` fields for all prompts, or one per prompt.
            input_ids: token ids, or a list of such lists, instead of `prompt`.
            return_logprob: put the log-probabilities of the output tokens into `meta_info`.
            top_logprobs_num: how many likely tokens to report beside each of them.
            stream: yield outputs as they grow; one prompt only.

        Returns:
            An `Output`, or a list of them in the prompts' order, or with `stream` an iterator of growing outputs.

        Raises:
            RequestError: a value is out of bounds. ServingError: the server failed.
        """
        self._alive()
        jobs = _Jobs(prompt, input_ids, sampling_params, top_logprobs_num if return_logprob else -1, self._defaults)
        if stream:
            jobs.check_single()
            return self._stream_sync(jobs)
        outputs = self._wait(self._all(jobs))
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
        self._alive()
        jobs = _Jobs(prompt, input_ids, sampling_params, top_logprobs_num if return_logprob else -1, self._defaults)
        if stream:
            jobs.check_single()
            return self._stream_async(jobs)
        outputs = await asyncio.wrap_future(self._submit(self._all(jobs)))
        return outputs if jobs.many else outputs[0]

    # ---- administration

    def flush_cache(self) -> dict[str, object]:
        """Forget all cached prompts."""
        return {"flushed_pages": self._wait(self._alive().manager.flush_cache())}

    def get_server_info(self) -> dict[str, object]:
        """The main options and the scheduler's statistics."""
        config = self.config
        return {
            "model_path": config.model.model_path,
            "served_model_name": config.model.served_model_name,
            "device": config.device.device,
            "dtype": config.device.dtype,
            "attention_backend": config.device.attention_backend,
            "context_length": config.model.context_length,
            "internal_states": [self._wait(self._alive().manager.fetch_stats()).figures()],
        }

    def shutdown(self) -> None:
        """End the processes; open calls raise `ServingError`. May be called twice and from any thread."""
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

    # ---- in the engine's own loop

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
        """Stop the runtime, which fails all open calls; or cancel the start, which stops its own runtime."""
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if self._runtime is not None:
            await self._runtime.stop()
            self._runtime = None
        else:
            for call in calls:
                call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _all(self, jobs: _Jobs) -> list[Output]:
        limit = asyncio.Semaphore(MAX_OPEN)

        async def one(index: int) -> Output:
            async with limit, await self._open(jobs, index, stream=False) as generation:
                choice = Choice()
                async for update in generation:
                    choice.add(update)
                return _output(generation, choice)

        return list(await asyncio.gather(*map(one, range(len(jobs.prompts)))))

    async def _open(self, jobs: _Jobs, index: int, *, stream: bool) -> Generation:
        return await self._alive().manager.generate(
            jobs.prompts[index],
            jobs.sampling[index],
            stream=stream,
            top_logprobs=jobs.top_logprobs,
            continues_prompt=True,
        )

    async def _next(self, generation: Generation, choice: Choice) -> Output | None:
        try:
            choice.add(await generation.__anext__())
        except StopAsyncIteration:
            return None
        return _output(generation, choice)

    # ---- between the threads

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

    def _close(self, generation: Generation) -> None:
        """Abort a generation without waiting: the garbage collector may close an iterator in the loop's own thread."""
        with self._gate:
            if not self._closed:
                self._loop.call_soon_threadsafe(generation.close)

    def _stream_sync(self, jobs: _Jobs) -> Iterator[Output]:
        generation, choice = self._wait(self._open(jobs, 0, stream=True)), Choice()
        try:
            while (output := self._wait(self._next(generation, choice))) is not None:
                yield output
        finally:
            self._close(generation)

    async def _stream_async(self, jobs: _Jobs) -> AsyncIterator[Output]:
        generation, choice = await asyncio.wrap_future(self._submit(self._open(jobs, 0, stream=True))), Choice()
        try:
            while (output := await asyncio.wrap_future(self._submit(self._next(generation, choice)))) is not None:
                yield output
        finally:
            self._close(generation)


def _shut_down() -> ServingError:
    return ServingError("The engine was shut down.")


def _output(generation: Generation, choice: Choice) -> Output:
    assert choice.last is not None
    meta = meta_info(generation.rid, choice.last)
    if choice.logprobs:
        meta["output_token_logprobs"] = list(zip(choice.logprobs, choice.token_ids, strict=True))
        meta["output_top_logprobs"] = [[(value, token) for token, value in row] for row in choice.top]
    return {"text": choice.text, "output_ids": list(choice.token_ids), "meta_info": meta}


class _Jobs:
    """The prompts of one call with their sampling parameters. `many`: whether a list of prompts was given."""

    def __init__(self, prompt: object, input_ids: object, sampling_params: object, top_logprobs: int, defaults: SamplingDefaults) -> None:
        if (prompt is None) == (input_ids is None):
            raise InvalidField("prompt", prompt, "given, or input_ids instead")
        self.prompts, self.many = _id_lists(input_ids) if prompt is None else _texts(prompt)
        given = list(sampling_params) if _is_list(sampling_params) else [sampling_params] * len(self.prompts)
        if len(given) != len(self.prompts):
            raise InvalidField("sampling_params", given, f"one mapping, or one per prompt ({len(self.prompts)})")
        self.sampling = [_sampling(one, defaults) for one in given]
        self.top_logprobs = top_logprobs

    def check_single(self) -> None:
        """Raise `InvalidField` for several prompts."""
        if self.many:
            raise InvalidField("prompt", self.prompts, "one prompt with stream")


def _texts(prompt: object) -> tuple[list[Prompt], bool]:
    if isinstance(prompt, str):
        return [prompt], False
    if not _is_list(prompt) or not all(isinstance(one, str) for one in prompt):
        raise InvalidField("prompt", prompt, "a text or a list of texts")
    return list(prompt), True


def _id_lists(input_ids: object) -> tuple[list[Prompt], bool]:
    """One list per prompt; the manager checks the ids."""
    if _is_list(input_ids):
        if not input_ids or isinstance(input_ids[0], int):
            return [list(input_ids)], False
        if all(_is_list(row) for row in input_ids):
            return [list(row) for row in input_ids], True
    raise InvalidField("input_ids", input_ids, "a list of token ids or a list of such lists; use .tolist() of an array")


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _sampling(given: object, defaults: SamplingDefaults) -> SamplingParams:
    if isinstance(given, SamplingParams):
        return given
    if not isinstance(given, Mapping | None):
        raise InvalidField("sampling_params", given, "a mapping, a SamplingParams, or one of these per prompt")
    values = {**defaults.given(), **{name: value for name, value in (given or {}).items() if value is not None}}
    for name in values.keys() - set(SamplingParams.__struct_fields__):
        raise InvalidField("sampling_params", name, f"made of {', '.join(SamplingParams.__struct_fields__)}")
    for name in ("stop", "stop_token_ids"):
        value = values.get(name, ())
        values[name] = (value,) if isinstance(value, str) else tuple(value or ()) if isinstance(value, Iterable | None) else value
    return SamplingParams(**values)
