"""Check a GPU machine without a network: package versions, test/gpu, and selected benchmarks. Results and logs go to a folder.

bash scripts/gpu_check.sh FOLDER [--no-tests] ["BENCHMARK ARGUMENTS" ...]
bash scripts/gpu_check.sh /tmp/out "modes --batch-sizes 1,4,16,32" "tuning.gemms --rows 1,4"

The environment must have the package's cuda extra (pip install -e ".[cuda,test]"). Writes FOLDER/gpu_check.json; runs
everything, then exits with 1 if anything failed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT)]

from benchmark.machine import version  # noqa: E402 - the path is set above
from benchmark.server import environment  # noqa: E402

TAIL = 25
"""Number of lines shown from each log."""
MAX_WORKERS = 10
"""Most processes that run test/gpu in parallel, since most tests wait for compilers. Tests that share a slow fixture run in one process."""
WORKER_BYTES = 12 << 30
"""GPU memory for each of these processes."""


def main(argv: list[str]) -> int:
    """Return 0 if everything passed, 1 if something failed, 2 for wrong usage."""
    if not argv or argv[0].startswith("-"):
        print(__doc__)
        return 2
    folder, rest = Path(argv[0]).resolve(), argv[1:]
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    tests = rest[:1] != ["--no-tests"]
    found: dict[str, Any] = {"device": device(), "versions": versions(), "tests": None, "benchmarks": []}
    for name, one in found["versions"].items():
        print(f"{name:20} {one['found'] or 'missing':16} required {one['wanted']}")
    print(f"device {found['device']}")
    if tests:
        found["tests"] = run_tests(folder)
    for number, line in enumerate(rest if tests else rest[1:], 1):
        found["benchmarks"].append(run_benchmark(line, number, folder))
    found["failed"] = failures(found)
    (folder / "gpu_check.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("failed: " + "; ".join(found["failed"]) if found["failed"] else "all checks passed")
    return 1 if found["failed"] else 0


def device() -> str | None:
    """The GPU's name, or None."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def versions() -> dict[str, dict[str, str | None]]:
    """The installed and the required version of each package that the cuda extra pins."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(r"^cuda = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)  # Python 3.10 has no tomllib
    assert extra is not None, "pyproject.toml has a cuda extra"
    pins = dict(pin.split("==") for pin in re.findall(r'"([^"]+==[^"]+)"', extra[1]))
    return {name: {"found": (version(name) or "").partition("+")[0] or None, "wanted": wanted} for name, wanted in pins.items()}


def workers() -> str:
    """How many processes run test/gpu."""
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    return str(max(1, min(MAX_WORKERS, memory // WORKER_BYTES)))


def run_tests(folder: Path) -> dict[str, Any]:
    """Run test/gpu, and return the numbers of passed, failed and skipped tests."""
    report = folder / "pytest.xml"
    options = ["-q", "-n", workers(), "--dist", "loadgroup", "--maxfail=20", "--durations=30", "-p", "no:cacheprovider"]
    code, seconds = _run(["-m", "pytest", "test/gpu", *options, f"--junitxml={report}"], folder / "pytest.log")
    found: dict[str, Any] = {"exit": code, "seconds": seconds, "tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in ElementTree.parse(report).getroot().iter("testsuite") if report.is_file() else ():
        for count in ("tests", "failures", "errors", "skipped"):
            found[count] += int(suite.get(count, "0"))
    return found


def run_benchmark(line: str, number: int, folder: Path) -> dict[str, Any]:
    """Run one benchmark with its arguments; results and log go to `folder`."""
    print(f"== benchmark.{line}")
    name, *arguments = shlex.split(line)
    code, seconds = _run(["-m", f"benchmark.{name}", *arguments, "--out", str(folder)], folder / f"{number}-{name}.log")
    return {"benchmark": line, "exit": code, "seconds": seconds}


def _run(command: list[str], log: Path) -> tuple[int, float]:
    """Run Python with this checkout's packages; return the exit status and the seconds."""
    settings = environment() | {"PYTHONUNBUFFERED": "1"}
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run([sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, env=settings, check=False)
    print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]))
    return done.returncode, round(time.monotonic() - started, 1)


def failures(found: dict[str, Any]) -> list[str]:
    """One line per failed check."""
    lines = [] if found["device"] else ["there is no CUDA device"]
    lines += [
        f"{name} is {v['found'] or 'missing'}, required {v['wanted']}" for name, v in found["versions"].items() if v["found"] != v["wanted"]
    ]
    if found["tests"] and found["tests"]["exit"]:
        lines.append("test/gpu")
    return lines + [f"benchmark.{run['benchmark']}" for run in found["benchmarks"] if run["exit"]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
