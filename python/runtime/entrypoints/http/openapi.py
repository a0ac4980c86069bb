"""What /openapi.json says beyond FastAPI's description of the routes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from runtime.entrypoints.http.responses import AnthropicError, ErrorBody

SCHEMAS = "#/components/schemas/{model}"
BODY_OPTIONAL = ("/start_profile", "/stop_profile")


def describe(app: FastAPI) -> None:
    """Make /openapi.json say how keys are sent, and leave out FastAPI's own validation error, which never occurs here."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        schema = generate()
        if "security" not in schema:
            _amend(schema)
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


def _restore_int64(node: Any) -> None:
    """Write bounds as the integers that they are: FastAPI makes them floats, and the largest int64 as a float is no int64."""
    if isinstance(node, list):
        for inner in node:
            _restore_int64(inner)
    elif isinstance(node, dict):
        for key in node.keys() & {"minimum", "maximum"}:
            if isinstance(node[key], float) and node[key].is_integer():
                node[key] = min(int(node[key]), 2**63 - 1)
        for inner in node.values():
            _restore_int64(inner)
