"""Check that the embedded model in a small control group serves 100 requests or refuses to start, and is never killed."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LIMITS_MIB = (700, 1200, 2000)
REQUESTS = 100
START_SECONDS = 300.0
ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
PORT = 31099


def make_group(limit_mib: int) -> Path:
    """Create a control group, version 1 or 2, with this limit. Needs root."""
    root = next(root for root in ROOTS if root.is_dir())
    group = root / f"talon-test-{os.getpid()}-{limit_mib}"
    group.mkdir()
    name = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
    (group / name).write_text(str(limit_mib << 20))
    return group


def kills(group: Path) -> int:
    """How often the kernel killed a process of the group."""
    file = group / "memory.events" if (group / "memory.events").exists() else group / "memory.oom_control"
    fields = dict(line.split() for line in file.read_text().splitlines())
    return int(fields.get("oom_kill", 0))


def peak_mib(group: Path) -> int:
    """The group's peak memory, including the page cache; -1 if unknown."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group / name).exists():
            return int((group / name).read_text()) >> 20
    return -1


def start(group: Path, flags: Sequence[str]) -> subprocess.Popen[str]:
    """Start a server with all its processes in the group."""
    join = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    command = ["bash", "-c", join, "bash", sys.executable, "-m", "runtime.launch_server", "--port", str(PORT), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ready(server: subprocess.Popen[str]) -> str:
    """The server's output up to the ready line, or to its end."""
    assert server.stdout is not None
    lines = []
    for line in server.stdout:
        lines.append(line)
        if line.startswith("curl "):
            break
    return "".join(lines)


def ask(number: int) -> bool:
    """Whether a request of some hundred tokens is answered."""
    body = {"prompt": f"Request {number}: " + "once upon a time " * 60, "max_tokens": 32, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
            return json.load(answer)["usage"]["completion_tokens"] == 32
    except OSError:
        return False


def measure(limit_mib: int, flags: Sequence[str]) -> dict[str, Any]:
    """Run a server under one limit and return the outcome."""
    group = make_group(limit_mib)
    server = start(group, flags)
    try:
        output = ready(server)
        refused = server.poll() is not None or "talon: ready" not in output
        with ThreadPoolExecutor(8) as clients:
            answered = 0 if refused else sum(clients.map(ask, range(REQUESTS)))
        if not refused:
            server.send_signal(signal.SIGTERM)
        status = server.wait(60)
        message = next((line.strip() for line in output.splitlines() if line.startswith("talon: The server needs")), "")
        return {
            "limit_mib": limit_mib, "outcome": "refused" if refused else "served", "answered": answered, "status": status,
            "message": message, "killed": kills(group), "peak_mib": peak_mib(group),
        }  # fmt: skip
    finally:
        server.kill()
        server.wait()
        time.sleep(1.0)
        group.rmdir()


def main() -> int:
    """Print one JSON line per limit; exit 1 if a process was killed or a request was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limits", type=int, nargs="+", default=LIMITS_MIB, help="MiB")
    bad = 0
    for limit in parser.parse_args().limits:
        row = measure(limit, ("--device", "cpu"))
        print(json.dumps(row), flush=True)
        bad += row["killed"] > 0 or not (row["answered"] == REQUESTS or (row["outcome"] == "refused" and row["message"]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
