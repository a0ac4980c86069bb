"""How busy the server is, in the forms that SGLang's routers and dashboards read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel
from starlette.responses import Response

from runtime.entrypoints.http.responses import json_response
from runtime.errors import InvalidField
from runtime.managers.telemetry.scheduler_stats import GroupLoad, SchedulerStats
from runtime.managers.tokenizer_manager import TokenizerManager
from runtime.version import __version__

Rank = Annotated[str | None, Query()]
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
    """The load of the server, or of one attention group, which lacks the fields that exist only for the server. Rates are from 0 to 1."""

    timestamp: float
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    num_total_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    utilization: float
    gen_throughput: float | None = None
    cache_hit_rate: float | None = None
    speculative: dict[str, float] | None = None
    queues: dict[str, int] | None = None


class Loads(BaseModel):
    """The answer of /v1/loads."""

    timestamp: str
    version: str
    accelerator: str | None
    num_accelerators: int
    tp_size: int
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
        """Requests and tokens of the server, or of each attention group, in the form that routers read."""
        stats = await self._stats() or SchedulerStats()
        loads = [
            {
                "dp_rank": rank,
                "num_reqs": load.num_running_reqs + load.num_queue_reqs,
                "num_waiting_reqs": load.num_queue_reqs,
                "num_tokens": load.num_used_tokens,
            }
            for rank, load in enumerate(stats.groups or [stats])
        ]
        return json_response(loads)

    async def loads(self, dp_rank: Rank = None, include: Sections = "all", format: LoadFormat = "json") -> Response:
        """The load of the server, or of each attention group. `include` names sections, separated by commas: core, spec, queues, all."""
        ranks = [str(rank) for rank in range(self._manager.limits.groups)]
        if dp_rank is not None and dp_rank not in ranks:
            raise InvalidField("dp_rank", dp_rank, " or ".join(ranks))
        if format not in ("json", "prometheus"):
            raise InvalidField("format", format, "json or prometheus")
        wanted = {name.strip() for name in include.split(",")}
        if not wanted <= set(SECTIONS):
            raise InvalidField("include", include, f"made of {', '.join(SECTIONS)}, separated by commas")
        stats = await self._stats() or SchedulerStats()
        every = [self._group_load(*each, wanted) for each in enumerate(stats.groups)] or [self._load(stats, wanted)]
        loads = [load.model_dump(exclude_none=True) for load in every if dp_rank in (None, str(load.dp_rank))]
        if format == "prometheus":
            return Response(_samples(loads), media_type="text/plain; version=0.0.4; charset=utf-8")
        gpu, parallel = self._manager.config.device.gpu, self._manager.config.parallel
        head = {
            "timestamp": _now().isoformat(),
            "version": __version__,
            "accelerator": gpu and gpu.name,
            "num_accelerators": parallel.tp_size if gpu else 0,
            "tp_size": parallel.tp_size,
        }
        return json_response({**head, "loads": loads})

    def _load(self, stats: SchedulerStats, wanted: set[str]) -> Load:
        limits = self._manager.limits
        load = _load_of(0, stats, stats.token_usage, limits.server_tokens, limits.server_requests)
        load.gen_throughput, load.cache_hit_rate = stats.gen_throughput, stats.cache_hit_rate
        if wanted & {"spec", "all"} and stats.spec.verify_steps:
            load.speculative = {"accept_length": stats.spec.accept_length or 0.0, "accept_rate": stats.spec.accept_rate or 0.0}
        if wanted & {"queues", "all"}:
            load.queues = {"waiting": stats.num_queue_reqs, "retracted": stats.num_retracted_requests_total}
        return load

    def _group_load(self, rank: int, group: GroupLoad, wanted: set[str]) -> Load:
        limits = self._manager.limits
        usage = group.num_used_tokens / limits.max_total_tokens
        load = _load_of(rank, group, usage, limits.max_total_tokens, limits.max_running_requests)
        if wanted & {"queues", "all"}:
            load.queues = {"waiting": group.num_queue_reqs}
        return load


def _load_of(rank: int, held: SchedulerStats | GroupLoad, usage: float, tokens: int, rows: int) -> Load:
    """The fields that the server and an attention group have in common. `tokens` and `rows` are the capacities."""
    return Load(
        timestamp=_now().timestamp(),
        dp_rank=rank,
        num_running_reqs=held.num_running_reqs,
        num_waiting_reqs=held.num_queue_reqs,
        num_used_tokens=held.num_used_tokens,
        num_total_tokens=held.num_used_tokens,
        max_total_num_tokens=tokens,
        max_running_requests=rows,
        token_usage=usage,
        utilization=max(usage, held.num_running_reqs / rows),
    )


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _samples(loads: list[dict[str, Any]]) -> str:
    """The values of all ranks in Prometheus' text format; names of values in a section begin with the section's name."""
    samples: dict[str, list[str]] = {}
    for load in loads:
        rank = load.pop("dp_rank")
        del load["timestamp"]
        sections = {"": load, "spec_": load.pop("speculative", {}), "queues_": load.pop("queues", {})}
        for prefix, values in sections.items():
            for name, value in values.items():
                samples.setdefault(f"sglang_{prefix}{name}", []).append(f'{{dp_rank="{rank}"}} {value}\n')
    return "".join(f"# TYPE {name} gauge\n{''.join(name + each for each in ranks)}" for name, ranks in samples.items())
