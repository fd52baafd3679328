"""Every error of the API as a problem document (RFC 9457): what, where, and what to do."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from redis.exceptions import RedisError, ResponseError
from starlette.exceptions import HTTPException
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kd.errors import ConfigError, Problem
from kd.jobfile import problems_of
from services.schemas import FieldProblem, ProblemDocument

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = "2"

TITLES = {
    400: ("malformed-request", "The request cannot be read"),
    404: ("not-found", "Not found"),
    405: ("method-not-allowed", "Method not allowed"),
    413: ("too-large", "The request is too large"),
    422: ("invalid-job", "The request is not valid"),
    500: ("internal", "Internal error"),
    503: ("store-unavailable", "The job store does not answer"),
}

log = logging.getLogger("potstill.api")


class ApiProblem(Exception):
    """An answer that is a problem document."""

    def __init__(self, status: int, detail: str, remedy: str = "", slug: str | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.remedy, self.slug = status, detail, remedy, slug


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The problems that an operation may answer with, for its OpenAPI description."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}}
    return {status: {"description": TITLES[status][1], "content": content} for status in statuses}


def install(app: FastAPI) -> None:
    """Answer every error of ``app`` with a problem document."""
    app.add_exception_handler(ApiProblem, _on_problem)
    app.add_exception_handler(ConfigError, _on_config_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(RedisError, _on_redis_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_anything_else)


def respond(
    request: Request,
    status: int,
    detail: str,
    remedy: str = "",
    slug: str | None = None,
    errors: Iterable[Problem] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The problem document as a response."""
    default_slug, title = TITLES.get(status, ("error", "Error"))
    document = ProblemDocument(
        type=f"urn:potstill:problem:{slug or default_slug}",
        title=title,
        status=status,
        detail=detail,
        remedy=remedy,
        instance=request.url.path,
        errors=[FieldProblem(**problem.to_json()) for problem in errors],
    )
    return JSONResponse(document.model_dump(), status, headers=dict(headers or {}), media_type=MEDIA_TYPE)


def _on_problem(request: Request, error: Any) -> Response:
    return respond(request, error.status, error.detail, error.remedy, error.slug)


def _on_config_error(request: Request, error: Any) -> Response:
    return respond(request, 422, f"{len(error.problems)} problem(s): {error.detail}", errors=error.problems)


def _on_validation_error(request: Request, error: Any) -> Response:
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        detail = f"The body is not JSON: {errors[0]['ctx']['error']} at character {errors[0]['loc'][-1]}."
        return respond(request, 400, detail, "Send a JSON object; kd submit sends a YAML file as one.")
    elsewhere = {number: problem for number, item in enumerate(errors) if (problem := _beside_the_job(item))}
    inside = [{**item, "loc": item["loc"][1:]} for number, item in enumerate(errors) if number not in elsewhere]
    problems = [*elsewhere.values(), *problems_of(inside)]
    return respond(request, 422, "; ".join(map(str, problems)), errors=problems)


def _beside_the_job(item: Mapping[str, Any]) -> Problem | None:
    """What is wrong with a request whose body is no job yet; None for what is wrong inside the job."""
    if item["loc"][0] != "body":
        return Problem("", f"{item['loc'][0]} parameter {item['loc'][-1]}: {item['msg']}.")
    if item["loc"] == ("body",) and item["type"] == "missing":
        return Problem("", "the request has no body.", "Send a job as JSON with Content-Type: application/json.")
    if isinstance(item.get("input"), bytes):
        return Problem(
            "", "the body is not declared as JSON.", "Send it with the header Content-Type: application/json."
        )
    return None


def _on_redis_error(request: Request, error: Any) -> Response:
    # A plain ResponseError is a mistake of ours, save for the one by which a server with a full disk refuses to write.
    if type(error) is ResponseError and not str(error).startswith("MISCONF"):
        return _on_anything_else(request, error)
    log.warning("%s %s: Redis does not serve: %s", request.method, request.url.path, error)
    detail = f"The job store (Redis) does not serve: {type(error).__name__}. Running jobs go on; nothing is lost."
    headers = {"Retry-After": RETRY_SECONDS}
    return respond(
        request, 503, detail, "Try again in a moment, with the same Idempotency-Key if you sent one.", headers=headers
    )


def _on_http_exception(request: Request, error: Any) -> Response:
    if error.status_code == 405:
        allowed = ", ".join(sorted(_allowed_methods(request))) or error.headers["Allow"]
        return respond(
            request,
            405,
            f"{request.method} is not allowed on {request.url.path}.",
            f"Allowed: {allowed}.",
            headers={"Allow": allowed},
        )
    if error.status_code == 404:
        return respond(
            request, 404, f"There is nothing at {request.url.path}.", "GET /openapi.json lists what there is."
        )
    return respond(request, error.status_code, str(error.detail), headers=error.headers)


def _allowed_methods(request: Request) -> set[str]:
    """The union over every operation of this path: the framework names only the first one's."""
    paths = request.app.openapi()["paths"].items()
    found = (operations for path, operations in paths if compile_path(path)[0].match(request.url.path))
    return {method.upper() for operations in found for method in operations}


def _on_anything_else(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return respond(
        request,
        500,
        f"{type(error).__name__} while answering {request.method} {request.url.path}.",
        "The server's log has the traceback.",
    )


class BodyLimit:
    """Refuses a request body of more than ``limit`` bytes with 413, as soon as that is known."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a body that is counted as it is read."""
        declared, received = _declared_length(scope), 0

        async def limited() -> Message:
            nonlocal received
            message = await receive() if declared <= self._limit else {"type": "http.disconnect"}
            received += len(message.get("body", b""))
            if max(declared, received) > self._limit:
                raise HTTPException(413, f"The body is larger than {self._limit} bytes.")
            return message

        await self._app(scope, limited, send)


def _declared_length(scope: Scope) -> int:
    declared = dict(scope.get("headers", ())).get(b"content-length", b"0")
    return int(declared) if declared.isdigit() else 0


def describe(app: FastAPI) -> None:
    """Put the problem document's schema where the responses of every operation refer to it."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schema = ProblemDocument.model_json_schema(ref_template="#/components/schemas/{model}")
        document["components"]["schemas"] |= schema.pop("$defs") | {"ProblemDocument": schema}
        return document

    app.openapi = openapi  # type: ignore[method-assign]
