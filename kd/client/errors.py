"""Errors of the clients of a service.

PotstillError (cache.errors)
├── Unreachable     no server answers, or the connection was cut
├── Refused         the server refuses the request: status, problem document, remedy
└── TimedOut        the job has not ended within the time that the caller gave
"""

from __future__ import annotations

from cache.errors import PotstillError
from kd.client.wire.problems import FieldProblem, ProblemDetails

#: Statuses of a server that only is busy, or away for a while.
TRANSIENT_STATUSES = frozenset({429, 500, 502, 503, 504})
#: The end of the type of a problem that waiting does not solve.
QUOTA = ":quota-exceeded"


class Unreachable(PotstillError):
    """No server answers, or the connection was cut."""

    type = "unreachable"


class Refused(PotstillError):
    """The server refuses a request.

    ``status`` is the HTTP status. ``problem`` is the server's problem document (RFC 9457); None if
    something on the way answered, such as a proxy. ``retry_after`` are the seconds of the header.
    """

    type = "refused"

    def __init__(
        self,
        status: int,
        detail: str,
        remedy: str = "",
        problem: ProblemDetails | None = None,
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(detail, remedy)
        self.status = status
        self.problem = problem
        self.retry_after = retry_after

    @property
    def help(self) -> str:
        """The place of the entry of the server's error."""
        return self.problem.help if self.problem is not None else super().help

    @property
    def errors(self) -> list[FieldProblem]:
        """The wrong fields of the request, each with a JSON pointer; empty if none is named."""
        return self.problem.errors if self.problem is not None else []


class TimedOut(PotstillError, TimeoutError):
    """The job has not ended within the time that the caller gave. It goes on."""

    type = "timed_out"


def is_transient(error: PotstillError) -> bool:
    """Whether the same request may succeed a little later."""
    if not isinstance(error, Refused):
        return isinstance(error, Unreachable)
    exhausted = error.problem is not None and error.problem.type.endswith(QUOTA)
    return error.status in TRANSIENT_STATUSES and not exhausted
