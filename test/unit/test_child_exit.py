"""How a child process exits."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from msgspec import structs

from runtime.distributed.rank_place import RankPlace
from runtime.distributed.rendezvous import Rendezvous
from runtime.entrypoints.child import ChildConfig
from runtime.entrypoints.child_process import environment_of, start_child
from unit.tiny import tiny_runtime

CHILD = """
import atexit, os, sys
from runtime.entrypoints.child import run
from runtime.errors import ConfigError

def serve(child, report):
    {body}

role, status_fd = sys.argv[1], int(sys.argv[2])
atexit.register(os.write, status_fd, b"torn down")
sys.exit(run(role, status_fd, serve))
"""


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(("body", "status"), [("pass", 0), ("raise RuntimeError", 1), ("raise ConfigError('no')", 2)])
def test_a_rank_exits_without_tearing_down_the_interpreter(tmp_path: Path, body: str, status: int, sharded: bool) -> None:
    """Threads of gloo and NCCL still run then: they abort the process when another rank ends first."""
    config = ChildConfig(config=tiny_runtime(), folder=str(tmp_path), parent=os.getpid())
    if sharded:
        config = structs.replace(config, place=RankPlace(rank=1, rendezvous=Rendezvous.in_folder(str(tmp_path))))
    process, status_fd = start_child("worker-1", [sys.executable, "-c", CHILD.format(body=body)], config, environment_of(config))
    with os.fdopen(status_fd, "rb") as pipe:
        reported = pipe.read()
    assert process.wait() == status
    assert (b"torn down" in reported) is not sharded
    assert (b"ChildFinished" if status == 0 else b"ChildFailed") in reported
