"""The answers to a client's requests: the models that they hold, and the errors that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from kd.client.errors import Refused
from kd.client.wire.problems import ProblemDetails

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Answer:
    """The answer to a request; ``content`` is empty while its stream is still to be read.

    The names of ``headers`` are in lower case.
    """

    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes = b""

    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
        return 200 <= self.status < 300


def parse_answer(model: type[Model], answer: Answer) -> Model:
    """Return the answer as a ``model``. Raises ``Refused`` if it is something else."""
    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise Refused(
            answer.status,
            f"The response is not a {model.__name__} of Potstill's API: {place}: {first['msg']}.",
            "Check the address of the server, and that client and server have one version.",
        ) from None


def make_refused(answer: Answer) -> Refused:
    """Return the error of an answer that is no success."""
    problem: ProblemDetails | None = None
    # A proxy on the way may answer with a document of another kind.
    if answer.headers.get("content-type", "").startswith("application/problem+json"):
        problem = parse_answer(ProblemDetails, answer)
    detail = (problem.detail if problem is not None else "") or (
        f"The server answers {answer.status} {answer.reason}."
    )
    remedy = problem.remedy if problem is not None else ""
    return Refused(answer.status, detail, remedy, problem, _read_retry_after(answer))


def _read_retry_after(answer: Answer) -> float:
    """Return the seconds of the header Retry-After; 0 without one, and for a date."""
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0
