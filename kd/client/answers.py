"""The answers to a client's requests: the models that they hold, and the errors that they mean."""

from __future__ import annotations

from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from kd.client.errors import Refused
from kd.client.wire.problems import ProblemDetails

Model = TypeVar("Model", bound=BaseModel)


def parse_answer(model: type[Model], answer: httpx.Response) -> Model:
    """Return the answer as a ``model``. Raises ``Refused`` if it is something else."""
    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise Refused(
            answer.status_code,
            f"The response is not a {model.__name__} of Potstill's API: {place}: {first['msg']}.",
            "Check the address of the server, and that client and server have one version.",
        ) from None


def make_refused(answer: httpx.Response) -> Refused:
    """Return the error of an answer that is no success."""
    problem: ProblemDetails | None = None
    # A proxy on the way may answer with a document of another kind.
    if answer.headers.get("content-type", "").startswith("application/problem+json"):
        problem = parse_answer(ProblemDetails, answer)
    detail = (problem.detail if problem is not None else "") or (
        f"The server answers {answer.status_code} {answer.reason_phrase}."
    )
    remedy = problem.remedy if problem is not None else ""
    pause = answer.headers.get("retry-after", "")  # seconds; a date is passed over
    seconds = float(pause) if pause.isdecimal() else 0.0
    return Refused(answer.status_code, detail, remedy, problem, seconds)
