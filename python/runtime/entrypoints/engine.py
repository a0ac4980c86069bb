"""The offline engine: the server's processes without HTTP, for scripts and notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypedDict, TypeVar

from runtime import log as logging_setup
from runtime.config.flag_parser import from_fields
from runtime.entrypoints.engine_call import Asked, Job, Jobs, SamplingLike
from runtime.entrypoints.generations import Choice
from runtime.entrypoints.native.meta_info import meta_info
from runtime.entrypoints.openai.logprobs import aligned
from runtime.entrypoints.prepare import prepare
from runtime.entrypoints.processes import Runtime
from runtime.errors import ConfigError, ServingError
from runtime.managers.generation import Generation, RequestOptions

T = TypeVar("T")

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
        logging_setup.setup(args.log_level, "talon::engine", args.log_format)
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
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        return_logprob: bool | Sequence[bool] | None = False,
        logprob_start_len: int | Sequence[int] | None = None,
        top_logprobs_num: int | Sequence[int] | None = None,
        stream: bool = False,
        rid: str | Sequence[str] | None = None,
        priority: int | None = None,
        cache_salt: str | Sequence[str] | None = None,
        **sglangs: Any,
    ) -> Any:
        """Complete one prompt or several.

        Args:
            prompt: a text or a list of texts.
            sampling_params: a mapping of `SamplingParams` fields for all prompts, or one per prompt; with `max_new_tokens` 0 only the
                prompt is read, and `n` is the number of texts.
            input_ids: token ids, or a list of such lists, instead of `prompt`.
            return_logprob: put the log-probabilities of the output tokens into `meta_info`.
            logprob_start_len: also those of the prompt, from this token on; -1 or None for none.
            top_logprobs_num: how many likely tokens to report beside each of them.
            stream: yield outputs as they grow; one prompt only.
            rid: the name of the request, or one per prompt.
            priority: higher runs first.
            cache_salt: prompts share cached KV only within the same salt.
            sglangs: SGLang's other arguments. Those that change nothing are taken, the others are refused by name.

        Returns:
            An `Output`, or for several prompts or texts a list of them in order, or with `stream` an iterator of growing outputs.

        Raises:
            RequestError: a value is out of bounds, or an argument is not supported. ServingError: the server failed.
        """
        self._alive()
        asked = Asked(return_logprob, logprob_start_len, top_logprobs_num, rid, cache_salt)
        jobs = Jobs(prompt, input_ids, sampling_params, self._defaults, asked, sglangs)
        if stream:
            jobs.check_single()
            return self._stream_sync(jobs.each[0], priority or 0)
        outputs = self._wait(self._all(jobs, priority or 0))
        return outputs if jobs.many else outputs[0]

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingLike | Sequence[SamplingLike] = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        return_logprob: bool | Sequence[bool] | None = False,
        logprob_start_len: int | Sequence[int] | None = None,
        top_logprobs_num: int | Sequence[int] | None = None,
        stream: bool = False,
        rid: str | Sequence[str] | None = None,
        priority: int | None = None,
        cache_salt: str | Sequence[str] | None = None,
        **sglangs: Any,
    ) -> Any:
        """`generate` for a running event loop; with `stream` the result is an async iterator."""
        self._alive()
        asked = Asked(return_logprob, logprob_start_len, top_logprobs_num, rid, cache_salt)
        jobs = Jobs(prompt, input_ids, sampling_params, self._defaults, asked, sglangs)
        if stream:
            jobs.check_single()
            return self._stream_async(jobs.each[0], priority or 0)
        outputs = await asyncio.wrap_future(self._submit(self._all(jobs, priority or 0)))
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

    async def _all(self, jobs: Jobs, priority: int) -> list[Output]:
        limit = asyncio.Semaphore(MAX_OPEN)

        async def one(job: Job) -> list[Output]:
            async with limit, await self._open(job, priority, stream=False) as generation:
                choices = [Choice() for _ in range(job.n)]
                async for update in generation:
                    choices[update.index].add(update)
                return [_output(job, generation, choice) for choice in choices]

        prompts = [asyncio.ensure_future(one(job)) for job in jobs.each]
        try:
            return [output for outputs in await asyncio.gather(*prompts) for output in outputs]
        finally:  # one that failed ends the others
            for prompt in prompts:
                prompt.cancel()
            await asyncio.gather(*prompts, return_exceptions=True)

    async def _open(self, job: Job, priority: int, *, stream: bool) -> Generation:
        options = RequestOptions(
            n=job.n,
            stream=stream,
            top_logprobs=job.top_logprobs,
            prompt_logprobs=job.logprobs_from >= 0,
            priority=priority,
            cache_salt=job.cache_salt,
            continues_prompt=True,
        )
        return await self._alive().manager.generate(job.prompt, job.sampling, options, rid=job.rid)

    async def _next(self, job: Job, generation: Generation, choice: Choice) -> Output | None:
        try:
            choice.add(await generation.__anext__())
        except StopAsyncIteration:
            return None
        return _output(job, generation, choice)

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

    def _stream_sync(self, job: Job, priority: int) -> Iterator[Output]:
        generation, choice = self._wait(self._open(job, priority, stream=True)), Choice()
        try:
            while (output := self._wait(self._next(job, generation, choice))) is not None:
                yield output
        finally:
            self._close(generation)

    async def _stream_async(self, job: Job, priority: int) -> AsyncIterator[Output]:
        generation, choice = await asyncio.wrap_future(self._submit(self._open(job, priority, stream=True))), Choice()
        try:
            while (output := await asyncio.wrap_future(self._submit(self._next(job, generation, choice)))) is not None:
                yield output
        finally:
            self._close(generation)


def _shut_down() -> ServingError:
    return ServingError("The engine was shut down.")


def _output(job: Job, generation: Generation, choice: Choice) -> Output:
    choice = choice.prompt_only() if job.prompt_only else choice
    assert choice.last is not None
    meta = meta_info(generation.rid, choice.last)
    if job.top_logprobs >= 0:
        meta["output_token_logprobs"] = list(zip(choice.logprobs, choice.token_ids, strict=True))
        meta["output_top_logprobs"] = [[(value, token) for token, value in row] for row in choice.top]
    known = choice.prompt_logprobs
    if known is not None:
        ids, start = generation.prompt_ids, job.logprobs_from
        chosen, top = aligned(len(ids), known.chosen, known.top)
        meta["input_token_logprobs"] = list(zip(chosen[start:], ids[start:], strict=True))
        meta["input_top_logprobs"] = [[(value, token) for token, value in row] for row in top[start:]]
    return {"text": choice.text, "output_ids": list(choice.token_ids), "meta_info": meta}
