"""The KV pages that all decoding requests have in common: a prompt's beginning that many requests share, such as a system prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.mem_cache.kv_page_manager import RequestPages


class CommonPages:
    """Counts the leading pages that all requests of a step share; remembers the result for as long as the same requests decode."""

    def __init__(self) -> None:
        self._requests: list[RequestPages] = []
        self._count = 0

    def count(self, requests: list[RequestPages]) -> int:
        """The number of leading pages that all `requests` have in the prefix cache; 0 for fewer than two."""
        if requests != self._requests:  # compares identities
            self._requests, self._count = requests, _count(requests)
        return self._count


def _count(requests: Sequence[RequestPages]) -> int:
    most = min((pages.shared for pages in requests), default=0) if len(requests) > 1 else 0
    if not most or len({int(pages.ids[0]) for pages in requests}) > 1:
        return 0
    ids = np.stack([pages.ids[:most] for pages in requests])
    differs = (ids != ids[0]).any(0)
    return int(differs.argmax()) if differs.any() else most
