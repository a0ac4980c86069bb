"""The origin of a measurement: hardware, versions, commit, command."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("torch", "triton", "sglang-kernel", "flashinfer-python", "transformers", "numpy", "pyzmq", "uvicorn")

SHARED = ("device", "cores", "python")
"""Facts that all rows of a result file share, in addition to the number of GPUs and package versions."""

Machine = dict[str, Any]


class MachinesDiffer(Exception):
    """Rows of two machines or of two versions of a package cannot share a table; the message says what differs."""


def describe() -> Machine:
    """Device, CPU, memory and package versions of this machine."""
    gpus = _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader").splitlines()
    cpu = _first(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo")) or platform.processor() or platform.machine()
    memory_kib = _first(r"MemTotal:\s*(\d+)", Path("/proc/meminfo"))
    return {
        "device": gpus[0].split(",")[0].strip() if gpus else cpu,
        "gpus": gpus,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(int(memory_kib) / 2**20, 1) if memory_kib else None,
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := version(name))},
    }


def same(one: Machine, other: Machine) -> Machine:
    """`one`, with the packages of both.

    Raises:
        MachinesDiffer: they are not the same machine, or a package has two versions.
    """
    facts = [{**{name: m.get(name) for name in SHARED}, "number of GPUs": len(m["gpus"]), **m["packages"]} for m in (one, other)]
    for name, value in facts[0].items():
        if (found := facts[1].get(name, value)) != value:
            raise MachinesDiffer(f"{name} is {value!r} in one file and {found!r} in another")
    return one | {"packages": other["packages"] | one["packages"]}


def slug(machine: Machine) -> str:
    """The folder name of this machine's results: the GPU's name and, of several, their number; else `cpu-` and the number of cores."""
    if not machine["gpus"]:
        return f"cpu-{machine['cores']}"
    count = len(machine["gpus"])
    return gpu(machine) + (f"-x{count}" if count > 1 else "")


def gpu(machine: Machine) -> str:
    """The key of its GPU's name; empty without a GPU."""
    return re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-") if machine["gpus"] else ""


def commit() -> str:
    """The commit: TALON_COMMIT if set (for files without history), else that of the checkout, with `-dirty` if tracked files differ."""
    if named := os.environ.get("TALON_COMMIT"):
        return named
    found = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD").strip()
    if not found:
        return "unknown"
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no", "--", "python").strip()
    return f"{found}-dirty" if changed else found


def command() -> str:
    """The command line of the running script, in a portable form."""
    script, folder = Path(sys.argv[0]).resolve().with_suffix(""), ROOT / "benchmark"
    parts = script.relative_to(folder).parts if script.is_relative_to(folder) else (script.name,)
    return portable(" ".join(["python", "-m", ".".join(("benchmark", *parts)), *sys.argv[1:]]))


def portable(words: str) -> str:
    """A command or flags without the paths of this machine.

    `--out` is removed, paths in the checkout become relative to its root, and other absolute paths keep only their last part.
    """
    kept = re.sub(r"(^|\s)--out[ =]\S+", "", words)
    return re.sub(r"(?<![^\s=,])/[^\s,]+", lambda path: _portable_path(Path(path[0])), kept)


def _portable_path(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _output(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _first(pattern: str, file: Path) -> str | None:
    match = re.search(pattern, file.read_text(encoding="utf-8")) if file.is_file() else None
    return match.group(1).strip() if match else None


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
