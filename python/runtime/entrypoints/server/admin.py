"""Health, information and administration."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from runtime.batch import SpeculationChange
from runtime.config.speculative import DEFAULT_STEPS
from runtime.config.synthetic_acceptance import synthetic_acceptance
from runtime.entrypoints.http.responses import json_response
from runtime.entrypoints.http.sse import until_gone
from runtime.entrypoints.native.protocol import AbortBody, InternalState, ProfileBody, StateBody
from runtime.entrypoints.tasks import cancel
from runtime.errors import ConfigError, QueueFull, RequestError, ServingError, StatusError, Unavailable
from runtime.managers.observers.metrics import Metrics
from runtime.managers.telemetry.scheduler_stats import SchedulerStats
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.sampling_params import SamplingParams
from runtime.version import __version__

GENERATE_SECONDS = 20.0
"""How long /health_generate waits for a token."""
LOOK_SECONDS = 1.0
"""How often /health_generate checks whether other requests got tokens meanwhile."""
STATS_SECONDS = 2.0
"""How long a request for statistics waits before it falls back to those of the last heartbeat."""
SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password", "otlp_traces_endpoint")
"""Flags that are not shown; the URL of a collector may contain a password."""


class AdminApi:
    """The endpoints that do not generate text for a user."""

    def __init__(self, manager: TokenizerManager, metrics: Metrics) -> None:
        self.manager = manager
        self.metrics = metrics

    # ---- health

    async def health(self) -> Response:
        """Whether all processes are alive and send heartbeats."""
        return self._health(self.manager.health.alive())

    async def ready(self) -> Response:
        """Whether the server takes new requests."""
        return self._health(self.manager.health.ready())

    def _health(self, well: bool) -> Response:
        if not well:
            raise Unavailable(self.manager.health.reason)
        return json_response({"status": "ok"})

    async def health_generate(self, request: Request) -> Response:
        """Whether the server generates. Waits for a token of this request or, while it is queued, of any other request."""
        try:
            await until_gone(request, asyncio.wait_for(self._any_token(), GENERATE_SECONDS))
        except asyncio.TimeoutError:
            raise Unavailable(f"No token came within {GENERATE_SECONDS:g} seconds.") from None
        return json_response({"status": "ok"})

    async def _any_token(self) -> None:
        before = await self._generated()
        own = asyncio.ensure_future(self._one_token())
        try:
            while not (await asyncio.wait((own,), timeout=LOOK_SECONDS))[0]:
                if await self._generated() != before:
                    return
            with contextlib.suppress(QueueFull):
                return own.result()
            while await self._generated() == before:
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await cancel(own)

    async def _generated(self) -> int:
        stats = await self.fresh_stats()
        return 0 if stats is None else stats.generation_tokens_total

    async def _one_token(self) -> None:
        config = self.manager.model_config
        first = config.bos_id if config.bos_id is not None else 0
        async with await self.manager.generate([first], SamplingParams(max_new_tokens=1, temperature=0.0)) as generation:
            async for _ in generation:
                pass

    # ---- information

    async def server_info(self) -> Response:
        """The resolved configuration without `SECRETS`, the limits, and the scheduler's statistics."""
        config = self.manager.config.by_flag()
        stats = await self.fresh_stats() or SchedulerStats()
        shown = {name: value for name, value in config.items() if name not in SECRETS}
        more = {
            "version": __version__,
            "status": "ready" if self.manager.health.ready() else self.manager.health.reason,
            "open_requests": self.manager.open_requests,
            "max_total_num_tokens": self.manager.limits.server_tokens,
            "max_context_len": self.manager.max_context_len,
            "limits": msgspec.to_builtins(self.manager.limits),
            "avg_spec_accept_length": stats.spec.accept_length,
            "internal_states": [stats.figures()],
        }
        return json_response({**shown, **more})

    async def fresh_stats(self) -> SchedulerStats | None:
        """The scheduler's current statistics, or those of its last heartbeat if it is busy."""
        asking = asyncio.ensure_future(self.manager.fetch_stats())
        try:  # not wait_for: before Python 3.12, one that is cancelled when its result has just come returns that and runs on
            answered, _ = await asyncio.wait((asking,), timeout=STATS_SECONDS)
            return asking.result() if answered else self.manager.stats
        except ServingError:
            return self.manager.stats
        finally:
            asking.cancel()

    async def model_info(self) -> Response:
        """The model that is served."""
        config, model = self.manager.config, self.manager.model_config
        return json_response(
            {
                "model_path": config.model.model_path,
                "tokenizer_path": config.model.tokenizer_path,
                "served_model_name": config.model.served_model_name,
                "is_generation": not model.no_head,
                "architecture": model.architecture,
                "weights": config.weights,
                "vocab_size": model.vocab_size,
                "max_context_len": self.manager.max_context_len,
                "sampling_defaults": config.model.sampling_defaults,
                "default_sampling_params": config.model.default_sampling_params.complete(),
                "preferred_sampling_params": config.model.preferred_sampling_params.given() or None,
            }
        )

    async def scrape(self) -> Response:
        """Metrics in Prometheus' text format."""
        if not self.manager.config.server.enable_metrics:
            raise StatusError(404, "Metrics are off. Start the server with --enable-metrics.")
        text, media_type = self.metrics.render(await self.fresh_stats())
        return Response(text, media_type=media_type)

    # ---- administration

    async def flush_cache(self) -> Response:
        """Drop all cached prefixes and reset the acceptance statistics; 409 while requests run."""
        return json_response({"success": True, "flushed_pages": await self.manager.flush_cache()})

    async def set_internal_state(self, body: StateBody) -> Response:
        """Change the draft depth or the synthetic acceptance from the next step on."""
        given, config = body.server_args, self.manager.config.speculative
        if given == InternalState():
            return json_response({"success": True})
        if config is None:
            raise RequestError("The server drafts nothing. Start it with --speculative-algorithm.", "server_args")
        depth, accept, acceptance = given.speculative_num_steps, given.speculative_synthetic_accept_length, None
        if accept is not None:
            try:
                acceptance = synthetic_acceptance(str(accept), config.num_steps, DEFAULT_STEPS if config.depths else None)
            except ConfigError as error:
                raise RequestError(str(error), "speculative_synthetic_accept_length") from error
        await self.manager.change_speculation(SpeculationChange(-1 if depth == "auto" else depth, acceptance))
        return json_response({"success": True})

    async def abort_request(self, body: AbortBody) -> Response:
        """End one request by its `rid`, or all with `abort_all`. An unknown `rid` is not an error."""
        self.manager.abort(body.rid, all=body.abort_all)
        return json_response({"success": True})

    async def start_profile(self, body: ProfileBody) -> Response:
        """Start a trace in the folder of --profile; the folder in the body is ignored."""
        return await self.begin_profile()

    async def begin_profile(self) -> Response:
        """Start a trace in the folder of --profile."""
        folder = self.manager.config.server.profile_folder
        if folder is None:
            raise StatusError(404, "Profiling needs a folder. Start the server with --profile FOLDER.")
        await self.manager.start_profile(folder)
        return json_response({"success": True, "folder": folder})

    async def stop_profile(self, body: ProfileBody) -> Response:
        """End the trace; the answer names its file."""
        # The watchdog excuses a silent scheduler only during this call, so it goes on if the client disconnects.
        return await asyncio.shield(self.end_profile())

    async def end_profile(self) -> Response:
        """End the trace; the answer names its file."""
        return json_response({"success": True, "file": await self.manager.stop_profile()})
