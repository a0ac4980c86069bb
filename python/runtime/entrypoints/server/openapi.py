"""Extends FastAPI's /openapi.json by keys and limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from runtime.entrypoints.http.body_schema import LENGTHS
from runtime.entrypoints.http.responses import AnthropicError, ErrorBody
from runtime.managers.tokenizer_manager import TokenizerManager

SCHEMAS = "#/components/schemas/{model}"
BODY_OPTIONAL = ("/start_profile", "/stop_profile")
TOKEN_IDS: tuple[str, ...] = ("input", "input_ids", "items", "label_token_ids", "prompt", "query", "stop_token_ids", "tokens")


def describe(app: FastAPI, manager: TokenizerManager) -> None:
    """Add to /openapi.json how keys are sent and the limits of this server.

    FastAPI's own validation error never occurs here and is removed.
    """
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generate()
        if "security" not in schema:
            _amend(schema)
            _bound(schema["components"]["schemas"], manager)
            rank = schema["paths"]["/v1/loads"]["get"]["parameters"][0]
            rank["schema"] = {"enum": [str(group) for group in range(manager.limits.groups)]}
        return schema

    app.openapi = openapi


def _amend(schema: dict[str, Any]) -> None:
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    schema["paths"]["/v1/loads"]["get"]["responses"]["200"]["content"]["text/plain"] = {"schema": {"type": "string"}}
    for path in BODY_OPTIONAL:
        schema["paths"][path]["post"]["requestBody"]["required"] = False
    schemas = schema["components"]["schemas"]
    _restore_int64(schemas)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for form in (ErrorBody, AnthropicError):
        described = form.model_json_schema(ref_template=SCHEMAS)
        schemas |= {**described.pop("$defs", {}), form.__name__: described}
    anthropic = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}, "anthropic": anthropic}
    schema["security"] = [{}, {"key": []}, {"anthropic": []}]


def _bound(schemas: dict[str, Any], manager: TokenizerManager) -> None:
    """Write the limits of the model and of the flags to the request fields."""
    config, vocab_size = manager.config, manager.limits.vocab_size
    highest = dict.fromkeys(TOKEN_IDS, vocab_size - 1) | dict.fromkeys(LENGTHS, manager.max_context_len)
    highest |= {"dimensions": manager.model_config.hidden_size}
    for title, schema in schemas.items():
        fields = schema.get("properties", {})
        for name in fields.keys() & highest.keys():
            for node in () if title == "MessagesBody" else _objects(fields[name]):  # /v1/messages reduces max_tokens to the context
                if node.get("type") == "integer" and "maximum" in node:
                    node["maximum"] = highest[name]
        if "logit_bias" in fields:
            fields["logit_bias"]["anyOf"][0]["propertyNames"] = {"pattern": f"^0*({up_to(vocab_size - 1)})$", "maxLength": 9}
    if not config.server.trust_request_chat_template:
        schemas["ChatBody"]["properties"]["chat_template"] = {"type": "null"}
    depths = {} if config.speculative is None else {0, config.speculative.num_steps, *config.speculative.depths}
    state = schemas["InternalState"]["properties"]
    state["speculative_num_steps"] = {"enum": [*sorted(depths), "auto", None] if depths else [None]}
    if not depths:
        state["speculative_synthetic_accept_length"] = {"type": "null"}


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value, itself included."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(inner)


def up_to(highest: int) -> str:
    """A regular expression of the decimal numbers from 0 to `highest`, without leading zeros."""
    digits = str(highest)
    shorter = [f"[0-9]{{1,{len(digits) - 1}}}"] if len(digits) > 1 else []
    same = [
        f"{digits[:i]}[{int(i == 0 and len(digits) > 1)}-{int(digit) - 1}][0-9]{{{len(digits) - 1 - i}}}"
        for i, digit in enumerate(digits)
        if int(digit) > (i == 0 and len(digits) > 1)
    ]
    return "|".join([*shorter, *same, digits])


def _restore_int64(schemas: dict[str, Any]) -> None:
    """Write bounds as integers. FastAPI writes them as floats, and the largest int64 as a float exceeds int64."""
    for node in _objects(schemas):
        for key in node.keys() & {"minimum", "maximum"}:
            if isinstance(node[key], float) and node[key].is_integer():
                node[key] = min(int(node[key]), 2**63 - 1)
