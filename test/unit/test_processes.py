"""How the processes of a server end."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from event_loop import in_event_loop
from runtime.entrypoints.processes import Runtime
from runtime.errors import ServingError


@in_event_loop
async def test_the_socket_folder_is_removed_before_ray_which_may_take_longer_than_the_server_may(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[bool] = []

    class SlowRay:
        async def start(self, config: Any, command: Any) -> Any:
            self.folder = config.folder
            raise ServingError("a rank failed")

        def release(self) -> None:
            left.append(Path(self.folder).exists())

    monkeypatch.setitem(sys.modules, "runtime.entrypoints.ray_ranks", SimpleNamespace(RayRanks=SlowRay))
    runtime = Runtime(SimpleNamespace(parallel=SimpleNamespace(tp_size=2, executor="ray")), None)  # type: ignore[arg-type]
    with pytest.raises(ServingError):
        await runtime.start()
    await runtime.stop()
    assert left == [False]
