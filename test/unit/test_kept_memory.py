"""A process gives memory back that it freed between blocks that live on, and keeps few compiled kernels."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import os, time
import psutil
from runtime.entrypoints import kept_memory

kept_memory.TRIM_SECONDS = 0.2
kept_memory.bound_kept_memory()
blocks = [bytes(2000) for _ in range(100_000)]
full = psutil.Process().memory_info().rss
blocks = blocks[::100]  # a block in use every 200 kB
deadline = time.monotonic() + 20
while full - psutil.Process().memory_info().rss < 100 << 20 and time.monotonic() < deadline:
    time.sleep(0.05)
print(full - psutil.Process().memory_info().rss > 100 << 20, os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"])
"""
KERNELS = """
import psutil
from runtime.entrypoints.kept_memory import bound_kept_memory

bound_kept_memory()
import torch

weight, used = torch.zeros(64, 64, dtype=torch.bfloat16), []
for rows in range(17, 400):
    torch.nn.functional.linear(torch.zeros(rows, 64, dtype=torch.bfloat16), weight)
    used.append(psutil.Process().memory_info().rss)
print(used[-1] - used[200] < 20 << 20)
"""


def said(script: str = SCRIPT, **variables: str) -> list[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "ONEDNN_", "LRU_"))}
    done = subprocess.run([sys.executable, "-c", script], env=env | variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_freed_memory_goes_back_to_the_system() -> None:
    assert said() == ["True", "64"]


def test_the_environment_wins() -> None:
    assert said(ONEDNN_PRIMITIVE_CACHE_CAPACITY="7") == ["True", "7"]


def test_kernels_of_many_shapes_take_bounded_memory() -> None:
    assert said(KERNELS) == ["True"]
