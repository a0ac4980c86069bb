"""How much main memory this process may use: the machine's, or what its control groups leave of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes, and which limit counts.

    Attributes:
        total: what this process and those beside it may use together.
        available: what is left of it.
        cgroup: the folder of the control group whose limit counts; None if the machine's memory does.
    """

    total: int
    available: int
    cgroup: Path | None = None

    @property
    def source(self) -> str:
        """Which limit counts, for the log."""
        return "the machine's memory" if self.cgroup is None else f"the limit of the control group {self.cgroup}"


def host_memory(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> HostMemory:
    """The smallest of the machine's memory and the limits of this process's control groups, of version 1 and 2.

    Args:
        cgroups: where the hierarchies are mounted.
        membership: names the process's group in each.
    """
    machine = psutil.virtual_memory()
    tightest = HostMemory(machine.total, machine.available)
    for group in _groups(cgroups, membership):
        limit, used = _limit(group), _used(group)
        if limit is None or limit >= machine.total:
            continue
        available = max(0, min(limit - used, machine.available))
        if available < tightest.available or tightest.cgroup is None:
            tightest = HostMemory(limit, available, group)
    return tightest


def _groups(cgroups: Path, membership: Path) -> Iterator[Path]:
    """The folders of the process's groups and of the groups around them. A container shows its own group as the root."""
    for line in text_of(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        inner = root / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root) and folder.is_dir())


def _limit(group: Path) -> int | None:
    texts = (text_of(group / name) for name in ("memory.max", "memory.limit_in_bytes"))
    limits = [int(text) for text in texts if text.isdigit()]
    return min(limits) if limits else None


def _used(group: Path) -> int:
    """Bytes in use, without the page cache, which the kernel gives back."""
    usage = text_of(group / "memory.current") or text_of(group / "memory.usage_in_bytes")
    fields = dict(line.split() for line in text_of(group / "memory.stat").splitlines() if len(line.split()) == 2)
    prefix = "total_" if "total_cache" in fields else ""
    cache = sum(int(fields.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
    return max(0, int(usage) - cache) if usage.isdigit() else 0


def text_of(path: Path) -> str:
    """The text of a file of the kernel; empty where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
