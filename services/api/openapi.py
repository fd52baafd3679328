"""The OpenAPI document: what FastAPI says of the routes, and what middlewares and dependencies may answer besides."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from services.api.problems import responses
from services.api.views import ProblemDetails

ANYWHERE = (400,)  #: an unknown Host
WITH_KEYS = (401, 403, 429)
OPEN = ("/healthz", "/readyz")  #: for machines that have no key
_NOTHING_SAID = "Successful Response"
REFERENCE = "#/components/schemas/{model}"


def describe(app: FastAPI, with_keys: bool) -> None:
    """Complete the document of ``app``; without keys no operation asks for one."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(generate(), with_keys)
        return app.openapi_schema

    app.openapi_schema = None
    app.openapi = openapi  # type: ignore[method-assign]


def _completed(document: dict[str, Any], with_keys: bool) -> dict[str, Any]:
    schema = ProblemDetails.model_json_schema(ref_template=REFERENCE)
    document["components"]["schemas"] |= schema.pop("$defs") | {"ProblemDetails": schema}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete(operation, path, method, with_keys)
    if not with_keys:
        document["components"].pop("securitySchemes", None)
    return document


def _without_null(schema: dict[str, Any]) -> None:
    """Leave out what only says that a parameter may be missing: a header or query cannot be null."""
    options = [option for option in schema.pop("anyOf", ()) if option != {"type": "null"}]
    if len(options) == 1:
        schema |= options[0]
    elif options:
        schema["anyOf"] = options


def _complete(operation: dict[str, Any], path: str, method: str, with_keys: bool) -> None:
    """Add the problems that come from outside the route: of Host, key, scope, rate, and of a foreign page."""
    for parameter in operation.get("parameters", ()):
        _without_null(parameter["schema"])
    statuses = [*ANYWHERE, *(WITH_KEYS if path not in OPEN else ())]
    if not with_keys:
        operation.pop("security", None)
        statuses = [status for status in statuses if status != 401 and (status != 403 or method != "get")]
    for described in operation["responses"].values():
        if described["description"] == _NOTHING_SAID:
            described["description"] = "As asked."
    for status, described in responses(*statuses).items():
        operation["responses"].setdefault(str(status), described)
    operation["responses"] = dict(sorted(operation["responses"].items()))
