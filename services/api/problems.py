"""Every error of the API as a problem document (RFC 9457): what, where, and what to do."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from redis.exceptions import RedisError, ResponseError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cache.errors import PotstillError
from kd.errors import ConfigError, Problem
from kd.jobfile import problems_of
from services.api.views import ProblemDetails
from services.logs import request_id, shown
from services.schemas import FieldProblem

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = "2"
BODY_BYTES = 1 << 20  #: of one request

TITLES = {
    400: ("malformed-request", "The request cannot be read"),
    401: ("unauthenticated", "An API key is needed"),
    403: ("forbidden", "Not allowed"),
    404: ("not-found", "Not found"),
    405: ("method-not-allowed", "Method not allowed"),
    409: ("conflict", "The state of things does not allow it"),
    413: ("too-large", "The request is too large"),
    415: ("unsupported-media-type", "The body is of another media type"),
    416: ("range-not-satisfiable", "There are no such bytes"),
    422: ("invalid-job", "The request is not valid"),
    429: ("too-many-requests", "Too many requests"),
    500: ("internal", "Internal error"),
    503: ("store-unavailable", "The job store does not answer"),
    507: ("disk-full", "The disk of the data folder is nearly full"),
}

#: Headers that come with a problem, for the OpenAPI description.
HEADERS = {
    401: {"WWW-Authenticate": "How to authenticate: Bearer."},
    429: {"Retry-After": "Seconds to wait."},
    503: {"Retry-After": "Seconds to wait."},
}

log = logging.getLogger("potstill.api")


class ApiProblem(Exception):
    """An answer that is a problem document; ``members`` are further ones of the document."""

    def __init__(
        self,
        status: int,
        detail: str,
        remedy: str = "",
        slug: str | None = None,
        *,
        errors: Iterable[Problem] = (),
        headers: Mapping[str, str] | None = None,
        members: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.remedy, self.slug = status, detail, remedy, slug
        self.errors, self.headers, self.members = tuple(errors), dict(headers or {}), dict(members or {})


Answers = dict[int | str, dict[str, Any]]  #: descriptions for the OpenAPI document, by status


def responses(*statuses: int) -> Answers:
    """The problems that an operation may answer with, for its OpenAPI description."""
    return {status: _described(status) for status in statuses}


def _described(status: int) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/ProblemDetails"}
    described: dict[str, Any] = {"description": TITLES[status][1], "content": {MEDIA_TYPE: {"schema": schema}}}
    if status in HEADERS:
        named = HEADERS[status].items()
        described["headers"] = {name: {"description": text, "schema": {"type": "string"}} for name, text in named}
    return described


def install(app: FastAPI, routes: Iterable[APIRoute]) -> None:
    """Answer every error of ``app`` with a problem document; ``routes`` are those that a 405 may name methods of."""
    app.state.routes = tuple(routes)
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
    members: Mapping[str, Any] | None = None,
) -> Response:
    """The problem document as a response."""
    default_slug, title = TITLES.get(status, ("error", "Error"))
    document = ProblemDetails(
        type=f"urn:potstill:problem:{slug or default_slug}",
        title=title,
        status=status,
        detail=detail,
        remedy=remedy,
        instance=request.url.path,
        request_id=request_id.get() or None,
        errors=[FieldProblem(**problem.to_json()) for problem in errors],
        **(members or {}),
    )
    content = document.model_dump(mode="json", exclude_none=True)
    return JSONResponse(content, status, headers=dict(headers or {}), media_type=MEDIA_TYPE)


async def _on_problem(request: Request, error: Any) -> Response:
    return respond(
        request, error.status, error.detail, error.remedy, error.slug, error.errors, error.headers, error.members
    )


async def _on_config_error(request: Request, error: Any) -> Response:
    count = f"{len(error.problems)} problems: " if len(error.problems) > 1 else ""
    return respond(request, 422, count + error.detail, errors=error.problems)


async def _on_validation_error(request: Request, error: Any) -> Response:
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        detail = f"The body is not JSON: {errors[0]['ctx']['error']} at character {errors[0]['loc'][-1]}."
        return respond(request, 400, detail, "Send a JSON object; kd submit sends a YAML file as one.")
    if any(isinstance(item.get("input"), bytes) for item in errors):
        detail = "The body is not declared as JSON."
        return respond(request, 415, detail, "Send it with the header Content-Type: application/json.")
    elsewhere = {number: problem for number, item in enumerate(errors) if (problem := _beside_the_job(item))}
    inside = [{**item, "loc": item["loc"][1:]} for number, item in enumerate(errors) if number not in elsewhere]
    problems = [*elsewhere.values(), *problems_of(inside)]
    parameters = [problem.detail for item in errors if (problem := _parameter(item))]
    if len(parameters) == len(errors):
        return respond(request, 422, " ".join(parameters), slug="invalid-parameter", errors=problems)
    return respond(request, 422, "; ".join(map(str, problems)), errors=problems)


def _parameter(item: Mapping[str, Any]) -> Problem | None:
    """What is wrong with a parameter of the request."""
    if item["loc"][0] == "body":
        return None
    return Problem("", f"{item['loc'][0]} parameter {item['loc'][-1]}: {item['msg']}.")


def _beside_the_job(item: Mapping[str, Any]) -> Problem | None:
    """What is wrong with a request whose body is no job yet; None for what is wrong inside the job."""
    if (problem := _parameter(item)) is not None:
        return problem
    if item["loc"] == ("body",) and item["type"] == "missing":
        return Problem("", "the request has no body.", "Send a job as JSON with Content-Type: application/json.")
    return None


async def _on_redis_error(request: Request, error: Any) -> Response:
    # A plain ResponseError is a mistake of ours, save for those by which a full server refuses to write.
    if type(error) is ResponseError and not str(error).startswith(("MISCONF", "OOM")):
        return await _on_anything_else(request, error)
    log.warning("%s %s: Redis does not serve: %s", request.method, shown(request.url.path), error)
    detail = f"The job store (Redis) does not serve: {type(error).__name__}. Running jobs go on; nothing is lost."
    headers = {"Retry-After": RETRY_SECONDS}
    return respond(
        request, 503, detail, "Try again in a moment, with the same Idempotency-Key if you sent one.", headers=headers
    )


async def _on_http_exception(request: Request, error: Any) -> Response:
    if error.status_code == 405:  # files of a mounted folder name no methods: they are there to be read
        allowed = ", ".join(sorted(_allowed_methods(request))) or (error.headers or {}).get("Allow", "GET, HEAD")
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
    """The union over every route of this path, of which the framework names only the first one's.

    Where a route has this very path, those whose parameters it could fill do not count.
    """
    path = request.url.path.removeprefix("/v1")
    matching = [route for route in request.app.state.routes if route.path_regex.match(path)]
    own = [route for route in matching if route.path == path]
    return {method for route in own or matching for method in route.methods}


async def _on_anything_else(request: Request, error: Exception) -> Response:
    if isinstance(error, PotstillError):
        log.warning("%s %s: %s", request.method, shown(request.url.path), error)
        return respond(request, 500, error.detail, error.remedy, error.type.replace("_", "-"))
    log.error("%s %s failed", request.method, shown(request.url.path), exc_info=error)
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
