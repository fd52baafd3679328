"""The OpenAPI document: FastAPI's description of the routes, completed by the guards' answers."""

from __future__ import annotations

from fastapi import FastAPI

from cache.json_object import Json
from kd.client.wire.problems import ProblemDetails
from services.api.answers.problems import describe_problems

#: Statuses that every path may answer with: 400 for an unknown Host.
ANYWHERE = (400,)
#: Statuses of every path that asks for a key.
WITH_KEYS = (401, 403, 429)
#: Paths that ask for no key, because probes have none.
OPEN = ("/healthz", "/readyz")
#: FastAPI's description of an answer that the route does not describe.
_DEFAULT_DESCRIPTION = "Successful Response"
#: Where the document holds the schema of a model.
REFERENCE = "#/components/schemas/{model}"


def complete_openapi(app: FastAPI, with_keys: bool) -> None:
    """Make ``app`` serve the complete document; without keys no operation asks for a key."""
    generate = app.openapi

    def openapi() -> Json:
        if app.openapi_schema is None:
            document = app.openapi_schema = generate()
            # FastAPI adds the models that routes return; problems come from outside of the routes.
            schema = ProblemDetails.model_json_schema(ref_template=REFERENCE)
            document["components"]["schemas"] |= schema.pop("$defs") | {"ProblemDetails": schema}
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    _complete(operation, path, method, with_keys)
            if not with_keys:
                document["components"].pop("securitySchemes", None)
        return app.openapi_schema

    app.openapi_schema = None
    app.openapi = openapi  # type: ignore[method-assign]


def _complete(operation: Json, path: str, method: str, with_keys: bool) -> None:
    """Add the answers that come from outside the route: wrong Host, Origin, key, scope or rate."""
    for parameter in operation.get("parameters", ()):
        schema = parameter["schema"]
        # Null only means "may be missing": no header or query can be null.
        options = [option for option in schema.pop("anyOf", ()) if option != {"type": "null"}]
        if len(options) == 1:
            schema |= options[0]
        elif options:
            schema["anyOf"] = options
    statuses = [*ANYWHERE, *(WITH_KEYS if path not in OPEN else ())]
    if not with_keys:
        operation.pop("security", None)
        # A 403 stays for changes: it also refuses those of a foreign page.
        unneeded = (401, 403) if method == "get" else (401,)
        statuses = [status for status in statuses if status not in unneeded]
    for described in operation["responses"].values():
        if described["description"] == _DEFAULT_DESCRIPTION:
            described["description"] = "The request succeeded."
    for status, described in describe_problems(*statuses).items():
        operation["responses"].setdefault(str(status), described)
    operation["responses"] = dict(sorted(operation["responses"].items()))
