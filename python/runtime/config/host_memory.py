"""The main memory that this process may use: the machine's, or the limit of its cgroups."""

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
    """Bytes of memory, and the limit that determines them.

    Attributes:
        total: bytes that this process and others may use together.
        available: bytes of these that are free.
        cgroup: the folder of the cgroup whose limit applies; None if the machine's memory is the limit.
    """

    total: int
    available: int
    cgroup: Path | None = None

    @property
    def source(self) -> str:
        """The limit that applies, for the log."""
        return "the machine's memory" if self.cgroup is None else f"the limit of the control group {self.cgroup}"


def host_memory(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> HostMemory:
    """The smallest of the machine's memory and the limits of this process's control groups, of version 1 and 2.

    Args:
        cgroups: the mount point of the hierarchies.
        membership: the file that names the process's cgroup in each.
    """
    machine = psutil.virtual_memory()
    tightest = HostMemory(machine.total, machine.available)
    for group in _groups(cgroups, membership):
        limit = _limit(group)
        if limit is None or limit >= machine.total:
            continue
        available = max(0, min(limit - _used(group), machine.available))
        if available < tightest.available or tightest.cgroup is None:
            tightest = HostMemory(limit, available, group)
    return tightest


def _groups(cgroups: Path, membership: Path) -> Iterator[Path]:
    """The folders of the process's cgroups and of their parents. In a container, its own cgroup is the root."""
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
    """Bytes in use, without the page cache, which the kernel can reclaim."""
    usage = text_of(group / "memory.current") or text_of(group / "memory.usage_in_bytes")
    fields = dict(line.split() for line in text_of(group / "memory.stat").splitlines() if len(line.split()) == 2)
    prefix = "total_" if "total_cache" in fields else ""
    cache = sum(int(fields.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
    return max(0, int(usage) - cache) if usage.isdigit() else 0


def text_of(path: Path) -> str:
    """The text of a kernel file; empty if it does not exist."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
