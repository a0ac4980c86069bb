"""The cost of a body: counted while the body arrives, and equal to what a JSON parser finds."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
from front import front
from hypothesis import given
from hypothesis import strategies as st

from event_loop import in_event_loop
from runtime.entrypoints.http.body_cost import BodyCost

JSON = st.recursive(
    st.none() | st.integers(-9, 9) | st.text('"\\\\[]{},:a\u00e9', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\\\,[{a', max_size=3), inner, max_size=4),
    max_leaves=20,
)


def expected(value: Any) -> tuple[int, int, int]:
    """Commas, colons and containers."""
    if not isinstance(value, (list, dict)):
        return 0, 0, 0
    inner = [expected(one) for one in (value.values() if isinstance(value, dict) else value)]
    commas, colons, containers = map(sum, zip((0, 0, 0), *inner, strict=True))
    return commas + max(0, len(value) - 1), colons + len(value) * isinstance(value, dict), containers + 1


@given(value=JSON, ascii_only=st.booleans(), seed=st.integers(0, 99))
def test_a_body_in_any_chunks_is_counted_as_json_reads_it(value: Any, ascii_only: bool, seed: int) -> None:
    raw, rng, cost = json.dumps(value, ensure_ascii=ascii_only).encode(), random.Random(seed), BodyCost()
    start = 0
    while start < len(raw):
        end = start + rng.randint(1, 5)
        cost.feed(raw[start:end])
        start = end
    assert (cost.commas, cost.colons, cost.containers, cost.bytes) == (*expected(orjson.loads(raw)), len(raw))


@in_event_loop
async def test_bodies_of_many_values_are_refused_before_they_are_parsed() -> None:
    async with front(max_parse_ms=50, max_body_mib=8) as f:
        for raw in (
            b"[" + b"[]," * (2 << 20) + b"[]]",
            b'{"messages": [{"role": "user", "content": [' + b'{"type":"text","text":""},' * 200_000 + b"1]}]}",
            b'{"prompt": [' + b"1," * (2 << 20) + b"1]}",
            b'{"prompt": "a"' + b"".join(b',"%d":1' % i for i in range(200_000)) + b"}",
        ):
            answer = await f.client.post("/v1/completions", content=raw)
            assert answer.status_code == 413
            assert "--max-parse-ms" in answer.json()["error"]["message"]
        text = "[{,}]" * 100_000  # in a string it is text
        assert (await f.post("/tokenize", {"prompt": text})).status_code == 200
        assert await f.fine()
