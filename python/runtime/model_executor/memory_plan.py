"""The memory plan: a pure function that divides the device's memory and gives the KV cache the remainder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.config.cache import check_pool
from runtime.config.host_memory import MIB
from runtime.errors import ConfigError

SAFETY_FRACTION = 0.004
"""Fraction of the device reserved for the allocator's rounding and fragmentation, which takes at most 0.3 % for batch sizes 1-512 and
chunks of 512-16384 tokens."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Sizes known before KV is allocated, in bytes.

    Attributes:
        total: memory of the device.
        free: free memory after weights, row state, inputs and outputs are allocated.
        activations: peak of the largest chunk and of sampling, measured by a run.
        reservations: memory that each graph runner will allocate, by name.
        experts, states: bytes of the target's routed experts and recurrent states, parts of the memory that is not free.
        bytes_per_slot: KV bytes of one position, target and draft together: the sum of `KVSpec.bytes_per_slot`.
    """

    total: int
    free: int
    activations: int
    reservations: dict[str, int]
    bytes_per_slot: int
    experts: int = 0
    states: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The result of `plan_memory`.

    Attributes:
        num_pages: pages of the KV cache.
        table: bytes of each part, by name.
    """

    num_pages: int
    table: dict[str, int]

    def with_pages(self, num_pages: int, page_bytes: int) -> MemoryPlan:
        """The plan with fewer pages of `page_bytes` bytes, and more free memory."""
        kv = (num_pages + 1) * page_bytes
        left = self.table["left free"] + self.table["KV cache"] - kv
        return MemoryPlan(num_pages, {**self.table, "KV cache": kv, "left free": left})

    def lines(self, captured: Mapping[str, int], free: int) -> list[str]:
        """A table of reserved and used memory for the log, in MiB.

        Args:
            captured: bytes that each graph runner takes, by name.
            free: free bytes of the device after capture, before activations are allocated.
        """
        total, unused = sum(self.table.values()), free - self.table["activations"]
        lines = [f"{'MiB':<24}{'reserved':>12}{'used':>12}{'unused':>12}"]
        for name, reserved in self.table.items():
            if name != "left free":
                lines.append(_line(name, reserved, captured.get(name, reserved)))
        share = f"  {unused / total:.2%} of the device"
        return [*lines, _line("all", total - self.table["left free"], total - unused, unused) + share]


def _line(name: str, reserved: int, used: int, unused: int | None = None) -> str:
    left = reserved - used if unused is None else unused
    return f"{name:<24}" + "".join(f"{size / MIB:>12,.0f}" for size in (reserved, used, left))


def _mib(size: int) -> int:
    """Bytes rounded up to MiB."""
    return -(-size // MIB)


def plan_memory(budget: Budget, page_size: int, wanted_tokens: int | None, fraction: float | None, min_tokens: int) -> MemoryPlan:
    """Divide the device's memory.

    Args:
        wanted_tokens: KV slots that the user asked for (--max-total-tokens), or None for all that fit.
        fraction: share of the device for weights and KV (--mem-fraction-static), or None to derive it.
        min_tokens: slots that one request needs.

    Raises:
        ConfigError: the KV cache would be too small; the message names the flag and the amount.
    """
    weights = budget.total - budget.free
    safety = int(budget.total * SAFETY_FRACTION)
    reserved = sum(budget.reservations.values())
    available = budget.free - budget.activations - reserved - safety
    if fraction is not None:
        available = int(budget.total * fraction) - weights
    page_bytes = budget.bytes_per_slot * page_size
    pages = max(available, 0) // page_bytes - 1  # page 0 is padding
    if wanted_tokens is not None:
        check_pool(wanted_tokens, min_tokens, page_size)
        if wanted_tokens // page_size > pages >= -(-min_tokens // page_size):
            raise ConfigError(
                f"--max-total-tokens {wanted_tokens} needs {_mib((wanted_tokens // page_size + 1) * page_bytes):,} MiB of KV, "
                f"but only {max(available, 0) // MIB:,} MiB are left. Lower it to {pages * page_size}."
            )
        pages = min(pages, wanted_tokens // page_size)
    if pages * page_size < min_tokens:
        short = _mib((-(-min_tokens // page_size) + 1) * page_bytes - available)
        flag = (
            "Raise --mem-fraction-static."
            if fraction is not None
            else "Lower --chunked-prefill-size, --cuda-graph-max-bs or --context-length."
        )
        raise ConfigError(f"The KV cache is {short:,} MiB short of the {min_tokens} tokens that one request needs. {flag}")
    kv = (pages + 1) * page_bytes
    parts = {"expert weights": budget.experts, "recurrent states": budget.states}
    held = {"weights and context": weights - sum(parts.values())} | {name: size for name, size in parts.items() if size}
    table = {**held, "activations": budget.activations, **budget.reservations, "KV cache": kv}
    table["left free"] = budget.total - sum(table.values())
    return MemoryPlan(pages, table)
