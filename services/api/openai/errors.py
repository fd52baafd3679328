"""Errors as OpenAI's clients read them: ``{"error": {"message", "type", "param", "code"}}``.

On the paths of OpenAI's API this member is added to the problem document, so that a client of
either kind finds what it looks for.
"""

from __future__ import annotations

from kd.client.wire.problems import OpenAIError, ProblemDetails

#: The beginnings of OpenAI's paths, without /v1.
_BEGINNINGS = ("/files", "/fine_tuning")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


def is_openai_path(path: str) -> bool:
    """Whether the path, with or without /v1, is one of OpenAI's API."""
    plain = path.removeprefix("/v1")
    return any(plain == each or plain.startswith(f"{each}/") for each in _BEGINNINGS)


def describe_error(problem: ProblemDetails, slug: str) -> OpenAIError:
    """Return the error that ``problem`` means; ``slug`` is the end of its type."""
    pointer = problem.errors[0].pointer if problem.errors else ""
    return OpenAIError(
        message=f"{problem.detail} {problem.remedy}".strip(),
        type=_choose_type(problem),
        param=pointer.strip("/").replace("/", ".") or None,
        code=slug.replace("-", "_"),
    )


def _choose_type(problem: ProblemDetails) -> str:
    if problem.quota is not None:
        return "insufficient_quota"
    fallback = "server_error" if problem.status >= 500 else "invalid_request_error"
    return _TYPES.get(problem.status, fallback)
