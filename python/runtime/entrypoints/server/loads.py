"""How busy the server is, in the forms that SGLang's routers and dashboards read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel
from starlette.responses import Response

from runtime import __version__
from runtime.entrypoints.http.responses import json_response
from runtime.errors import InvalidField
from runtime.managers.telemetry.scheduler_stats import SchedulerStats
from runtime.managers.tokenizer_manager import TokenizerManager

Rank = Annotated[str, Query(json_schema_extra={"enum": ["0"]})]
LoadFormat = Annotated[str, Query(json_schema_extra={"enum": ["json", "prometheus"]})]
SECTIONS = ("core", "spec", "queues", "all")
_SECTION = rf"\s*({'|'.join(SECTIONS)})\s*"
Sections = Annotated[str, Query(json_schema_extra={"pattern": f"^{_SECTION}(,{_SECTION})*$"})]


class RankLoad(BaseModel):
    """One entry of /get_load: the server, or one attention group."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class Load(BaseModel):
    """The load of the server. Rates are shares between 0 and 1."""

    timestamp: float
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    num_total_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    speculative: dict[str, float] | None = None
    queues: dict[str, int] | None = None


class Loads(BaseModel):
    """The answer of /v1/loads."""

    timestamp: str
    version: str
    accelerator: str | None
    num_accelerators: int
    loads: list[Load]


class LoadApi:
    """Answers /get_load and /v1/loads.

    Args:
        stats: fetches the scheduler's statistics; None before its first heartbeat.
    """

    def __init__(self, manager: TokenizerManager, stats: Callable[[], Awaitable[SchedulerStats | None]]) -> None:
        self._manager = manager
        self._stats = stats

    async def get_load(self) -> Response:
        """Requests and tokens of the server, or of each attention group, as routers ask for them."""
        stats = await self._stats() or SchedulerStats()
        loads = [
            RankLoad(
                dp_rank=rank,
                num_reqs=load.num_running_reqs + load.num_queue_reqs,
                num_waiting_reqs=load.num_queue_reqs,
                num_tokens=load.num_used_tokens,
            )
            for rank, load in enumerate(stats.groups or [stats])
        ]
        return json_response([load.model_dump() for load in loads])

    async def loads(self, dp_rank: Rank = "0", include: Sections = "all", format: LoadFormat = "json") -> Response:
        """The load of each rank. `include` names sections, separated by commas: core, spec, queues, all."""
        if dp_rank != "0":
            raise InvalidField("dp_rank", dp_rank, "0; this server has one rank")
        if format not in ("json", "prometheus"):
            raise InvalidField("format", format, "json or prometheus")
        wanted = {name.strip() for name in include.split(",")}
        if not wanted <= set(SECTIONS):
            raise InvalidField("include", include, f"made of {', '.join(SECTIONS)}, separated by commas")
        load = self._load(await self._stats() or SchedulerStats(), wanted).model_dump(exclude_none=True)
        if format == "prometheus":
            return Response("".join(_samples("sglang", load)), media_type="text/plain; version=0.0.4; charset=utf-8")
        gpu = self._manager.config.device.gpu
        head = {
            "timestamp": _now().isoformat(),
            "version": __version__,
            "accelerator": gpu and gpu.name,
            "num_accelerators": int(bool(gpu)),
        }
        return json_response({**head, "loads": [load]})

    def _load(self, stats: SchedulerStats, wanted: set[str]) -> Load:
        rows = self._manager.limits.server_requests
        load = Load(
            timestamp=_now().timestamp(),
            dp_rank=0,
            num_running_reqs=stats.num_running_reqs,
            num_waiting_reqs=stats.num_queue_reqs,
            num_used_tokens=stats.num_used_tokens,
            num_total_tokens=stats.num_used_tokens,
            max_total_num_tokens=self._manager.limits.server_tokens,
            max_running_requests=rows,
            token_usage=stats.token_usage,
            gen_throughput=stats.gen_throughput,
            cache_hit_rate=stats.cache_hit_rate,
            utilization=max(stats.token_usage, stats.num_running_reqs / rows),
        )
        if wanted & {"spec", "all"} and stats.spec.verify_steps:
            load.speculative = {"accept_length": stats.spec.accept_length or 0.0, "accept_rate": stats.spec.accept_rate or 0.0}
        if wanted & {"queues", "all"}:
            load.queues = {"waiting": stats.num_queue_reqs, "retracted": stats.num_retracted_requests_total}
        return load


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _samples(prefix: str, values: dict[str, Any]) -> list[str]:
    """`values` in Prometheus' text format; those of a section carry its name."""
    lines: list[str] = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += _samples(f"{prefix}_{'spec' if name == 'speculative' else name}", value)
        elif name not in ("dp_rank", "timestamp"):
            lines.append(f'# TYPE {prefix}_{name} gauge\n{prefix}_{name}{{dp_rank="0"}} {value}\n')
    return lines
