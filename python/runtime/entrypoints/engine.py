"""The offline engine: the server's processes without HTTP, for scripts and notebooks."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from runtime import log as logging_setup
from runtime.config.flag_parser import from_fields
from runtime.entrypoints.engine_call import PromptBody, SamplingLike, read_call, read_encode
from runtime.entrypoints.generations import Generations
from runtime.entrypoints.http.body_schema import read_body
from runtime.entrypoints.native.output import Output, Outputs
from runtime.entrypoints.pooling.pooler import Pooler
from runtime.entrypoints.pooling.protocol import ScoreBody
from runtime.entrypoints.prepare import prepare
from runtime.entrypoints.processes import Runtime
from runtime.entrypoints.tasks import cancel
from runtime.errors import ConfigError, ServingError
from runtime.managers.messages import TextOut

T = TypeVar("T")

MAX_OPEN = 256
"""Most prompts of one call that are submitted at the same time; the others wait here, not in the scheduler's queue."""


class Engine:
    """Generates text, embeddings and scores for this Python process; the model runs in child processes.

        with Engine(model_path="...") as engine:
            print(engine.generate("The capital of France is", {"temperature": 0})["text"])

    Options are the server's flags with underscores. Methods that begin with `async_` work inside a running event loop. Only the process
    that made an engine can use it, not its forks.

    Raises:
        ConfigError: an option does not exist or cannot take effect.
    """

    def __init__(self, *, scheduler_command: Sequence[str] | None = None, **options: Any) -> None:
        args = from_fields({"log_level": "warning", **options})
        logging_setup.setup(args.log_level, "talon::engine", args.log_format)
        self.config, self._model_config = prepare(args)
        if self.config.parallel.node_rank:
            raise ConfigError("The engine is node 0. Start the other nodes with python -m runtime.launch_server and the same flags.")
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._gate = threading.RLock()  # guards `_closed` and what is handed to the loop
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="talon-engine", daemon=True)
        self._thread.start()
        self._runtime: Runtime | None = None
        try:
            self._runtime = self._submit(self._start(scheduler_command)).result()
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def __reduce__(self) -> NoReturn:
        raise TypeError("An engine cannot be pickled or copied. Start one in each process.")

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
        **others: Any,
    ) -> Any:
        """Complete one prompt or several.

        Args:
            prompt: a text or a list of texts.
            sampling_params: `sampling_params` of /generate as a mapping or a `SamplingParams`, for all prompts or one per prompt. With
                `max_new_tokens` 0 only the prompt is computed; `n` is the number of texts per prompt.
            input_ids: token ids, or a list of such lists, instead of `prompt`.
            return_logprob: put the log-probabilities of the output tokens into `meta_info`.
            logprob_start_len: also report those of the prompt, from this token on; -1 or None lists only the last token, without one.
            top_logprobs_num: how many of the most likely tokens to report at each position.
            stream: yield outputs as they grow; one prompt only.
            rid: the request id, or one per prompt.
            priority: requests with a higher number run first.
            cache_salt: prompts share cached KV only within the same salt.
            others: other fields of /generate; unsupported ones raise an error that names them.

        Returns:
            An `Output`; for several prompts or texts, a list of them in order; with `stream`, an iterator of growing outputs.

        Raises:
            RequestError: a value is out of bounds, or an argument is not supported. ServingError: the server failed.
        """
        self._alive()
        named = {"return_logprob": return_logprob, "logprob_start_len": logprob_start_len, "top_logprobs_num": top_logprobs_num}
        named |= {"prompt": prompt, "sampling_params": sampling_params, "input_ids": input_ids, "stream": stream}
        bodies, many = read_call({**others, **named, "rid": rid, "priority": priority, "cache_salt": cache_salt})
        if stream:
            return self._stream_sync(bodies[0])
        outputs = self._wait(self._all(bodies))
        return outputs if many else outputs[0]

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: SamplingLike | Sequence[SamplingLike] = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        stream: bool = False,
        **others: Any,
    ) -> Any:
        """`generate` for a running event loop, with the same arguments; with `stream` the result is an async iterator."""
        self._alive()
        named = {"prompt": prompt, "sampling_params": sampling_params, "input_ids": input_ids, "stream": stream}
        bodies, many = read_call({**others, **named})
        if stream:
            return self._stream_async(bodies[0])
        outputs = await asyncio.wrap_future(self._submit(self._all(bodies)))
        return outputs if many else outputs[0]

    # ---- numbers instead of text

    def encode(self, prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], *, dimensions: int | None = None) -> Any:
        """Embed one prompt or several: pooled hidden states, scaled to length 1, as /v1/embeddings returns them.

        Args:
            prompt: a text, token ids, or a list of either.
            dimensions: keep this many values of each embedding.

        Returns:
            `{"embedding": list of float, "meta_info": {"prompt_tokens": int}}`; for a list of prompts, a list of them in order.

        Raises:
            RequestError: a value is out of bounds. ServingError: the server failed.
        """
        return self._wait(self._encode(prompt, dimensions))

    async def async_encode(
        self, prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], *, dimensions: int | None = None
    ) -> Any:
        """`encode` for a running event loop."""
        return await asyncio.wrap_future(self._submit(self._encode(prompt, dimensions)))

    def score(
        self,
        query: str | list[int],
        items: str | list[str] | list[list[int]],
        label_token_ids: list[int],
        apply_softmax: bool = False,
        item_first: bool = False,
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """The probabilities of `label_token_ids` as the token after the query and each item; arguments are those of /v1/score.

        Returns:
            For each item, one number per label.

        Raises:
            RequestError: a value is out of bounds. ServingError: the server failed.
        """
        return self._wait(self._score(query, items, label_token_ids, apply_softmax, item_first, temperature))

    async def async_score(
        self,
        query: str | list[int],
        items: str | list[str] | list[list[int]],
        label_token_ids: list[int],
        apply_softmax: bool = False,
        item_first: bool = False,
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """`score` for a running event loop."""
        scores = self._score(query, items, label_token_ids, apply_softmax, item_first, temperature)
        return await asyncio.wrap_future(self._submit(scores))

    # ---- administration

    def flush_cache(self) -> dict[str, object]:
        """Forget all cached prompts."""
        return {"flushed_pages": self._wait(self._alive().manager.flush_cache())}

    def get_server_info(self) -> dict[str, object]:
        """Return the main options and the scheduler's statistics."""
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
        """End the processes. May be called twice and from any thread; does nothing in a fork.

        Open calls that do not finish within three seconds raise `ServingError`.
        """
        if self._forked():
            return
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

    async def _all(self, bodies: list[PromptBody]) -> list[Output]:
        room = self.config.scheduler.max_queued_requests + self._alive().manager.limits.server_requests
        limit = asyncio.Semaphore(max(1, min(MAX_OPEN, room // max((body.n for body in bodies), default=1))))

        async def one(body: PromptBody) -> list[Output]:
            async with limit:
                outputs = await self._open(body)
                async with outputs.group as group:
                    return [outputs.of(0, text) for text in (await group.texts())[0]]

        prompts = [asyncio.ensure_future(one(body)) for body in bodies]
        try:
            return [output for outputs in await asyncio.gather(*prompts) for output in outputs]
        finally:  # if one prompt fails, cancel the others
            await cancel(*prompts)

    async def _encode(self, prompt: object, dimensions: int | None) -> Any:
        body = read_encode(prompt, dimensions)
        pooled = await Pooler(self._alive().manager).embed(body, "prompt")
        outputs = [{"embedding": each.vector, "meta_info": {"prompt_tokens": each.prompt_tokens}} for each in pooled]
        return outputs if body.many else outputs[0]

    async def _score(
        self, query: object, items: object, label_token_ids: object, apply_softmax: bool, item_first: bool, temperature: float
    ) -> list[list[float]]:
        named = {"query": query, "items": items, "label_token_ids": label_token_ids}
        named |= {"apply_softmax": apply_softmax, "item_first": item_first, "temperature": temperature}
        body = read_body(ScoreBody, named)
        return [each.vector for each in await Pooler(self._alive().manager).score(body)]

    async def _open(self, body: PromptBody) -> Outputs:
        return await Outputs.start(self._alive().manager, body)

    async def _next(self, outputs: Outputs, texts: AsyncGenerator[tuple[int, TextOut], None]) -> Output | None:
        async for _, text in texts:
            return outputs.of(0, text)
        return None

    # ---- between the threads

    def _forked(self) -> bool:
        """Whether this is a fork of the engine's process, which has no event loop that runs."""
        return os.getpid() != self._process

    def _alive(self) -> Runtime:
        if self._runtime is None:
            raise _shut_down()
        return self._runtime

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._forked():
            work.close()
            raise ServingError("This process is a fork of the engine's process. Start an engine of its own in each process.")
        with self._gate:
            if self._closed:
                work.close()
                raise _shut_down()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        finally:
            future.cancel()  # has an effect only if the wait was interrupted, as by Ctrl-C

    def _close(self, group: Generations) -> None:
        """Abort a generation without waiting: the garbage collector may close an iterator in the thread of the event loop itself."""
        if self._forked():
            return
        with self._gate:
            if not self._closed:
                self._loop.call_soon_threadsafe(group.close)

    def _stream_sync(self, body: PromptBody) -> Iterator[Output]:
        outputs = self._wait(self._open(body))
        texts = outputs.growing()
        try:
            while (output := self._wait(self._next(outputs, texts))) is not None:
                yield output
        finally:
            self._close(outputs.group)

    async def _stream_async(self, body: PromptBody) -> AsyncIterator[Output]:
        outputs = await asyncio.wrap_future(self._submit(self._open(body)))
        texts = outputs.growing()
        try:
            while (output := await asyncio.wrap_future(self._submit(self._next(outputs, texts)))) is not None:
                yield output
        finally:
            self._close(outputs.group)


def _shut_down() -> ServingError:
    return ServingError("The engine was shut down.")
