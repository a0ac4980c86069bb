"""Runs the other ranks of a model whose rank 0 is this process, for checks without a server."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.config.runtime_config import RuntimeConfig
from runtime.distributed.rank_place import RankPlace, places_on_node
from runtime.entrypoints.child import ChildConfig
from runtime.entrypoints.child_process import COMMAND, environment_of, start_child
from runtime.entrypoints.socket_folder import make_socket_folder
from runtime.errors import ConfigError


@contextmanager
def other_ranks(config: RuntimeConfig) -> Iterator[RankPlace]:
    """Run the other ranks inside the `with` block; yields the place of rank 0. Raises `ConfigError` for several nodes."""
    if config.parallel.nnodes > 1:
        raise ConfigError("--nnodes must be 1 for this check; run it on one node")
    folder = make_socket_folder()
    place, *others = places_on_node(config.parallel, folder)
    ranks = list[tuple[subprocess.Popen[bytes], int]]()
    try:
        for other in others:
            child = ChildConfig(config=config, folder=folder, parent=os.getpid(), place=other)
            ranks.append(start_child(f"worker-{other.rank}", COMMAND, child, environment_of(child), start_new_session=True))
        yield place
    finally:
        for process, status_pipe in ranks:
            process.kill()
            process.wait()
            os.close(status_pipe)
        shutil.rmtree(folder, ignore_errors=True)
