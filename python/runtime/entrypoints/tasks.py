"""Ends asyncio tasks."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks that still run and wait until they have cleaned up. Their results and exceptions count as read."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
