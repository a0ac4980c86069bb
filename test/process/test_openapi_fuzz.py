"""A fuzzer driven by /openapi.json finds no server error, no undocumented answer, and nothing wrongly accepted or refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
EXAMPLES, FIXED = int(os.environ.get("TALON_FUZZ_EXAMPLES", "40")), "TALON_FUZZ_EXAMPLES" not in os.environ
CONFIG = schemathesis.Config.from_path(fake.ROOT / "schemathesis.toml")

CHECKS: Any = [
    *(not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance),
    *(unsupported_method, positive_data_acceptance, negative_data_rejection),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fake.Server]:
    folder = Path(tmp_path_factory.mktemp("model"))
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    with fake.serving(
        fake.dummy_model(folder / "model"), "--chat-template", str(template), "--profile", str(folder), behaviour="robust"
    ) as server:
        yield server


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_answer_is_documented(server: fake.Server, mode: GenerationMode) -> None:
    schema, seen = schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=CONFIG), set[str]()
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # nothing to get wrong
        endpoint = f"{operation.definition.raw['summary']} {operation.definition.raw.get('requestBody')}"
        examples = max(EXAMPLES // 8, 1) if endpoint in seen else EXAMPLES  # fewer for a second path of the same endpoint
        seen.add(endpoint)

        @settings(max_examples=examples, deadline=None, derandomize=FIXED, suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy(generation_mode=mode))
        def fuzz(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS, timeout=30)

        fuzz()
