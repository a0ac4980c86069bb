"""Bytes to pages: a pure function that gives KV what is left, and says what everybody got."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.errors import ConfigError

MIB = 1 << 20
SAFETY_FRACTION = 0.004
"""Of the device: what the allocator loses to rounding and fragments, seen at most 0.3 % over batch 1-512 and chunk 512-16384."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What is known before KV is allocated, in bytes.

    Attributes:
        total: of the device.
        free: now, with the weights loaded and what is of a fixed size allocated: row state, inputs.
        activations: peak of the largest chunk and of sampling, measured by a run.
        reservations: stated by whoever allocates later, by name: the graph runners.
        bytes_per_slot: KV of one position, target and draft together.
    """

    total: int
    free: int
    activations: int
    reservations: dict[str, int]
    bytes_per_slot: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Who gets what, in bytes; `num_pages` is what KV came to."""

    num_pages: int
    table: dict[str, int]

    def lines(self, captured: Mapping[str, int], free: int) -> list[str]:
        """Plan against use as a table for the log, in MiB.

        Args:
            captured: bytes that each graph runner took, by name.
            free: bytes of the device after capture; the activations will come out of them, as a run measured.
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


def _up(size: int) -> int:
    """MiB that hold so many bytes."""
    return -(-size // MIB)


def plan_memory(
    budget: Budget,
    page_size: int,
    wanted_tokens: int | None,
    fraction: float | None,
    least_tokens: int,
) -> MemoryPlan:
    """Divide the device's memory.

    Args:
        wanted_tokens: KV slots that the user asked for (--max-total-tokens), or None for all that fits.
        fraction: share of the device for weights and KV (--mem-fraction-static), or None to derive it.
        least_tokens: fewer slots than this cannot serve one request.

    Raises:
        ConfigError: KV would be too small; the message names the flag and the amount.
    """
    weights = budget.total - budget.free
    safety = int(budget.total * SAFETY_FRACTION)
    reserved = sum(budget.reservations.values())
    room = budget.free - budget.activations - reserved - safety
    if fraction is not None:
        room = int(budget.total * fraction) - weights
    page_bytes = budget.bytes_per_slot * page_size
    pages = max(room, 0) // page_bytes - 1  # page 0 is padding
    if wanted_tokens is not None:
        if wanted_tokens // page_size * page_size < least_tokens:
            raise ConfigError(f"--max-total-tokens is {wanted_tokens}; one request needs {least_tokens}, so raise it or leave it out")
        if wanted_tokens // page_size > pages:
            raise ConfigError(
                f"--max-total-tokens {wanted_tokens} needs {_up((wanted_tokens // page_size + 1) * page_bytes):,} MiB of KV "
                f"and {max(room, 0) // MIB:,} MiB are left; lower it to {max(pages, 0) * page_size}"
            )
        pages = wanted_tokens // page_size
    if pages * page_size < least_tokens:
        short = _up((-(-least_tokens // page_size) + 1) * page_bytes - room)
        flag = (
            "raise --mem-fraction-static"
            if fraction is not None
            else "lower --chunked-prefill-size, --cuda-graph-max-bs or --context-length"
        )
        raise ConfigError(f"KV cache is {short:,} MiB short of the {least_tokens} tokens that one request needs; {flag}")
    kv = (pages + 1) * page_bytes
    table = {"weights and context": weights, "activations": budget.activations, **budget.reservations, "KV cache": kv}
    table["left free"] = budget.total - sum(table.values())
    return MemoryPlan(pages, table)
