"""Every error of the API as a problem document (RFC 9457): what happened, where, and the remedy."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException

from cache.disk import is_full
from cache.errors import PotstillError, StorageError, locate_help
from cache.json_object import Json
from kd.client.wire.problems import FieldProblem, ProblemDetails
from kd.config.jobfile import translate_errors
from kd.errors import ConfigError, Problem
from services.process.descriptors import REMEDY, lacks_descriptors, tell_shortage
from services.process.logs import request_id, shorten_path
from services.store.connection import describe_failure, name_failure
from services.store.jobs.script import OtherFormat, is_own_mistake

MEDIA_TYPE = "application/problem+json"
#: The Retry-After header while Redis is away.
RETRY_SECONDS = "2"

#: The end of the problem's type and its title, by status.
TITLES = {
    400: ("malformed-request", "The request cannot be read"),
    401: ("unauthenticated", "An API key is needed"),
    403: ("forbidden", "Not allowed"),
    404: ("not-found", "Not found"),
    405: ("method-not-allowed", "Method not allowed"),
    409: ("conflict", "The current state does not allow it"),
    413: ("too-large", "The request is too large"),
    415: ("unsupported-media-type", "The body has the wrong media type"),
    416: ("range-not-satisfiable", "The range is outside of the content"),
    422: ("invalid-job", "The request is not valid"),
    429: ("too-many-requests", "Too many requests"),
    500: ("internal", "Internal error"),
    503: ("store-unavailable", "The job store is not available"),
    507: ("disk-full", "A disk of the service is nearly full"),
}

#: Titles of problems whose status has a title that says something else.
TITLES_OF_SLUGS = {
    "bad-host": "The server does not answer to this name",
    "check-limit": "The check of the job took too much",
    "check-unavailable": "Jobs cannot be checked",
    "descriptors-used-up": "The service has too many files and connections open",
    "disk-full": "A disk of the service is nearly full",
    "key-expired": "The API key has expired",
    "keys-unreadable": "The API keys cannot be read",
    "precondition-unsupported": "The request has a condition that is not supported",
    "reading-limit": "Reading the cache took too much",
    "reading-unavailable": "Caches cannot be looked into",
    "reconciler-stopped": "The reconciler has stopped",
    "store-unsuitable": "The job store would lose jobs",
}

#: Descriptions of the headers that come with a problem, for the OpenAPI document.
HEADERS = {
    401: {"WWW-Authenticate": "How to authenticate: Bearer."},
    429: {"Retry-After": "Seconds to wait."},
    503: {"Retry-After": "Seconds to wait."},
}

#: The remedy where only the description of an operation says what it takes.
_READ_SCHEMA = "GET /openapi.json describes what each operation takes."

log = logging.getLogger("potstill.api")


class ApiProblem(Exception):
    """An error that is answered with a problem document.

    ``slug`` ends the document's ``type``, and defaults to the one of the status. ``members`` are
    further members of the document.
    """

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
        self.status = status
        self.detail = detail
        self.remedy = remedy
        self.slug = slug
        self.errors = tuple(errors)
        self.headers = dict(headers or {})
        self.members = dict(members or {})


#: Descriptions of answers for the OpenAPI document, by status.
Answers = dict[int | str, Json]


def describe_problems(*statuses: int) -> Answers:
    """Describe the problems that an operation may answer with, for the OpenAPI document."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
    found: Answers = {}
    for status in statuses:
        headers = {name: describe_header(text) for name, text in HEADERS.get(status, {}).items()}
        more = {"headers": headers} if headers else {}
        found[status] = {"description": TITLES[status][1], "content": content, **more}
    return found


def describe_header(text: str) -> Json:
    """Describe a header of an answer, for the OpenAPI document."""
    return {"description": text, "schema": {"type": "string"}}


def describe_text(description: str, media_type: str = "text/plain") -> Json:
    """Describe an answer that is text, for the OpenAPI document."""
    content = {media_type: {"schema": {"type": "string"}}}
    return {"content": content, "description": description}


def add_error_handlers(app: FastAPI, routes: Iterable[APIRoute]) -> None:
    """Make ``app`` answer every error with a problem document.

    A 405 names the methods of the ``routes`` that match the path.
    """
    app.state.routes = tuple(routes)
    app.add_exception_handler(ApiProblem, _on_problem)
    app.add_exception_handler(ConfigError, _on_config_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(RedisError, _on_redis_error)
    app.add_exception_handler(StorageError, _on_storage_error)
    app.add_exception_handler(OSError, _on_os_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected_error)


def respond_with_problem(request: Request, problem: ApiProblem) -> JSONResponse:
    """Return ``problem`` as the answer to ``request``."""
    usual, title = TITLES.get(problem.status, ("error", "Error"))
    slug = problem.slug or usual
    document = ProblemDetails(
        type=f"urn:potstill:problem:{slug}",
        help=locate_help(slug),
        title=TITLES_OF_SLUGS.get(problem.slug or "", title),
        status=problem.status,
        detail=problem.detail,
        remedy=problem.remedy,
        instance=request.url.path,
        request_id=request_id.get() or None,
        errors=[FieldProblem(**each.to_json()) for each in problem.errors],
        **problem.members,
    )
    content = document.model_dump(mode="json", exclude_none=True)
    return JSONResponse(content, problem.status, problem.headers, MEDIA_TYPE)


async def _on_problem(request: Request, error: Any) -> Response:
    return respond_with_problem(request, error)


async def _on_config_error(request: Request, error: Any) -> Response:
    count = f"{len(error.problems)} problems: " if len(error.problems) > 1 else ""
    problem = ApiProblem(422, count + error.detail, error.remedy, errors=error.problems)
    return respond_with_problem(request, problem)


async def _on_validation_error(request: Request, error: Any) -> Response:
    return respond_with_problem(request, _translate_validation_error(error))


def _translate_validation_error(error: RequestValidationError) -> ApiProblem:
    """Turn FastAPI's error into a problem of the body, of the parameters, or of the job."""
    items = error.errors()
    if items[0]["type"] == "json_invalid":
        reason = items[0]["ctx"]["error"]
        place = items[0]["loc"][-1]
        detail = f"The body is not JSON: {reason} at character {place}."
        remedy = "Send a JSON object; `kd submit` sends a YAML file as one."
        return ApiProblem(400, detail, remedy)
    # FastAPI hands the body over as bytes if the Content-Type is not JSON.
    if any(isinstance(item.get("input"), bytes) for item in items):
        remedy = "Send it with the header Content-Type: application/json."
        return ApiProblem(415, "The body is not declared as JSON.", remedy)
    problems = []
    inside = []
    for item in items:
        place, *inner = item["loc"]
        if place != "body":
            detail = f"{place} parameter {item['loc'][-1]}: {item['msg']}."
            problems.append(Problem("", detail, _READ_SCHEMA))
        elif not inner and item["type"] == "missing":
            remedy = "Send a job as JSON with Content-Type: application/json."
            problems.append(Problem("", "the request has no body.", remedy))
        else:
            # "body" is no part of the pointer of an error inside the job.
            inside.append({**item, "loc": tuple(inner)})
    problems += translate_errors(inside)
    if all(item["loc"][0] != "body" for item in items):
        detail = " ".join(problem.detail for problem in problems)
        return ApiProblem(422, detail, _READ_SCHEMA, "invalid-parameter", errors=problems)
    whole = ConfigError(problems)
    return ApiProblem(422, whole.detail, whole.remedy, errors=problems)


def make_shortage_problem() -> ApiProblem:
    """Return the 503 for a request that finds no descriptor left, and say so in the log."""
    tell_shortage()
    # A connection that stays open would keep its own descriptor.
    headers = {"Retry-After": RETRY_SECONDS, "Connection": "close"}
    detail = "The service has no descriptor left for another file or connection."
    remedy = f"Try again in a moment. Operator: {REMEDY}"
    return ApiProblem(503, detail, remedy, "descriptors-used-up", headers=headers)


async def _on_os_error(request: Request, error: Any) -> Response:
    if lacks_descriptors(error):
        return respond_with_problem(request, make_shortage_problem())
    raise error


async def _on_redis_error(request: Request, error: Any) -> Response:
    if lacks_descriptors(error):
        return respond_with_problem(request, make_shortage_problem())
    if is_own_mistake(error):
        return await _on_unexpected_error(request, error)
    if isinstance(error, OtherFormat):
        found = error.describe()
        return respond_with_problem(request, ApiProblem(503, found.detail, found.remedy))
    path = shorten_path(request.url.path)
    log.warning("%s %s: the job store %s", request.method, path, describe_failure(error))
    problem = ApiProblem(
        503,
        f"The job store (Redis) {name_failure(error)} ({type(error).__name__}). Running jobs "
        "continue; nothing is lost.",
        "Try again in a moment, with the same Idempotency-Key if you sent one.",
        headers={"Retry-After": RETRY_SECONDS},
    )
    return respond_with_problem(request, problem)


async def _on_storage_error(request: Request, error: Any) -> Response:
    if not is_full(error):
        return await _on_unexpected_error(request, error)
    log.warning("%s %s: %s", request.method, shorten_path(request.url.path), error)
    return respond_with_problem(request, ApiProblem(507, error.detail, error.remedy))


async def _on_http_exception(request: Request, error: Any) -> Response:
    # FastAPI turns every error of reading a body into a 400 of its own; ours say more.
    if isinstance(error.__cause__, ApiProblem):
        return await _on_problem(request, error.__cause__)
    if isinstance(error.__cause__, ConfigError):
        return await _on_config_error(request, error.__cause__)
    status, path = error.status_code, request.url.path
    problem = ApiProblem(status, str(error.detail), _READ_SCHEMA, headers=error.headers)
    if status == 405:
        # The files of a mounted folder name no methods: they can only be read.
        fallback = (error.headers or {}).get("Allow", "GET, HEAD")
        allowed = ", ".join(sorted(_find_allowed_methods(request))) or fallback
        detail = f"{request.method} is not allowed on {path}."
        problem = ApiProblem(405, detail, f"Allowed: {allowed}.", headers={"Allow": allowed})
    elif status == 404:
        remedy = "GET /openapi.json lists all paths."
        problem = ApiProblem(404, f"There is nothing at {path}.", remedy)
    return respond_with_problem(request, problem)


def _find_allowed_methods(request: Request) -> set[str]:
    """Return the methods of all routes of this path; Starlette names only those of the first one.

    If a route has exactly this path, routes that would match it through a parameter do not count.
    """
    # The list of routes holds each path once, without /v1.
    path = request.url.path.removeprefix("/v1")
    matching = [route for route in request.app.state.routes if route.path_regex.match(path)]
    own = [route for route in matching if route.path == path]
    return {method for route in own or matching for method in route.methods}


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    path = shorten_path(request.url.path)
    if isinstance(error, PotstillError):
        log.warning("%s %s: %s", request.method, path, error)
        slug = error.type.replace("_", "-")
        return respond_with_problem(request, ApiProblem(500, error.detail, error.remedy, slug))
    log.error("%s %s failed", request.method, path, exc_info=error)
    detail = f"{type(error).__name__} while answering {request.method} {request.url.path}."
    problem = ApiProblem(500, detail, "The server's log has the traceback.")
    return respond_with_problem(request, problem)
